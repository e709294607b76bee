"""Sums of many numbers on a GPU, in the order of the CPU; see `sums`."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
from numba import cuda, float32, float64
from torch import Tensor

from lightning_dlres.kernels.cuda_launch import launch
from lightning_dlres.kernels.gradients.arithmetic_cuda import (
    add_double,
    device_function,
    larger,
    multiply_double,
    tree_largest,
    tree_sum_double,
)
from lightning_dlres.kernels.gradients.layout import BLOCK, LANES, LARGEST, blocks

# Numbers that a thread loads before it adds them up.
_LOADS = 16


def moments(values: Tensor, largest: Tensor, sums: Tensor, pivot: Tensor) -> None:
    """Write statistics of each block; see `sums_cpu.moments`. There is at least one element."""
    kernel, _ = kernels()
    launch(kernel, blocks(values.numel()), LANES, values, largest, sums, pivot)


def totals(sums: Tensor, result: Tensor) -> None:
    """Write the sum of each column of float64[n, k] to float64[k]; n and k are at least 1."""
    _, kernel = kernels()
    launch(kernel, result.numel(), LANES, sums, result)


@cache
def kernels() -> tuple[Any, Any]:
    """Return the compiled kernels of `moments` and `totals`."""
    return cuda.jit(moments_of_blocks), cuda.jit(totals_of_columns)


def moments_of_blocks(values: Any, largest: Any, sums: Any, pivot: Any) -> None:
    """Kernel with the arguments of `moments`."""
    tops = cuda.shared.array((1, LANES), float32)
    lanes = cuda.shared.array((2, LANES), float64)
    lane, first = cuda.threadIdx.x, cuda.blockIdx.x * BLOCK
    top, total, squares = float32(0), float64(0), float64(0)
    for part in range(BLOCK // LANES):
        index = first + part * LANES + lane
        if index < values.size:
            value = values[index]
            # A comparison with NaN is false, so this finds NaN and the infinities.
            if abs(value) <= float32(LARGEST):
                top = larger(abs(value), top)
                difference = add_double(float64(value), -float64(pivot[0]))
                total = add_double(total, difference)
                squares = add_double(squares, multiply_double(difference, difference))
            else:
                top = float32(np.inf)
    tops[0, lane] = top
    lanes[0, lane], lanes[1, lane] = total, squares
    tree_largest(tops, lane)
    tree_sum_double(lanes, lane)
    if lane == 0:
        is_finite = tops[0, 0] <= float32(LARGEST)
        largest[cuda.blockIdx.x] = tops[0, 0] if is_finite else float32(np.nan)
        sums[cuda.blockIdx.x, 0], sums[cuda.blockIdx.x, 1] = lanes[0, 0], lanes[1, 0]


def totals_of_columns(sums: Any, result: Any) -> None:
    """Kernel with the arguments of `totals`; each thread block adds up one column."""
    total = sum_of_column(sums, cuda.blockIdx.x)
    if cuda.threadIdx.x == 0:
        result[cuda.blockIdx.x] = total


@device_function
def sum_of_column(sums: Any, column: Any) -> Any:
    """Return the sum of a column to all of the block's `LANES` threads."""
    lanes = cuda.shared.array((1, LANES), float64)
    loaded = cuda.local.array(_LOADS, float64)
    lane = cuda.threadIdx.x
    # Wait until all threads have read the result of the call before, which is overwritten below.
    cuda.syncthreads()
    total = float64(0)
    start = lane
    # One block adds up all rows, so the latency of its loads counts: many are in flight at once.
    while start + (_LOADS - 1) * LANES < sums.shape[0]:
        for number in range(_LOADS):
            loaded[number] = sums[start + number * LANES, column]
        for number in range(_LOADS):
            total = add_double(total, loaded[number])
        start += _LOADS * LANES
    for row in range(start, sums.shape[0], LANES):
        total = add_double(total, sums[row, column])
    lanes[0, lane] = total
    tree_sum_double(lanes, lane)
    return lanes[0, 0]
