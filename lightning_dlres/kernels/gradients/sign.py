"""One-bit quantisation. A payload has two means per block as float32, then the signs.

The first mean is that of the values of at least 0, the second that of the others. The means of a
block that is not finite are NaN. Signs are packed as in `layout`: 1 for values of at least 0.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lightning_dlres.kernels.gradients.layout import blocks, float_array, run, word_array, words

BITS = 1
_MEANS_BYTES = 8


def payload_bytes(count: int) -> int:
    """Return the bytes of a payload of `count` elements."""
    return _MEANS_BYTES * blocks(count) + 4 * words(count, BITS)


def encode(gradient: Tensor, residual: Tensor, payload: Tensor, scale: float) -> None:
    """Write a payload, and update the residual.

    Args:
        gradient: float32[n], contiguous.
        residual: float32[n], updated in place. Blocks that are not finite keep theirs.
        payload: uint8[payload_bytes(n)].
        scale: Power of two by which the gradient is multiplied.
    """
    from lightning_dlres.kernels.gradients import sign_cpu as cpu

    means, codes = _parts(payload, gradient.numel())
    values, errors = float_array(gradient), float_array(residual)
    run(
        gradient.numel(),
        lambda first, stop: cpu.encode(
            values[first:stop],
            errors[first:stop],
            means[blocks(first) : blocks(stop)],
            codes[words(first, BITS) : words(stop, BITS)],
            scale,
        ),
    )


def decode(payload: Tensor, out: Tensor, scale: float, accumulate: bool) -> None:
    """Write or add the decoded values; see `threshold.decode`."""
    from lightning_dlres.kernels.gradients import sign_cpu as cpu

    means, codes = _parts(payload, out.numel())
    values = float_array(out)
    run(
        out.numel(),
        lambda first, stop: cpu.decode(
            means[blocks(first) : blocks(stop)],
            codes[words(first, BITS) : words(stop, BITS)],
            values[first:stop],
            scale,
            accumulate,
        ),
    )


def _parts(payload: Tensor, count: int) -> tuple[Any, Any]:
    size = _MEANS_BYTES * blocks(count)
    means = float_array(payload[:size].view(torch.float32)).reshape(-1, 2)
    return means, word_array(payload[size:])
