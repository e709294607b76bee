"""Whether modules that were changed compute what they would compute unchanged, bit for bit: looked
at in one step before the change is taken for good."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


class Audit:
    """What was seen in one step."""

    def __init__(self) -> None:
        self._same: dict[str, bool] = {}

    def note(self, name: str, is_same: bool) -> None:
        """Note what a module's call was like."""
        self._same[name] = self._same.get(name, True) and is_same

    def failed(self, names: set[str]) -> set[str]:
        """Return those modules that were unlike, or were not seen."""
        return {name for name in names if not self._same.get(name, False)}


def are_same(some: Sequence[Tensor | None], others: Sequence[Tensor | None]) -> bool:
    """Return whether tensors are the same bit for bit."""
    return len(some) == len(others) and all(
        one is other or (one is not None and other is not None and _is_same(one, other))
        for one, other in zip(some, others, strict=True)
    )


def _is_same(one: Tensor, other: Tensor) -> bool:
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    return torch.equal(_bytes(one), _bytes(other))


def _bytes(tensor: Tensor) -> Tensor:
    # Not the values: what is not a number is unlike itself.
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)
