"""One-bit quantisation. A payload has two means per block as float32, then the signs.

The first mean is that of the values of at least 0, the second that of the others. The means of a
block that is not finite are NaN. Signs are packed as in `layout`: 1 for values of at least 0.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from lightning_dlres.kernels.gradients.layout import (
    Array,
    blocks,
    float_array,
    run,
    word_array,
    words,
)

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
    count = gradient.numel()
    if gradient.is_cuda:
        from lightning_dlres.kernels.gradients import sign_cuda

        means, codes = _parts(payload, count)
        sign_cuda.encode(gradient, residual, means, codes, scale)
        return
    from lightning_dlres.kernels.gradients import sign_cpu

    block_means, words_of_codes = _arrays(payload, count)
    run(
        sign_cpu.encode,
        count,
        BITS,
        elements=[float_array(gradient), float_array(residual)],
        per_block=[block_means],
        codes=words_of_codes,
        options=[scale],
    )


def decode(payload: Tensor, out: Tensor, scale: float, accumulate: bool) -> None:
    """Write or add the decoded values; see `threshold.decode`."""
    count = out.numel()
    if out.is_cuda:
        from lightning_dlres.kernels.gradients import sign_cuda

        means, codes = _parts(payload, count)
        sign_cuda.decode(out, means, codes, scale, accumulate)
        return
    from lightning_dlres.kernels.gradients import sign_cpu

    block_means, words_of_codes = _arrays(payload, count)
    run(
        sign_cpu.decode,
        count,
        BITS,
        elements=[float_array(out)],
        per_block=[block_means],
        codes=words_of_codes,
        options=[scale, accumulate],
    )


def _arrays(payload: Tensor, count: int) -> tuple[Array, Array]:
    """Return the means and the codes of a payload on the CPU.

    They are no views of tensors: every torch operation releases the interpreter's lock, and then
    waits for the threads that compute and transfer other gradients.
    """
    packed, mean_words = word_array(payload), _MEANS_BYTES // 4 * blocks(count)
    return packed[:mean_words].view(np.float32).reshape(-1, 2), packed[mean_words:]


def _parts(payload: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Return the means and the codes of a payload on a GPU."""
    size = _MEANS_BYTES * blocks(count)
    return payload[:size].view(torch.float32), payload[size:]
