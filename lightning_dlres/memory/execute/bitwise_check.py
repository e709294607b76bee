"""Bitwise comparison of patched modules with unpatched ones, before a patch is used for training.

In a step with this check, training uses the original result. The patched result is only compared
with it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


class BitwiseCheck:
    """Results of the comparison, by module name.

    Attributes:
        steps: Number of steps that were compared.
    """

    def __init__(self) -> None:
        self._is_exact: dict[str, bool] = {}
        self.steps = 0

    def record(self, name: str, is_exact: bool) -> None:
        """Record the comparison of one call of a module. One inexact call is enough to fail."""
        self._is_exact[name] = self._is_exact.get(name, True) and is_exact

    def differing(self, names: set[str]) -> set[str]:
        """Return the modules that computed different bits."""
        return {name for name in names if not self._is_exact.get(name, True)}

    def unchecked(self, names: set[str]) -> set[str]:
        """Return the modules that no step has compared."""
        return names - self._is_exact.keys()


def are_same(some: Sequence[Tensor | None], others: Sequence[Tensor | None]) -> bool:
    """Return whether two sequences of tensors agree bit for bit, and in memory layout."""
    return len(some) == len(others) and all(
        one is other or (one is not None and other is not None and _is_same(one, other))
        for one, other in zip(some, others, strict=True)
    )


def layout_of(tensor: Tensor) -> tuple[int, ...]:
    """Return the strides of the dimensions with more than one element; others have no effect."""
    return tuple(
        stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if size > 1
    )


def _is_same(one: Tensor, other: Tensor) -> bool:
    if one.shape != other.shape or one.dtype != other.dtype or layout_of(one) != layout_of(other):
        return False
    return torch.equal(_bytes(one), _bytes(other))


def _bytes(tensor: Tensor) -> Tensor:
    # Bytes, not values: NaN does not equal itself, and -0.0 equals 0.0.
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)
