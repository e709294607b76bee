"""Trees without their tensors, from which placeholders are made."""

from __future__ import annotations

from collections.abc import Collection
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

    def positions(self, samples: int) -> list[int]:
        """Return the positions of tensors whose first dimension has a size."""
        return [i for i, (shape, _, _) in enumerate(self.tensors) if shape[:1] == (samples,)]

    def with_samples(self, samples: int, positions: Collection[int]) -> Skeleton:
        """Return the skeleton with another size of the first dimension of some tensors."""
        return Skeleton(
            self.structure,
            [
                ((samples, *shape[1:]) if i in positions else shape, dtype, requires_grad)
                for i, (shape, dtype, requires_grad) in enumerate(self.tensors)
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
