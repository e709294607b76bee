"""Threshold quantisation to 2 bits. A payload has the threshold as float32, then the codes.

Codes are packed as in `layout`: 0 is zero, 1 is +threshold, 2 is -threshold, and 3 is NaN.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from lightning_dlres.kernels.gradients.layout import (
    LARGEST,
    Array,
    block_numbers,
    blocks,
    float_array,
    run,
    word_array,
    words,
)

BITS = 2
# Planes of a block, see `layout`.
PLANES = 32 // BITS
# The upper bits of a product with this odd number depend on all bits of the other factor (Knuth).
MULTIPLIER, PLANE_SHIFT = 0x9E3779B1, 28
_HEADER_BYTES, _HEADER_WORDS = 4, 1
# Smallest threshold in a payload: the smallest normal float32. With a threshold of zero, elements
# of zero would be sent, too.
SMALLEST = float(np.finfo(np.float32).tiny)
# Codes: 0 is zero.
POSITIVE, NEGATIVE, NOT_FINITE = 1, 2, 3


def payload_bytes(count: int) -> int:
    """Return the bytes of a payload of `count` elements."""
    return _HEADER_BYTES + 4 * words(count, BITS)


def first_plane(threshold_bits: int) -> int:
    """Return the plane of the first block whose magnitudes are measured.

    It differs from call to call: otherwise the rest of a block would never be measured. It follows
    from the threshold, so that a call with the same state repeats exactly.

    Args:
        threshold_bits: Bits of the threshold, a float32.
    """
    return (threshold_bits * MULTIPLIER & 0xFFFFFFFF) >> PLANE_SHIFT


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
        threshold: float32[1], at least 0; updated in place if `multiple` is given.
        scale: Power of two by which the gradient is multiplied.
        multiple: None keeps the threshold. The payload then has `SMALLEST` in place of zero. With a
            number, a threshold of zero is first set to this multiple of the gradient's mean
            magnitude. After encoding, the next call's threshold is set to this multiple of the mean
            magnitude of gradient plus residual, measured on a sixteenth of the elements.
    """
    count, device = gradient.numel(), gradient.device
    if gradient.is_cuda:
        sums = torch.empty(blocks(count), 2, dtype=torch.float64, device=device)
        header, codes = _parts(payload)
        from lightning_dlres.kernels.gradients import threshold_cuda

        if multiple is not None:
            threshold_cuda.start(gradient, sums, threshold, scale, multiple)
        threshold_cuda.encode(gradient, residual, sums, codes, header, threshold, scale)
        if multiple is not None:
            threshold_cuda.adapt(sums, threshold, multiple)
        return
    from lightning_dlres.kernels.gradients import threshold_cpu

    # NumPy, because every torch operation releases the interpreter's lock, and then waits for the
    # threads that compute and transfer other gradients.
    values, current, packed = float_array(gradient), float_array(threshold), word_array(payload)
    per_block = np.empty((blocks(count), 2))
    if multiple is not None and not current[0]:
        run(
            threshold_cpu.magnitudes,
            count,
            BITS,
            elements=[values],
            per_block=[per_block],
            options=[scale],
        )
        _adapt(per_block, current, multiple)
    header_array = packed[:_HEADER_WORDS].view(np.float32)
    np.maximum(current, SMALLEST, out=header_array)
    run(
        threshold_cpu.encode,
        count,
        BITS,
        elements=[values, float_array(residual)],
        per_block=[block_numbers(count), per_block],
        codes=packed[_HEADER_WORDS:],
        options=[scale, float(header_array[0]), first_plane(int(current.view(np.uint32)[0]))],
    )
    if multiple is not None:
        _adapt(per_block, current, multiple)


def decode(payload: Tensor, out: Tensor, scale: float, accumulate: bool) -> None:
    """Write or add the decoded values.

    Args:
        payload: uint8[payload_bytes(n)].
        out: float32[n], contiguous.
        scale: Factor of the decoded values.
        accumulate: Add to `out`.
    """
    if out.is_cuda:
        from lightning_dlres.kernels.gradients import threshold_cuda

        header, codes = _parts(payload)
        threshold_cuda.decode(out, header, codes, scale, accumulate)
        return
    from lightning_dlres.kernels.gradients import threshold_cpu

    packed = word_array(payload)
    run(
        threshold_cpu.decode,
        out.numel(),
        BITS,
        elements=[float_array(out)],
        codes=packed[_HEADER_WORDS:],
        options=[float(packed[:_HEADER_WORDS].view(np.float32)[0]), scale, accumulate],
    )


def _parts(payload: Tensor) -> tuple[Tensor, Tensor]:
    """Return the header and the codes of a payload on a GPU."""
    return payload[:_HEADER_BYTES].view(torch.float32), payload[_HEADER_BYTES:]


def _adapt(sums: Array, threshold: Array, multiple: float) -> None:
    """Set the threshold to a multiple of a mean, on the CPU.

    Args:
        sums: float64[blocks, 2]: sum and number of the magnitudes of each block.
        threshold: float32[1].
        multiple: Factor of the mean.
    """
    from lightning_dlres.kernels.gradients import sums_cpu

    result = np.empty(2)
    sums_cpu.totals(sums, result)
    # With an infinite threshold, no later element would be sent.
    threshold[0] = min(result[0] / max(result[1], 1.0) * multiple, LARGEST)
