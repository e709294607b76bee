"""Threshold quantisation to 2 bits. A payload has the threshold as float32, then the codes.

Codes are packed as in `layout`: 0 is zero, 1 is +threshold, 2 is -threshold, and 3 is NaN.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from lightning_dlres.kernels.gradients.layout import (
    blocks,
    double_array,
    float_array,
    run,
    word_array,
    words,
)

BITS = 2
_HEADER_BYTES = 4
# Smallest threshold: zero would send every element.
SMALLEST = float(np.finfo(np.float32).tiny)
# Largest threshold: an infinite one would be no state to save, and would send nothing.
LARGEST = float(np.finfo(np.float32).max)


def payload_bytes(count: int) -> int:
    """Return the bytes of a payload of `count` elements."""
    return _HEADER_BYTES + 4 * words(count, BITS)


def encode(
    gradient: Tensor,
    residual: Tensor,
    payload: Tensor,
    threshold: Tensor,
    scale: float,
    multiple: float | None = None,
) -> None:
    """Write a payload, and update the residual and the threshold.

    Args:
        gradient: float32[n], contiguous.
        residual: float32[n], updated in place. Elements whose value is not finite keep theirs.
        payload: uint8[payload_bytes(n)].
        threshold: float32[1], at least 0. Zero stands for the smallest positive threshold.
        scale: Power of two by which the gradient is multiplied.
        multiple: The threshold becomes this multiple of the mean magnitude of gradient plus
            residual, measured on a sixteenth of the elements. A threshold of zero is first set to
            the multiple of the gradient's mean magnitude. None keeps the threshold.
    """
    count, device = gradient.numel(), gradient.device
    sums = torch.empty(blocks(count), 2, dtype=torch.float64, device=device)
    header, codes = payload[:_HEADER_BYTES].view(torch.float32), payload[_HEADER_BYTES:]
    if gradient.is_cuda:
        from lightning_dlres.kernels.gradients import threshold_cuda

        if multiple is not None:
            threshold_cuda.start(gradient, sums, threshold, scale, multiple)
        threshold_cuda.encode(gradient, residual, sums, codes, header, threshold, scale)
        if multiple is not None:
            threshold_cuda.adapt(sums, threshold, multiple)
        return
    from lightning_dlres.kernels.gradients import threshold_cpu

    values, per_block = float_array(gradient), double_array(sums)
    if multiple is not None and not threshold:
        run(
            threshold_cpu.magnitudes,
            count,
            BITS,
            elements=[values],
            per_block=[per_block],
            options=[scale],
        )
        _adapt(sums, threshold, multiple)
    torch.clamp(threshold, min=SMALLEST, out=header)
    run(
        threshold_cpu.encode,
        count,
        BITS,
        elements=[values, float_array(residual)],
        per_block=[np.arange(blocks(count)), per_block],
        codes=word_array(codes),
        options=[scale, float(header)],
    )
    if multiple is not None:
        _adapt(sums, threshold, multiple)


def decode(payload: Tensor, out: Tensor, scale: float, accumulate: bool) -> None:
    """Write or add the decoded values.

    Args:
        payload: uint8[payload_bytes(n)].
        out: float32[n], contiguous.
        scale: Factor of the decoded values.
        accumulate: Add to `out`.
    """
    header, codes = payload[:_HEADER_BYTES].view(torch.float32), payload[_HEADER_BYTES:]
    if out.is_cuda:
        from lightning_dlres.kernels.gradients import threshold_cuda

        threshold_cuda.decode(out, header, codes, scale, accumulate)
        return
    from lightning_dlres.kernels.gradients import threshold_cpu

    run(
        threshold_cpu.decode,
        out.numel(),
        BITS,
        elements=[float_array(out)],
        codes=word_array(codes),
        options=[float(header), scale, accumulate],
    )


def _adapt(sums: Tensor, threshold: Tensor, multiple: float) -> None:
    """Set the threshold to a multiple of a mean, on the CPU.

    Args:
        sums: float64[blocks, 2]: sum and number of the magnitudes of each block.
        threshold: float32[1].
        multiple: Factor of the mean.
    """
    from lightning_dlres.kernels.gradients import sums_cpu

    result = torch.empty(2, dtype=torch.float64)
    sums_cpu.totals(double_array(sums), double_array(result))
    mean = result[0] / result[1].clamp(min=1)
    threshold.copy_((mean * multiple).clamp(max=LARGEST))
