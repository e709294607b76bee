"""Formula of a layer: its forward, and a backward that can overwrite the layer's input.

Backward computes the gradients of the parameters first. After that nothing reads the input, so its
memory is free for the input's own gradient.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

# An input's gradient is computed in parts where a kernel cannot write it in place. A part has at
# most 1/PARTS of the input's rows, but at least one row, and takes as much temporary memory.
PARTS = 8

# Tensors that a formula's backward needs beside its input and parameters.
Extras = tuple[Tensor, ...]
# Parameters of a layer, such as (weight, bias); None for one that the layer does not have.
Params = tuple[Tensor | None, ...]


@dataclass(frozen=True)
class BackwardCall:
    """Arguments of a formula's backward.

    Attributes:
        gradient: Gradient of the output.
        x: Input.
        params: Parameters.
        extras: Extra tensors that forward has returned.
        needs_gradient: Whether each parameter's gradient is needed.
        out: Tensor to write the input's gradient to. It has the input's layout, and may share the
            input's memory. None: that gradient is not needed.
    """

    gradient: Tensor
    x: Tensor
    params: Params
    extras: Extras
    needs_gradient: Sequence[bool]
    out: Tensor | None


class Formula(Protocol):
    """Computation of one call of a layer."""

    @property
    def extra_copies(self) -> float:
        """Return the bytes copied beyond plain training, as a multiple of the input's bytes."""

    def forward(self, x: Tensor, params: Params) -> tuple[Tensor, Extras]:
        """Return the output, and the tensors that backward needs beside input and parameters."""

    def backward(self, call: BackwardCall) -> tuple[Tensor | None, ...]:
        """Write the input's gradient to `call.out`, and return those of the parameters."""

    def differentiable_forward(self, x: Tensor, params: Params) -> Tensor:
        """Return the output, computed by PyTorch's own operation, without side effects."""

    def reusable_bytes(self, x: Tensor) -> int:
        """Return the bytes of the input's gradient that need no memory beside the input's."""


def parts(count: int) -> Iterator[slice]:
    """Yield consecutive slices that cover `count` rows."""
    step = max(1, count // PARTS)
    for start in range(0, count, step):
        yield slice(start, min(start + step, count))


def bytes_but_largest_part(x: Tensor, rows: int) -> int:
    """Return a tensor's bytes less those of the largest of its `parts`."""
    row = x.nbytes // max(rows, 1)
    return x.nbytes - row * max(1, rows // PARTS)
