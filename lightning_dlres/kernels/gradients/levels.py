"""Uniform quantisation to signed levels. A payload has scales as float32, then the codes.

A scale is the distance of two levels: of each block, or of the whole gradient. The scale of values
that are not finite is NaN, which makes all of them NaN. Codes are two's complement numbers of 2, 4
or 8 bits, packed as in `layout`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lightning_dlres.kernels.gradients.layout import blocks, float_array, run, word_array, words


def payload_bytes(count: int, bits: int, *, per_block: bool = True) -> int:
    """Return the bytes of a payload of `count` elements."""
    return 4 * (blocks(count) if per_block else 1) + 4 * words(count, bits)


def encode_nearest(
    gradient: Tensor, residual: Tensor, payload: Tensor, scale: float, bits: int
) -> None:
    """Write a payload with a scale per block, rounded to nearest, and update the residual.

    Args:
        gradient: float32[n], contiguous.
        residual: float32[n], updated in place. Blocks that are not finite keep theirs.
        payload: uint8[payload_bytes(n, bits)].
        scale: Power of two by which the gradient is multiplied.
        bits: 4 or 8.
    """
    from lightning_dlres.kernels.gradients import levels_cpu as cpu

    scales, codes = _parts(payload, blocks(gradient.numel()))
    values, errors = float_array(gradient), float_array(residual)
    run(
        gradient.numel(),
        lambda first, stop: cpu.encode_nearest(
            values[first:stop],
            errors[first:stop],
            scales[blocks(first) : blocks(stop)],
            codes[words(first, bits) : words(stop, bits)],
            scale,
            bits,
        ),
    )


def encode_stochastic(
    gradient: Tensor, scales: Tensor, payload: Tensor, scale: float, bits: int, seed: int
) -> None:
    """Write a payload, rounded so that the expected value is the gradient.

    Args:
        gradient: float32[n], contiguous.
        scales: float32[blocks(n)] or float32[1]: distance of two levels of the gradient multiplied
            by `scale`.
        payload: uint8[payload_bytes(n, bits, per_block=...)].
        scale: Power of two by which the gradient is multiplied.
        bits: 2, 4 or 8.
        seed: Seed of the random numbers.
    """
    from lightning_dlres.kernels.gradients import levels_cpu as cpu

    written, codes = _parts(payload, scales.numel())
    written[:] = float_array(scales)
    values, steps = float_array(gradient), _of_blocks(written, gradient.numel())
    run(
        gradient.numel(),
        lambda first, stop: cpu.encode_stochastic(
            values[first:stop],
            steps[blocks(first) : blocks(stop)],
            codes[words(first, bits) : words(stop, bits)],
            scale,
            bits,
            seed & 0xFFFFFFFF,
            blocks(first),
        ),
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
    """Write or add the decoded values; see `threshold.decode`."""
    from lightning_dlres.kernels.gradients import levels_cpu as cpu

    count = out.numel()
    scales, codes = _parts(payload, blocks(count) if per_block else 1)
    values, steps = float_array(out), _of_blocks(scales, count)
    run(
        count,
        lambda first, stop: cpu.decode(
            steps[blocks(first) : blocks(stop)],
            codes[words(first, bits) : words(stop, bits)],
            values[first:stop],
            scale,
            bits,
            accumulate,
        ),
    )


def largest_of_blocks(gradient: Tensor, scale: float) -> Tensor:
    """Return the largest magnitude of each block as float32[blocks(n)]; NaN if not finite."""
    from lightning_dlres.kernels.gradients import levels_cpu as cpu

    largest = torch.empty(blocks(gradient.numel()))
    values, result = float_array(gradient), float_array(largest)
    zeros = float_array(torch.zeros_like(gradient))
    run(
        gradient.numel(),
        lambda first, stop: cpu.largest(
            values[first:stop], zeros[first:stop], result[blocks(first) : blocks(stop)], scale
        ),
    )
    return largest


def _parts(payload: Tensor, scales: int) -> tuple[Any, Any]:
    return float_array(payload[: 4 * scales].view(torch.float32)), word_array(payload[4 * scales :])


def _of_blocks(scales: Any, count: int) -> Any:
    """Return one scale per block; a single scale is repeated."""
    return scales if scales.size == blocks(count) else scales.repeat(blocks(count))
