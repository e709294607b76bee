"""One-bit quantisation with a mean per sign and block on the CPU; see `sign`."""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import float32, types, uint32

from lightning_dlres.core.compiled import compiled, subroutine
from lightning_dlres.kernels.gradients.layout import BLOCK, LARGEST
from lightning_dlres.kernels.gradients.sums_cpu import tree_sum

_PLANES = 32
_WORDS = BLOCK // _PLANES


def _means_of_block(gradient: Any, residual: Any, lanes: Any, count: Any, scale: Any) -> Any:
    """Return the mean of the values from 0 up and of those below; NaN if one is not finite.

    The sum of each lane is separate, which allows vector instructions. A GPU adds in the same
    order, see `sums`.
    """
    lanes[:] = 0
    for p in range(_PLANES):
        first = p * count
        values = gradient[first : min(first + count, gradient.size)]
        errors = residual[first : min(first + count, gradient.size)]
        for i in range(values.size):
            value = values[i] * scale + errors[i]
            positive = value >= float32(0)
            lanes[0, i] += value if positive else float32(0)
            # NaN is not at least 0, so it is added here, and makes the mean NaN.
            lanes[1, i] += float32(0) if positive else value
            lanes[2, i] += float32(1) if positive else float32(0)
    above, below, at_least_zero = tree_sum(lanes[0]), tree_sum(lanes[1]), tree_sum(lanes[2])
    if not (above - below <= float32(LARGEST)):
        return float32(np.nan), float32(np.nan)
    others = float32(gradient.size) - at_least_zero
    return above / max(at_least_zero, float32(1)), below / max(others, float32(1))


_block_means = subroutine(_means_of_block, nogil=True)


def _encode_block(
    gradient: Any, residual: Any, words: Any, scale: Any, above: Any, below: Any
) -> None:
    for i in range(words.size):
        words[i] = 0
    # The residual of a block that is not finite stays as it is.
    if np.isnan(above):
        return
    for p in range(_PLANES):
        first = p * words.size
        values = gradient[first : min(first + words.size, gradient.size)]
        errors = residual[first : min(first + words.size, gradient.size)]
        shift = uint32(p)
        for i in range(values.size):
            value = values[i] * scale + errors[i]
            positive = value >= float32(0)
            errors[i] = value - (above if positive else below)
            words[i] |= (uint32(1) if positive else uint32(0)) << shift


_block_encoder = subroutine(_encode_block, nogil=True)


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
    lanes = np.empty((3, _WORDS), np.float32)
    for block in range(len(means)):
        first, word = block * BLOCK, block * _WORDS
        values, errors = gradient[first : first + BLOCK], residual[first : first + BLOCK]
        codes = words[word : word + _WORDS]
        above, below = _block_means(values, errors, lanes, codes.size, scale)
        means[block, 0], means[block, 1] = above, below
        _block_encoder(values, errors, codes, scale, above, below)


def _decode_block(words: Any, out: Any, above: Any, below: Any, accumulate: Any) -> None:
    for p in range(_PLANES):
        first = p * words.size
        values = out[first : min(first + words.size, out.size)]
        shift = uint32(p)
        for i in range(values.size):
            value = above if (words[i] >> shift) & uint32(1) else below
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
