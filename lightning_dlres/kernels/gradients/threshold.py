"""Threshold quantisation to 2 bits. A payload has the threshold as float32, then the codes.

Codes are packed as in `layout`: 0 is zero, 1 is +threshold, 2 is -threshold, and 3 is NaN.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lightning_dlres.kernels.gradients.layout import blocks, float_array, run, word_array, words

BITS = 2
_HEADER_BYTES = 4


def payload_bytes(count: int) -> int:
    """Return the bytes of a payload of `count` elements."""
    return _HEADER_BYTES + 4 * words(count, BITS)


def encode(
    gradient: Tensor, residual: Tensor, payload: Tensor, threshold: Tensor, scale: float
) -> Tensor:
    """Write a payload, and update the residual; return the mean magnitude of a sample.

    Args:
        gradient: float32[n], contiguous.
        residual: float32[n], updated in place. Elements whose value is not finite keep theirs.
        payload: uint8[payload_bytes(n)].
        threshold: float32[1], positive.
        scale: Power of two by which the gradient is multiplied.
    """
    from lightning_dlres.kernels.gradients import threshold_cpu as cpu

    count = gradient.numel()
    payload[:_HEADER_BYTES].view(torch.float32).copy_(threshold)
    sums = torch.zeros(blocks(count), 2)
    arrays = float_array(gradient), float_array(residual), word_array(payload[_HEADER_BYTES:])
    magnitudes, value = sums.numpy(), float(threshold)

    def loop(first: int, stop: int) -> None:
        gradients, residuals, codes = arrays
        cpu.encode(
            gradients[first:stop],
            residuals[first:stop],
            codes[words(first, BITS) : words(stop, BITS)],
            magnitudes[blocks(first) : blocks(stop)],
            scale,
            value,
            blocks(first),
        )

    run(count, loop)
    sums_of_blocks = sums.sum(0, dtype=torch.float64)
    return (sums_of_blocks[0] / sums_of_blocks[1].clamp(min=1)).to(torch.float32)


def decode(payload: Tensor, out: Tensor, scale: float, accumulate: bool) -> None:
    """Write or add the decoded values.

    Args:
        payload: uint8[payload_bytes(n)].
        out: float32[n], contiguous.
        scale: Factor of the decoded values.
        accumulate: Add to `out`.
    """
    from lightning_dlres.kernels.gradients import threshold_cpu as cpu

    threshold = float(payload[:_HEADER_BYTES].view(torch.float32)) * scale
    codes, values = word_array(payload[_HEADER_BYTES:]), float_array(out)
    run(
        out.numel(),
        lambda first, stop: cpu.decode(
            codes[words(first, BITS) : words(stop, BITS)], values[first:stop], threshold, accumulate
        ),
    )
