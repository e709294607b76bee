"""What a kind of layer computes: forward, and backward in an order in which its input's memory is
free when the input's gradient is written (Method A, A6)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

# What goes through memory of its own on the way to the input's memory is so small a part of it.
PARTS = 8

Extras = tuple[Tensor, ...]
Params = tuple[Tensor | None, ...]


@dataclass(frozen=True)
class Backward:
    """What a backward is given.

    Attributes:
        gradient: of the output.
        x, params, extras: see `Formula.forward`.
        wanted: which parameters' gradients are.
        into: the input's gradient is written there, like `x` and perhaps the same memory; None: it
            is not wanted.
    """

    gradient: Tensor
    x: Tensor
    params: Params
    extras: Extras
    wanted: Sequence[bool]
    into: Tensor | None


class Formula(Protocol):
    """One call of a layer."""

    @property
    def copies(self) -> float:
        """Return how often the input's bytes are copied more than in plain training."""

    def forward(self, x: Tensor, params: Params) -> tuple[Tensor, Extras]:
        """Return the output, and what backward needs beside the input and the parameters."""

    def backward(self, call: Backward) -> tuple[Tensor | None, ...]:
        """Write the input's gradient, and return those of the parameters."""

    def plain(self, x: Tensor, params: Params) -> Tensor:
        """Return the output by what autograd can follow, changing nothing."""

    def spare(self, x: Tensor) -> int:
        """Return how many bytes of the input's gradient need no memory beside the input's."""


def parts(count: int) -> Iterator[slice]:
    """Yield slices that cover so many rows, one after another."""
    step = max(1, count // PARTS)
    for start in range(0, count, step):
        yield slice(start, min(start + step, count))


def spare_bytes(x: Tensor, rows: int) -> int:
    """Return the bytes of a tensor but for the largest part of so many rows."""
    row = x.nbytes // max(rows, 1)
    return x.nbytes - row * max(1, rows // PARTS)
