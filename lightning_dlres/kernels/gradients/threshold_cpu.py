"""Threshold quantisation to 2 bits on the CPU; see `threshold`, and `layout` for planes."""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import float32, types, uint32

from lightning_dlres.core.compiled import compiled, subroutine
from lightning_dlres.kernels.gradients.layout import BLOCK, LANES, LARGEST
from lightning_dlres.kernels.gradients.sums_cpu import tree_sum
from lightning_dlres.kernels.gradients.threshold import (
    BITS,
    NEGATIVE,
    NOT_FINITE,
    PLANES,
    POSITIVE,
)
from lightning_dlres.kernels.words import bitwise_and, bitwise_or, shift_left

_WORDS = BLOCK // PLANES


def _sample_plane(gradient: Any, residual: Any, scale: Any, lanes: Any) -> Any:
    """Return the sum and the number of the finite magnitudes of a plane.

    A plane has at most `LANES` elements.
    """
    number_finite = 0
    lanes[:] = 0
    for i in range(gradient.size):
        magnitude = abs(gradient[i] * scale + residual[i])
        is_finite = magnitude <= float32(LARGEST)
        lanes[i] = magnitude if is_finite else float32(0)
        number_finite += 1 if is_finite else 0
    return tree_sum(lanes), number_finite


_plane_sampler = subroutine(_sample_plane, nogil=True)


def _encode_block(
    gradient: Any, residual: Any, words: Any, scale: Any, threshold: Any, plane: Any, lanes: Any
) -> Any:
    """Encode one block; return the sum and the number of the finite magnitudes of one plane."""
    total, number_finite = float32(0), 0
    for i in range(words.size):
        words[i] = 0
    for p in range(PLANES):
        first = p * words.size
        values = gradient[first : min(first + words.size, gradient.size)]
        errors = residual[first : min(first + words.size, gradient.size)]
        shift = uint32(BITS * p)
        code_positive = shift_left(uint32(POSITIVE), shift)
        code_negative = shift_left(uint32(NEGATIVE), shift)
        code_not_finite = shift_left(uint32(NOT_FINITE), shift)
        if p == plane:
            # In its turn: memory is read from front to back.
            total, number_finite = _plane_sampler(values, errors, scale, lanes)
        for i in range(values.size):
            value = values[i] * scale + errors[i]
            positive, negative = value >= threshold, value <= -threshold
            sent = (threshold if positive else float32(0)) - (threshold if negative else float32(0))
            error = value - sent
            code = bitwise_or(
                code_positive if positive else uint32(0), code_negative if negative else uint32(0)
            )
            # A comparison with NaN is false, so this finds NaN and the infinities.
            is_finite = abs(value) <= float32(LARGEST)
            errors[i] = error if is_finite else errors[i]
            words[i] = bitwise_or(words[i], code if is_finite else code_not_finite)
    return total, number_finite


_block_encoder = subroutine(_encode_block, nogil=True)


@compiled(
    (
        types.float32[::1],
        types.float32[::1],
        types.int64[::1],
        types.float64[:, ::1],
        types.uint32[::1],
        types.float32,
        types.float32,
        types.int64,
    ),
    nogil=True,
)
def encode(
    gradient: Any,
    residual: Any,
    numbers: Any,
    sums: Any,
    words: Any,
    scale: Any,
    threshold: Any,
    first_plane: Any,
) -> None:
    """Encode whole blocks; the last one may be shorter.

    Args:
        gradient: float32[n].
        residual: float32[n], updated in place. Elements whose value is not finite keep theirs.
        numbers: int64[blocks(n)]: number of each block in the whole gradient.
        sums: float64[blocks(n), 2]: receives the sum of the finite magnitudes of a sixteenth of
            each block, and their number.
        words: uint32[words(n, BITS)].
        scale: Power of two by which the gradient is multiplied.
        threshold: Magnitude of the values that are sent; positive.
        first_plane: Plane of the first block that is sampled. Each next block has the next plane.
    """
    lanes = np.empty(LANES, np.float32)
    for block in range(len(sums)):
        first, word = block * BLOCK, block * _WORDS
        sums[block, 0], sums[block, 1] = _block_encoder(
            gradient[first : first + BLOCK],
            residual[first : first + BLOCK],
            words[word : word + _WORDS],
            scale,
            threshold,
            (numbers[block] + first_plane) % PLANES,
            lanes,
        )


@compiled((types.float32[::1], types.float64[:, ::1], types.float32), nogil=True)
def magnitudes(gradient: Any, sums: Any, scale: Any) -> None:
    """Write the sum of the magnitudes of whole blocks, and their number of elements.

    Args:
        gradient: float32[n].
        sums: float64[blocks(n), 2]. Elements that are not finite count as 0.
        scale: Power of two by which the gradient is multiplied.
    """
    lanes = np.empty(LANES, np.float32)
    for block in range(len(sums)):
        values = gradient[block * BLOCK : block * BLOCK + BLOCK]
        lanes[:] = 0
        for first in range(0, values.size, LANES):
            part = values[first : min(first + LANES, values.size)]
            for i in range(part.size):
                magnitude = abs(part[i] * scale)
                lanes[i] += magnitude if magnitude <= float32(LARGEST) else float32(0)
        sums[block, 0], sums[block, 1] = tree_sum(lanes), values.size


def _decode_block(words: Any, out: Any, threshold: Any, accumulate: Any) -> None:
    for p in range(PLANES):
        first = p * words.size
        values = out[first : min(first + words.size, out.size)]
        shift = uint32(BITS * p)
        code_positive = shift_left(uint32(POSITIVE), shift)
        code_negative = shift_left(uint32(NEGATIVE), shift)
        code_not_finite = shift_left(uint32(NOT_FINITE), shift)
        for i in range(values.size):
            # All bits of NOT_FINITE are set, so it is the mask of a code.
            code = bitwise_and(words[i], code_not_finite)
            value = threshold if code == code_positive else float32(0)
            value = -threshold if code == code_negative else value
            value = float32(np.nan) if code == code_not_finite else value
            values[i] = (values[i] if accumulate else float32(0)) + value


_block_decoder = subroutine(_decode_block, nogil=True)


@compiled(
    (types.float32[::1], types.uint32[::1], types.float32, types.float32, types.boolean),
    nogil=True,
)
def decode(out: Any, words: Any, threshold: Any, scale: Any, accumulate: Any) -> None:
    """Decode whole blocks; the last one may be shorter.

    Args:
        out: float32[n].
        words: uint32[words(n, BITS)].
        threshold: Magnitude of the values that were sent.
        scale: Factor of the decoded values.
        accumulate: Add to `out` instead of replacing it.
    """
    for block in range((out.size + BLOCK - 1) // BLOCK):
        first, word = block * BLOCK, block * _WORDS
        _block_decoder(
            words[word : word + _WORDS], out[first : first + BLOCK], threshold * scale, accumulate
        )
