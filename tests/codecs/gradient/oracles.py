"""Slow definitions of the gradient codecs in NumPy. Each returns the decoded values, float32[n]."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]
BLOCK = 4096


def by_block(encode: Callable[[Floats], Floats], values: Floats) -> Floats:
    """Return the decoded values of a codec that treats each block by itself."""
    parts = [encode(values[i : i + BLOCK]) for i in range(0, values.size, BLOCK)]
    return np.concatenate([values[:0], *parts]).astype(np.float32)


def onebit(values: Floats) -> Floats:
    def encode(block: Floats) -> Floats:
        if not np.isfinite(block).all():
            return np.full_like(block, np.nan)
        above, below = block[block >= 0], block[block < 0]
        decoded = np.zeros_like(block)
        decoded[block >= 0] = above.mean(dtype=np.float64) if above.size else 0
        decoded[block < 0] = below.mean(dtype=np.float64) if below.size else 0
        return decoded

    return by_block(encode, values)


def tbq(values: Floats, threshold: float) -> Floats:
    decoded = np.zeros_like(values)
    for i, value in enumerate(values):
        if not math.isfinite(value):
            decoded[i] = math.nan
        elif value >= threshold:
            decoded[i] = threshold
        elif value <= -threshold:
            decoded[i] = -threshold
    return decoded


def int8(values: Floats) -> Floats:
    def encode(block: Floats) -> Floats:
        if not np.isfinite(block).all():
            return np.full_like(block, np.nan)
        step = np.float32(np.abs(block).max() / np.float32(127))
        return block if step == 0 else np.rint(block * (np.float32(1) / step)) * step

    return by_block(encode, values)


def largest(values: Floats, ratio: float) -> Floats:
    if not np.isfinite(values).all():
        return np.full_like(values, np.nan)
    number = min(values.size, max(1, math.ceil(values.size * ratio)))
    decoded = np.zeros_like(values)
    for i in np.argsort(-np.abs(values), kind="stable")[:number]:
        decoded[i] = values[i]
    return decoded
