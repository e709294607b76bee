"""Threshold quantisation to 2 bits on the CPU; see `threshold`."""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import float32, types, uint32

from lightning_dlres.core.compiled import compiled, subroutine
from lightning_dlres.kernels.gradients.layout import BLOCK

BITS = 2
_PLANES = 32 // BITS
_WORDS = BLOCK // _PLANES
# Codes: 0 is zero.
_POSITIVE, _NEGATIVE, _NOT_FINITE = 1, 2, 3
_LARGEST = float(np.finfo(np.float32).max)


def _encode_block(
    gradient: Any, residual: Any, words: Any, scale: Any, threshold: Any, plane: Any
) -> Any:
    """Encode one block; return the sum and the number of the finite magnitudes in one plane."""
    total, finite = float32(0), float32(0)
    for i in range(words.size):
        words[i] = 0
    for p in range(_PLANES):
        first = p * words.size
        values = gradient[first : min(first + words.size, gradient.size)]
        errors = residual[first : min(first + words.size, gradient.size)]
        shift = uint32(BITS * p)
        if p == plane:
            for i in range(values.size):
                magnitude = abs(values[i] * scale + errors[i])
                if magnitude <= float32(_LARGEST):
                    total += magnitude
                    finite += float32(1)
        for i in range(values.size):
            value = values[i] * scale + errors[i]
            positive, negative = value >= threshold, value <= -threshold
            sent = (threshold if positive else float32(0)) - (threshold if negative else float32(0))
            error = value - sent
            code = (uint32(_POSITIVE) if positive else uint32(0)) + (
                uint32(_NEGATIVE) if negative else uint32(0)
            )
            # A comparison with NaN is false, so this finds NaN and the infinities.
            is_finite = abs(value) <= float32(_LARGEST)
            errors[i] = error if is_finite else errors[i]
            words[i] |= (code if is_finite else uint32(_NOT_FINITE)) << shift
    return total, finite


_block_encoder = subroutine(_encode_block, nogil=True)


@compiled(
    (
        types.float32[::1],
        types.float32[::1],
        types.uint32[::1],
        types.float32[:, ::1],
        types.float32,
        types.float32,
        types.int64,
    ),
    nogil=True,
)
def encode(
    gradient: Any,
    residual: Any,
    words: Any,
    sums: Any,
    scale: Any,
    threshold: Any,
    first_block: Any,
) -> None:
    """Encode whole blocks; the last one may be shorter.

    Args:
        gradient: float32[n].
        residual: float32[n], updated in place. Elements whose value is not finite keep theirs.
        words: uint32[words(n, BITS)].
        sums: float32[blocks(n), 2]: over a sixteenth of each block, the sum of the finite
            magnitudes, and their number.
        scale: Power of two by which the gradient is multiplied.
        threshold: Magnitude of the values that are sent; positive.
        first_block: Number of the first block in the unit. It determines which plane of each block
            is sampled, so that the sample does not depend on the split.
    """
    for block in range(len(sums)):
        first, word = block * BLOCK, block * _WORDS
        sums[block, 0], sums[block, 1] = _block_encoder(
            gradient[first : first + BLOCK],
            residual[first : first + BLOCK],
            words[word : word + _WORDS],
            scale,
            threshold,
            (first_block + block) % _PLANES,
        )


def _decode_block(words: Any, out: Any, threshold: Any, keep: Any) -> None:
    for p in range(_PLANES):
        first = p * words.size
        values = out[first : min(first + words.size, out.size)]
        shift = uint32(BITS * p)
        for i in range(values.size):
            code = (words[i] >> shift) & uint32(3)
            value = (threshold if code == _POSITIVE else float32(0)) - (
                threshold if code == _NEGATIVE else float32(0)
            )
            value = float32(np.nan) if code == _NOT_FINITE else value
            values[i] = (values[i] if keep else float32(0)) + value


_block_decoder = subroutine(_decode_block, nogil=True)


@compiled(
    (types.uint32[::1], types.float32[::1], types.float32, types.boolean),
    nogil=True,
)
def decode(words: Any, out: Any, threshold: Any, keep: Any) -> None:
    """Decode whole blocks; the last one may be shorter.

    Args:
        words: uint32[words(n, BITS)].
        out: float32[n].
        threshold: Magnitude of the values.
        keep: Add to `out` instead of replacing it.
    """
    for block in range((out.size + BLOCK - 1) // BLOCK):
        first, word = block * BLOCK, block * _WORDS
        _block_decoder(words[word : word + _WORDS], out[first : first + BLOCK], threshold, keep)
