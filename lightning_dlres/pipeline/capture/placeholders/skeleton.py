"""Trees without their tensors, from which placeholders are made."""

from __future__ import annotations

from typing import Any

import msgspec
import torch
from torch import Tensor

from lightning_dlres.core.wire.tree import Structure, Tree, flatten

# Shape, dtype and `requires_grad` of a tensor.
Meta = tuple[tuple[int, ...], str, bool]


class Skeleton(msgspec.Struct, frozen=True, array_like=True):
    """A tree without its tensors.

    Attributes:
        structure: Structure of the tree.
        tensors: Description of each tensor.
    """

    structure: Structure
    tensors: list[Meta]

    @classmethod
    def of(cls, tree: Tree) -> Skeleton:
        """Return the skeleton of a tree.

        Raises:
            ConfigError: If the tree has an object that is neither data nor a container of data.
        """
        structure, tensors = flatten(tree)
        return cls(structure, [meta_of(tensor) for tensor in tensors])

    def with_samples(self, old: int, new: int) -> Skeleton:
        """Return the skeleton with another number of samples, the size of the first dimension."""
        return Skeleton(
            self.structure,
            [
                ((new, *shape[1:]) if shape[:1] == (old,) else shape, dtype, requires_grad)
                for shape, dtype, requires_grad in self.tensors
            ],
        )


def meta_of(tensor: Tensor) -> Meta:
    """Return the description of a tensor."""
    return tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."), tensor.requires_grad


def placeholder(meta: Meta, device: torch.device) -> Any:
    """Return an ordinary tensor with one element of memory.

    A FakeTensor would not do: user code may ask for its class, and take another path.
    """
    shape, dtype, requires_grad = meta
    tensor = torch.zeros((), dtype=getattr(torch, dtype), device=device).expand(shape)
    return tensor.requires_grad_(requires_grad)
