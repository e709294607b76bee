"""Uniform quantisation to levels on the CPU, with rounding to nearest or stochastic rounding; see
`levels`."""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import float32, int32, types, uint32

from lightning_dlres.core.compiled import compiled, subroutine
from lightning_dlres.kernels.gradients.layout import BLOCK

_LARGEST = float(np.finfo(np.float32).max)


def _hash(value: Any) -> Any:
    """Return 32 well mixed bits of a 32-bit number (Wellons' "lowbias32", 2018).

    Numba computes with 64 bits, so each product is cut to 32.
    """
    value = uint32(value ^ (value >> uint32(16)))
    value = uint32(value * uint32(0x7FEB352D))
    value = uint32(value ^ (value >> uint32(15)))
    value = uint32(value * uint32(0x846CA68B))
    return uint32(value ^ (value >> uint32(16)))


_mixed = subroutine(_hash, nogil=True)


def _largest_of_block(gradient: Any, residual: Any, lanes: Any, scale: Any) -> Any:
    """Return the largest magnitude of a block; NaN if a value is not finite."""
    for i in range(lanes.size):
        lanes[i] = float32(0)
    for first in range(0, gradient.size, lanes.size):
        values = gradient[first : min(first + lanes.size, gradient.size)]
        errors = residual[first : min(first + lanes.size, gradient.size)]
        for i in range(values.size):
            magnitude = abs(values[i] * scale + errors[i])
            # NaN becomes infinity, which no later value replaces. `max` below might ignore NaN.
            lanes[i] = lanes[i] if magnitude <= lanes[i] else magnitude
            lanes[i] = lanes[i] if magnitude == magnitude else float32(np.inf)
    largest = float32(0)
    for i in range(lanes.size):
        largest = max(largest, lanes[i])
    return largest if largest <= float32(_LARGEST) else float32(np.nan)


_block_largest = subroutine(_largest_of_block, nogil=True)


@compiled(
    (types.float32[::1], types.float32[::1], types.float32[::1], types.float32),
    nogil=True,
)
def largest(gradient: Any, residual: Any, scales: Any, scale: Any) -> None:
    """Write the largest magnitude of each block of gradient plus residual; NaN if not finite."""
    lanes = np.empty(64, np.float32)
    for block in range(scales.size):
        first = block * BLOCK
        scales[block] = _block_largest(
            gradient[first : first + BLOCK], residual[first : first + BLOCK], lanes, scale
        )


def _encode_block(
    gradient: Any, residual: Any, words: Any, scale: Any, step: Any, top: Any, bits: Any
) -> None:
    """Encode one block; `step` is the distance of two levels, and `top` the highest level."""
    for i in range(words.size):
        words[i] = 0
    # The residual of a block that is not finite stays as it is.
    if not (step <= float32(_LARGEST)):
        return
    inverse = float32(1) / step if step > float32(0) else float32(0)
    mask = uint32((1 << bits) - 1)
    for p in range(32 // bits):
        first = p * words.size
        values = gradient[first : min(first + words.size, gradient.size)]
        errors = residual[first : min(first + words.size, gradient.size)]
        shift = uint32(bits * p)
        for i in range(values.size):
            value = values[i] * scale + errors[i]
            exact = min(max(value * inverse, -top), top)
            level = int32(np.rint(exact))
            errors[i] = value - float32(level) * step
            words[i] |= (uint32(level) & mask) << shift


_block_encoder = subroutine(_encode_block, nogil=True)


@compiled(
    (
        types.float32[::1],
        types.float32[::1],
        types.float32[::1],
        types.uint32[::1],
        types.float32,
        types.int64,
    ),
    nogil=True,
)
def encode_nearest(
    gradient: Any, residual: Any, scales: Any, words: Any, scale: Any, bits: Any
) -> None:
    """Encode whole blocks, rounding to the nearest level; the residual is updated in place.

    Args:
        gradient: float32[n].
        residual: float32[n], updated in place.
        scales: float32[blocks(n)]: receives the distance of two levels of each block.
        words: uint32[words(n, bits)].
        scale: Power of two by which the gradient is multiplied.
        bits: Bits of a code: 4 or 8.
    """
    lanes = np.empty(64, np.float32)
    size = BLOCK * bits // 32
    top = float32((1 << (bits - 1)) - 1)
    for block in range(scales.size):
        first, word = block * BLOCK, block * size
        values, errors = gradient[first : first + BLOCK], residual[first : first + BLOCK]
        step = _block_largest(values, errors, lanes, scale) / top
        scales[block] = step
        _block_encoder(values, errors, words[word : word + size], scale, step, top, bits)


@compiled(
    (
        types.float32[::1],
        types.float32[::1],
        types.uint32[::1],
        types.float32,
        types.int64,
        types.uint32,
        types.int64,
    ),
    nogil=True,
)
def encode_stochastic(
    gradient: Any, scales: Any, words: Any, scale: Any, bits: Any, seed: Any, first_block: Any
) -> None:
    """Encode whole blocks, rounding up with a probability that makes the codes unbiased.

    Args:
        gradient: float32[n].
        scales: float32[blocks(n)]: distance of two levels of each block. Values beyond the highest
            level are clipped.
        words: uint32[words(n, bits)].
        scale: Power of two by which the gradient is multiplied.
        bits: Bits of a code: 2, 4 or 8.
        seed: Seed of the random numbers.
        first_block: Number of the first block in the unit, so that the random numbers do not depend
            on the split.
    """
    size = BLOCK * bits // 32
    top = float32((1 << (bits - 1)) - 1)
    mask = uint32((1 << bits) - 1)
    mixed_seed = _mixed(uint32(seed))
    for block in range(scales.size):
        step, codes = scales[block], words[block * size : block * size + size]
        for i in range(codes.size):
            codes[i] = 0
        if not (step <= float32(_LARGEST)):
            continue
        inverse = float32(1) / step if step > float32(0) else float32(0)
        block_values = gradient[block * BLOCK : block * BLOCK + BLOCK]
        for p in range(32 // bits):
            first = p * codes.size
            values = block_values[first : min(first + codes.size, block_values.size)]
            shift = uint32(bits * p)
            counter = uint32((first_block + block) * BLOCK + first)
            for i in range(values.size):
                random = _mixed(uint32((counter + uint32(i)) ^ mixed_seed))
                # 24 bits: a float32 in [0, 1).
                chance = float32(random >> uint32(8)) * float32(2.0**-24)
                exact = min(max(values[i] * scale * inverse, -top), top)
                lower = np.floor(exact)
                level = int32(lower) + (int32(1) if exact - lower > chance else int32(0))
                codes[i] |= (uint32(level) & mask) << shift


def _decode_block(words: Any, out: Any, step: Any, bits: Any, keep: Any) -> None:
    unused = uint32(32 - bits)
    for p in range(32 // bits):
        first = p * words.size
        values = out[first : min(first + words.size, out.size)]
        left = uint32(32 - bits * (p + 1))
        for i in range(values.size):
            # Shifting left and then right extends the sign.
            level = int32(words[i] << left) >> int32(unused)
            values[i] = (values[i] if keep else float32(0)) + float32(level) * step


_block_decoder = subroutine(_decode_block, nogil=True)


@compiled(
    (
        types.float32[::1],
        types.uint32[::1],
        types.float32[::1],
        types.float32,
        types.int64,
        types.boolean,
    ),
    nogil=True,
)
def decode(scales: Any, words: Any, out: Any, scale: Any, bits: Any, keep: Any) -> None:
    """Decode whole blocks; the last one may be shorter.

    Args:
        scales: float32[blocks(n)]: distance of two levels of each block.
        words: uint32[words(n, bits)].
        out: float32[n].
        scale: Factor of the decoded values.
        bits: Bits of a code: 2, 4 or 8.
        keep: Add to `out` instead of replacing it.
    """
    size = BLOCK * bits // 32
    for block in range(scales.size):
        _block_decoder(
            words[block * size : block * size + size],
            out[block * BLOCK : block * BLOCK + BLOCK],
            scales[block] * scale,
            bits,
            keep,
        )
