"""Sums of many numbers on the CPU, in an order that a GPU follows; see `sums`."""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import float64, types

from lightning_dlres.core.compiled import compiled, subroutine
from lightning_dlres.kernels.gradients.layout import BLOCK, LANES, LARGEST


def _tree_sum(lanes: Any) -> Any:
    """Return the sum of lanes, whose number is a power of two; overwrite them.

    The second half is added to the first one until one number is left.
    """
    half = lanes.size // 2
    while half > 0:
        lower, upper = lanes[:half], lanes[half : 2 * half]
        for i in range(half):
            lower[i] += upper[i]
        half //= 2
    return lanes[0]


tree_sum = subroutine(_tree_sum, nogil=True)


@compiled((types.float64[:, ::1], types.float64[::1]), nogil=True)
def totals(sums: Any, result: Any) -> None:
    """Write the sum of each column.

    Args:
        sums: float64[n, k].
        result: float64[k].
    """
    lanes = np.empty(LANES)
    for column in range(result.size):
        lanes[:] = 0
        for row in range(len(sums)):
            lanes[row % LANES] += sums[row, column]
        result[column] = tree_sum(lanes)


@compiled(
    (types.float32[::1], types.float32[::1], types.float64[:, ::1], types.float32), nogil=True
)
def moments(values: Any, largest: Any, sums: Any, pivot: Any) -> None:
    """Write statistics of whole blocks; the last one may be shorter.

    Args:
        values: float32[n].
        largest: float32[blocks(n)]: receives the largest magnitude; NaN if a value is not finite.
        sums: float64[blocks(n), 2]: receives the sums of the differences from `pivot` and of their
            squares. Values that are not finite are left out.
        pivot: Number near the values, so that the squares of their differences lose no digits.
    """
    maxima, differences, squares = np.empty(LANES, np.float32), np.empty(LANES), np.empty(LANES)
    for block in range(largest.size):
        maxima[:], differences[:], squares[:] = 0, 0, 0
        in_block = values[block * BLOCK : block * BLOCK + BLOCK]
        for first in range(0, in_block.size, LANES):
            part = in_block[first : min(first + LANES, in_block.size)]
            for i in range(part.size):
                magnitude = abs(part[i])
                # A comparison with NaN is false, so this finds NaN and the infinities.
                is_finite = magnitude <= LARGEST
                magnitude = magnitude if is_finite else np.float32(np.inf)
                maxima[i] = magnitude if magnitude > maxima[i] else maxima[i]
                difference = float64(part[i]) - float64(pivot)
                difference = difference if is_finite else float64(0)
                differences[i] += difference
                squares[i] += difference * difference
        maximum = maxima.max()
        largest[block] = maximum if maximum <= LARGEST else np.float32(np.nan)
        sums[block, 0], sums[block, 1] = tree_sum(differences), tree_sum(squares)
