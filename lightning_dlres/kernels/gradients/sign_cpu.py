"""One-bit quantisation with a mean per sign and block on the CPU; see `sign`."""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import float32, types, uint32

from lightning_dlres.core.compiled import compiled, subroutine
from lightning_dlres.kernels.gradients.layout import BLOCK, LARGEST
from lightning_dlres.kernels.gradients.sums_cpu import tree_sum
from lightning_dlres.kernels.packed_signs import ELEMENTS, pack_signs
from lightning_dlres.kernels.words import bitwise_and, bitwise_or, shift_left

# Planes of a block: bits of a word, see `layout`.
_PLANES = 32
_WORDS = BLOCK // _PLANES


def _count_set_bits(words: Any) -> Any:
    """Return the number of bits that are set in all words.

    Neighbouring bits are added, then neighbouring pairs, and so on. This allows vector
    instructions.
    """
    number = 0
    for i in range(words.size):
        word = words[i]
        word = word - ((word >> uint32(1)) & uint32(0x55555555))
        word = (word & uint32(0x33333333)) + ((word >> uint32(2)) & uint32(0x33333333))
        word = (word + (word >> uint32(4))) & uint32(0x0F0F0F0F)
        # The highest byte of the product is the sum of the bytes. Numba computes with 64 bits.
        number += uint32(word * uint32(0x01010101)) >> uint32(24)
    return number


_set_bits = subroutine(_count_set_bits, nogil=True)


def _pack_signs_of_part(gradient: Any, residual: Any, words: Any, lanes: Any, scale: Any) -> Any:
    """Write the signs of a short block; see `pack_signs`.

    The sum of each lane is separate, which allows vector instructions. A GPU adds in the same
    order, see `sums`.
    """
    lanes[:] = 0
    for i in range(words.size):
        words[i] = 0
    for p in range(_PLANES):
        first = p * words.size
        values = gradient[first : min(first + words.size, gradient.size)]
        errors = residual[first : min(first + words.size, gradient.size)]
        bit = shift_left(uint32(1), uint32(p))
        for i in range(values.size):
            value = values[i] * scale + errors[i]
            positive = value >= float32(0)
            lanes[0, i] += value if positive else float32(0)
            # NaN is not at least 0, so it is added here, and makes the mean NaN.
            lanes[1, i] += float32(0) if positive else value
            words[i] = bitwise_or(words[i], bit if positive else uint32(0))
    return tree_sum(lanes[0]), tree_sum(lanes[1])


_part_packer = subroutine(_pack_signs_of_part, nogil=True)


def _pack_block(gradient: Any, residual: Any, words: Any, lanes: Any, scale: Any) -> Any:
    """Write the signs; return the mean of the values from 0 up and of those below, NaN if one is
    not finite.
    """
    if gradient.size == ELEMENTS:
        above, below = pack_signs(gradient, residual, words, scale)
    else:
        above, below = _part_packer(gradient, residual, words, lanes, scale)
    if not (above - below <= float32(LARGEST)):
        for i in range(words.size):
            words[i] = 0
        return float32(np.nan), float32(np.nan)
    # float32 is exact for every number of elements of a block. A GPU divides by a float32, too.
    at_least_zero = float32(_set_bits(words))
    others = float32(gradient.size) - at_least_zero
    return above / max(at_least_zero, float32(1)), below / max(others, float32(1))


_block_packer = subroutine(_pack_block, nogil=True)


def _keep_errors(gradient: Any, residual: Any, scale: Any, above: Any, below: Any) -> None:
    # The residual of a block that is not finite stays as it is.
    if np.isnan(above):
        return
    for i in range(gradient.size):
        value = gradient[i] * scale + residual[i]
        residual[i] = value - (above if value >= float32(0) else below)


_error_keeper = subroutine(_keep_errors, nogil=True)


@compiled(
    (
        types.float32[::1],
        types.float32[::1],
        types.float32[:, ::1],
        types.uint32[::1],
        types.float32,
    ),
    nogil=True,
)
def encode(gradient: Any, residual: Any, means: Any, words: Any, scale: Any) -> None:
    """Encode whole blocks; the last one may be shorter.

    Args:
        gradient: float32[n].
        residual: float32[n], updated in place.
        means: float32[blocks(n), 2]: receives the mean of the values from 0 up, and of the others.
        words: uint32[words(n, 1)].
        scale: Power of two by which the gradient is multiplied.
    """
    lanes = np.empty((2, _WORDS), np.float32)
    for block in range(len(means)):
        first, word = block * BLOCK, block * _WORDS
        values, errors = gradient[first : first + BLOCK], residual[first : first + BLOCK]
        above, below = _block_packer(values, errors, words[word : word + _WORDS], lanes, scale)
        means[block, 0], means[block, 1] = above, below
        _error_keeper(values, errors, scale, above, below)


def _decode_block(words: Any, out: Any, above: Any, below: Any, accumulate: Any) -> None:
    for p in range(_PLANES):
        first = p * words.size
        values = out[first : min(first + words.size, out.size)]
        bit = shift_left(uint32(1), uint32(p))
        for i in range(values.size):
            value = above if bitwise_and(words[i], bit) != uint32(0) else below
            values[i] = (values[i] if accumulate else float32(0)) + value


_block_decoder = subroutine(_decode_block, nogil=True)


@compiled(
    (
        types.float32[::1],
        types.float32[:, ::1],
        types.uint32[::1],
        types.float32,
        types.boolean,
    ),
    nogil=True,
)
def decode(out: Any, means: Any, words: Any, scale: Any, accumulate: Any) -> None:
    """Decode whole blocks; the last one may be shorter.

    Args:
        out: float32[n].
        means: float32[blocks(n), 2].
        words: uint32[words(n, 1)].
        scale: Factor of the decoded values.
        accumulate: Add to `out` instead of replacing it.
    """
    for block in range(len(means)):
        first, word = block * BLOCK, block * _WORDS
        _block_decoder(
            words[word : word + _WORDS],
            out[first : first + BLOCK],
            means[block, 0] * scale,
            means[block, 1] * scale,
            accumulate,
        )
