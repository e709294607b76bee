"""Uniform quantisation to levels on the CPU, with rounding to nearest or stochastic rounding; see
`levels`."""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import float32, int32, types, uint32

from lightning_dlres.core.compiled import compiled, subroutine
from lightning_dlres.kernels.gradients.layout import BLOCK, LARGEST
from lightning_dlres.kernels.words import (
    bitwise_and,
    bitwise_or,
    shift_left,
    shift_right_signed,
)

# Number of partial maxima of a block, which are found independently, with vector instructions.
_MAXIMA = 64
# Smallest distance between adjacent levels; its inverse is finite. Blocks with a smaller one are
# sent as zeros.
SMALLEST_STEP = float(np.finfo(np.float32).tiny)
# Largest magnitude that the highest level may stand for. Steps are rounded, and the product of a
# step and the highest level must not overflow. Larger values are clipped.
LARGEST_LEVEL = float(np.float32(LARGEST * (1 - 2.0**-22)))


def mixed_bits(value: Any) -> Any:
    """Return 32 well mixed bits of a 32-bit number (Wellons' "lowbias32", 2018).

    Numba computes with 64 bits, so each product is cut to 32.
    """
    value = uint32(value ^ (value >> uint32(16)))
    value = uint32(value * uint32(0x7FEB352D))
    value = uint32(value ^ (value >> uint32(15)))
    value = uint32(value * uint32(0x846CA68B))
    return uint32(value ^ (value >> uint32(16)))


_mixed = subroutine(mixed_bits, nogil=True)


def _larger(magnitude: Any, largest: Any) -> Any:
    """Return the larger one of two magnitudes; infinity if `magnitude` is NaN."""
    # NaN does not equal itself.
    larger = largest if magnitude <= largest else magnitude
    return larger if magnitude == magnitude else float32(np.inf)


_maximum = subroutine(_larger, nogil=True)


def _step_of_maxima(maxima: Any, top: Any) -> Any:
    """Return the distance between adjacent levels of a block; NaN if a value is not finite.

    Args:
        maxima: Partial maxima of the magnitudes of the block.
        top: Highest level.
    """
    largest = float32(0)
    for i in range(maxima.size):
        largest = max(largest, maxima[i])
    is_finite = largest <= float32(LARGEST)
    return min(largest, float32(LARGEST_LEVEL)) / top if is_finite else float32(np.nan)


_step = subroutine(_step_of_maxima, nogil=True)


def _inverse_of_step(step: Any) -> Any:
    return float32(1) / step if step >= float32(SMALLEST_STEP) else float32(0)


_inverse = subroutine(_inverse_of_step, nogil=True)


def _encode_block(
    gradient: Any, residual: Any, words: Any, scale: Any, step: Any, top: Any, bits: Any
) -> None:
    """Encode one block.

    `step` is the distance between adjacent levels, and `top` the highest level.
    """
    for i in range(words.size):
        words[i] = 0
    # The residual of a block that is not finite stays as it is.
    if not (step <= float32(LARGEST)):
        return
    inverse = _inverse(step)
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
            words[i] = bitwise_or(words[i], shift_left(bitwise_and(uint32(level), mask), shift))


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
    gradient: Any, residual: Any, steps: Any, words: Any, scale: Any, bits: Any
) -> None:
    """Encode whole blocks, rounding to the nearest level; the residual is updated in place.

    Args:
        gradient: float32[n].
        residual: float32[n], updated in place.
        steps: float32[blocks(n)]: receives the distance between adjacent levels of each block.
        words: uint32[words(n, bits)].
        scale: Power of two by which the gradient is multiplied.
        bits: Bits of a code: 4 or 8.
    """
    maxima = np.empty(_MAXIMA, np.float32)
    words_of_block = BLOCK * bits // 32
    top = float32((1 << (bits - 1)) - 1)
    for block in range(steps.size):
        first, word = block * BLOCK, block * words_of_block
        values, errors = gradient[first : first + BLOCK], residual[first : first + BLOCK]
        maxima[:] = 0
        for start in range(0, values.size, _MAXIMA):
            size_of_part = min(_MAXIMA, values.size - start)
            for i in range(size_of_part):
                value = values[start + i] * scale + errors[start + i]
                maxima[i] = _maximum(abs(value), maxima[i])
        step = _step(maxima, top)
        steps[block] = step
        _block_encoder(values, errors, words[word : word + words_of_block], scale, step, top, bits)


def _encode_block_stochastic(
    values: Any, words: Any, scale: Any, step: Any, top: Any, bits: Any, start: Any, seed: Any
) -> None:
    """Encode one block; `start` is the position of its first element in the whole gradient.

    The random number of an element depends on its position and the seed.
    """
    for i in range(words.size):
        words[i] = 0
    if not (step <= float32(LARGEST)):
        return
    inverse = _inverse(step)
    mask = uint32((1 << bits) - 1)
    for p in range(32 // bits):
        first = p * words.size
        part = values[first : min(first + words.size, values.size)]
        shift = uint32(bits * p)
        counter = uint32(start + first)
        for i in range(part.size):
            random = _mixed(uint32((counter + uint32(i)) ^ seed))
            # 24 bits: a float32 in [0, 1).
            chance = float32(random >> uint32(8)) * float32(2.0**-24)
            exact = min(max(part[i] * scale * inverse, -top), top)
            lower = np.floor(exact)
            level = int32(lower) + (int32(1) if exact - lower > chance else int32(0))
            words[i] = bitwise_or(words[i], shift_left(bitwise_and(uint32(level), mask), shift))


_stochastic_block_encoder = subroutine(_encode_block_stochastic, nogil=True)


@compiled(
    (
        types.float32[::1],
        types.int64[::1],
        types.float32[::1],
        types.uint32[::1],
        types.float32,
        types.int64,
        types.uint32,
        types.boolean,
    ),
    nogil=True,
)
def encode_stochastic(
    gradient: Any,
    numbers: Any,
    steps: Any,
    words: Any,
    scale: Any,
    bits: Any,
    seed: Any,
    per_block: Any,
) -> None:
    """Encode whole blocks, rounding up with a probability that makes the codes unbiased.

    Args:
        gradient: float32[n].
        numbers: int64[blocks(n)]: number of each block in the whole gradient. The random numbers
            then do not depend on the pieces into which `layout.run` cuts the gradient.
        steps: float32[blocks(n)]: distance between adjacent levels of each block. Values beyond the
            highest level are clipped.
        words: uint32[words(n, bits)].
        scale: Power of two by which the gradient is multiplied.
        bits: Bits of a code: 2, 4 or 8.
        seed: Seed of the random numbers.
        per_block: True writes the steps, from the largest magnitude of each block. False reads
            them.
    """
    maxima = np.empty(_MAXIMA, np.float32)
    words_of_block = BLOCK * bits // 32
    top = float32((1 << (bits - 1)) - 1)
    mixed_seed = _mixed(uint32(seed))
    for block in range(steps.size):
        values = gradient[block * BLOCK : block * BLOCK + BLOCK]
        if per_block:
            maxima[:] = 0
            for start in range(0, values.size, _MAXIMA):
                size_of_part = min(_MAXIMA, values.size - start)
                for i in range(size_of_part):
                    maxima[i] = _maximum(abs(values[start + i] * scale), maxima[i])
            steps[block] = _step(maxima, top)
        _stochastic_block_encoder(
            values,
            words[block * words_of_block : (block + 1) * words_of_block],
            scale,
            steps[block],
            top,
            bits,
            numbers[block] * BLOCK,
            mixed_seed,
        )


def _decode_block(words: Any, out: Any, step: Any, bits: Any, accumulate: Any) -> None:
    unused = uint32(32 - bits)
    for p in range(32 // bits):
        first = p * words.size
        values = out[first : min(first + words.size, out.size)]
        left = uint32(32 - bits * (p + 1))
        for i in range(values.size):
            # Shifting left and then right extends the sign.
            level = shift_right_signed(shift_left(words[i], left), unused)
            values[i] = (values[i] if accumulate else float32(0)) + float32(level) * step


_block_decoder = subroutine(_decode_block, nogil=True)


@compiled(
    (
        types.float32[::1],
        types.float32[::1],
        types.uint32[::1],
        types.float32,
        types.int64,
        types.boolean,
    ),
    nogil=True,
)
def decode(out: Any, steps: Any, words: Any, scale: Any, bits: Any, accumulate: Any) -> None:
    """Decode whole blocks; the last one may be shorter.

    Args:
        out: float32[n].
        steps: float32[blocks(n)]: distance between adjacent levels of each block.
        words: uint32[words(n, bits)].
        scale: Factor of the decoded values.
        bits: Bits of a code: 2, 4 or 8.
        accumulate: Add to `out` instead of replacing it.
    """
    words_of_block = BLOCK * bits // 32
    for block in range(steps.size):
        _block_decoder(
            words[block * words_of_block : (block + 1) * words_of_block],
            out[block * BLOCK : block * BLOCK + BLOCK],
            steps[block] * scale,
            bits,
            accumulate,
        )
