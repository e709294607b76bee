"""Whether modules that were changed compute what they would compute unchanged, bit for bit: looked
at in one step before the change is taken for good."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


class Audit:
    """What was seen.

    Attributes:
        steps: how many were looked at.
    """

    def __init__(self) -> None:
        self._same: dict[str, bool] = {}
        self.steps = 0

    def note(self, name: str, is_same: bool) -> None:
        """Note what a module's call was like."""
        self._same[name] = self._same.get(name, True) and is_same

    def unlike(self, names: set[str]) -> set[str]:
        """Return those modules that have computed something else."""
        return {name for name in names if not self._same.get(name, True)}

    def unseen(self, names: set[str]) -> set[str]:
        """Return those modules of which nothing was seen."""
        return names - self._same.keys()


def are_same(some: Sequence[Tensor | None], others: Sequence[Tensor | None]) -> bool:
    """Return whether tensors are the same bit for bit, in the same layout."""
    return len(some) == len(others) and all(
        one is other or (one is not None and other is not None and _is_same(one, other))
        for one, other in zip(some, others, strict=True)
    )


def layout_of(tensor: Tensor) -> tuple[int, ...]:
    """Return the strides that matter."""
    return tuple(
        stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if size > 1
    )


def _is_same(one: Tensor, other: Tensor) -> bool:
    if one.shape != other.shape or one.dtype != other.dtype or layout_of(one) != layout_of(other):
        return False
    return torch.equal(_bytes(one), _bytes(other))


def _bytes(tensor: Tensor) -> Tensor:
    # Not the values: what is not a number is unlike itself.
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)
