"""Trees without their tensors, from which placeholders are made."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec
import torch
from torch import Tensor

from lightning_dlres.core.wire.tree import Structure, Tree, flatten

# Shape, dtype and `requires_grad` of a tensor.
Meta = tuple[tuple[int, ...], str, bool]
# A dimension, and its size divided by the number of samples.
SampleDim = tuple[int, int]


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

    def without_samples(self, samples: int, dims: Mapping[int, Sequence[SampleDim]]) -> Skeleton:
        """Return the skeleton without the number of samples, for all micro-batches.

        Args:
            samples: The number of samples.
            dims: Dimensions that are a multiple of the samples, by the position of a tensor.
        """
        described = []
        for position, (shape, dtype, requires_grad) in enumerate(self.tensors):
            sizes = list(shape)
            for dim, factor in dims.get(position, ()):
                if (dim, factor) == (0, 1) or sizes[dim] == factor * samples:
                    sizes[dim] = -factor
            described.append((tuple(sizes), dtype, requires_grad))
        return Skeleton(self.structure, described)

    def with_samples(self, samples: int) -> Skeleton:
        """Return the skeleton for a number of samples, given the result of `without_samples`."""
        described = [
            (tuple(-size * samples if size < 0 else size for size in shape), dtype, requires_grad)
            for shape, dtype, requires_grad in self.tensors
        ]
        return Skeleton(self.structure, described)


def meta_of(tensor: Tensor) -> Meta:
    """Return the description of a tensor."""
    return tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."), tensor.requires_grad


def placeholder(meta: Meta, device: torch.device, *, is_marked: bool = False) -> Tensor:
    """Return an ordinary tensor with one element of memory.

    A FakeTensor would not do: user code may ask for its class, and take another path.

    Args:
        meta: Description of the tensor.
        device: Its device.
        is_marked: True for values that are no numbers, if the dtype has them.
    """
    shape, dtype_name, requires_grad = meta
    dtype = getattr(torch, dtype_name)
    value = float("nan") if is_marked and dtype.is_floating_point else 0
    # As many dimensions, because a guard of user code takes a number for a weight of the loss.
    element = torch.full([1] * len(shape), value, dtype=dtype, device=device)
    tensor = element.expand(shape)
    return tensor.requires_grad_(requires_grad)
