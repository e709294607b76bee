"""Uniform quantisation to signed levels. A payload has steps as float32, then the codes.

A step is the distance between adjacent levels. A payload has a step for each block, or one for the
whole gradient. If one of their values is not finite, the step is NaN, and all of them decode to
NaN. Codes are two's complement numbers of 2, 4 or 8 bits, packed as in `layout`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lightning_dlres.kernels.gradients.layout import (
    block_numbers,
    blocks,
    float_array,
    run,
    word_array,
    words,
)


def payload_bytes(count: int, bits: int, *, per_block: bool = True) -> int:
    """Return the bytes of a payload.

    Args:
        count: Number of elements.
        bits: Bits of a code: 2, 4 or 8.
        per_block: True if each block has a step, False if there is one for the whole gradient.
    """
    return 4 * (blocks(count) if per_block else 1) + 4 * words(count, bits)


def encode_nearest(
    gradient: Tensor, residual: Tensor, payload: Tensor, scale: float, bits: int
) -> None:
    """Write a payload with a step per block, and update the residual.

    Each element is rounded to the nearest level.

    Args:
        gradient: float32[n], contiguous.
        residual: float32[n], updated in place; unchanged in blocks with a value that is not finite.
        payload: uint8[payload_bytes(n, bits)].
        scale: Power of two by which the gradient is multiplied.
        bits: 4 or 8.
    """
    count = gradient.numel()
    steps, codes = _parts(payload, blocks(count))
    if gradient.is_cuda:
        from lightning_dlres.kernels.gradients import levels_cuda

        levels_cuda.encode_nearest(gradient, residual, steps, codes, scale, bits)
        return
    from lightning_dlres.kernels.gradients import levels_cpu

    run(
        levels_cpu.encode_nearest,
        count,
        bits,
        elements=[float_array(gradient), float_array(residual)],
        per_block=[float_array(steps)],
        codes=word_array(codes),
        options=[scale, bits],
    )


def encode_stochastic(
    gradient: Tensor,
    payload: Tensor,
    scale: float,
    *,
    bits: int,
    seed: int,
    step: Tensor | None = None,
) -> None:
    """Write a payload, with random rounding whose expected value is the gradient.

    Args:
        gradient: float32[n], contiguous.
        payload: uint8[payload_bytes(n, bits, per_block=step is None)].
        scale: Power of two by which the gradient is multiplied.
        bits: 2, 4 or 8.
        seed: Seed of the random numbers.
        step: float32[1]: step of the whole gradient, already multiplied by `scale`. None: a step
            per block, from the block's largest magnitude.
    """
    count = gradient.numel()
    steps, codes = _parts(payload, blocks(count) if step is None else 1)
    if step is not None:
        steps.copy_(step)
    if gradient.is_cuda:
        from lightning_dlres.kernels.gradients import levels_cuda

        levels_cuda.encode_stochastic(gradient, steps, codes, scale, bits, seed, step is None)
        return
    from lightning_dlres.kernels.gradients import levels_cpu

    step_array = float_array(steps)
    run(
        levels_cpu.encode_stochastic,
        count,
        bits,
        elements=[float_array(gradient)],
        per_block=[
            # The random numbers of an element depend on the number of its block.
            block_numbers(count),
            step_array if step is None else step_array.repeat(blocks(count)),
        ],
        codes=word_array(codes),
        options=[scale, bits, seed & 0xFFFFFFFF, step is None],
    )


def decode(
    payload: Tensor,
    out: Tensor,
    scale: float,
    accumulate: bool,
    *,
    bits: int,
    per_block: bool = True,
) -> None:
    """Write or add the decoded values.

    Args:
        payload: uint8[payload_bytes(n, bits, per_block=per_block)].
        out: float32[n], contiguous.
        scale: Factor of the decoded values.
        accumulate: Add to `out`.
        bits: Bits of a code: 2, 4 or 8.
        per_block: True if each block has a step, False if there is one for the whole gradient.
    """
    count = out.numel()
    steps, codes = _parts(payload, blocks(count) if per_block else 1)
    if out.is_cuda:
        from lightning_dlres.kernels.gradients import levels_cuda

        levels_cuda.decode(out, steps, codes, scale, bits, accumulate)
        return
    from lightning_dlres.kernels.gradients import levels_cpu

    step_array = float_array(steps)
    run(
        levels_cpu.decode,
        count,
        bits,
        elements=[float_array(out)],
        per_block=[step_array if per_block else step_array.repeat(blocks(count))],
        codes=word_array(codes),
        options=[scale, bits, accumulate],
    )


def _parts(payload: Tensor, step_count: int) -> tuple[Tensor, Tensor]:
    """Return the steps and the codes of a payload."""
    return payload[: 4 * step_count].view(torch.float32), payload[4 * step_count :]
