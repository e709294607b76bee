"""Threshold quantisation to 2 bits on a GPU: one pass over memory; see `threshold`."""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import numpy as np
import torch
from numba import cuda, float32, float64, int32, uint32
from torch import Tensor

from lightning_dlres.kernels.cuda_launch import launch
from lightning_dlres.kernels.gradients.arithmetic_cuda import (
    add,
    larger,
    multiply,
    multiply_double,
    subtract,
    tree_sum,
)
from lightning_dlres.kernels.gradients.layout import BLOCK, LANES, LARGEST, blocks
from lightning_dlres.kernels.gradients.sums_cuda import sum_of_column
from lightning_dlres.kernels.gradients.threshold import (
    BITS,
    MULTIPLIER,
    NEGATIVE,
    NOT_FINITE,
    PLANE_SHIFT,
    PLANES,
    POSITIVE,
    SMALLEST,
)

# One thread for each word of a block.
THREADS = BLOCK // PLANES


def start(gradient: Tensor, sums: Tensor, threshold: Tensor, scale: float, multiple: float) -> None:
    """Set a threshold of zero to a multiple of the gradient's mean magnitude; see `threshold`.

    The kernels test whether the threshold is zero, so that the host does not wait for the GPU.
    """
    count = gradient.numel()
    if count:
        launch(
            kernels().magnitudes,
            blocks(count),
            THREADS,
            gradient,
            sums.view(-1),
            threshold,
            np.float32(scale),
        )
        _adapt(sums, threshold, multiple, only_zero=True)


def encode(
    gradient: Tensor,
    residual: Tensor,
    sums: Tensor,
    codes: Tensor,
    header: Tensor,
    threshold: Tensor,
    scale: float,
) -> None:
    """Write a payload, and update the residual; see `threshold.encode`.

    Args:
        gradient: float32[n].
        residual: float32[n].
        sums: float64[blocks(n), 2]: receives the sum and the number of the sampled magnitudes.
        codes: uint8[4 * words(n, BITS)].
        header: float32[1]: receives the threshold.
        threshold: float32[1].
        scale: Power of two by which the gradient is multiplied.
    """
    count = gradient.numel()
    if not count:
        torch.clamp(threshold, min=SMALLEST, out=header)
        return
    words = codes.view(torch.uint32)
    bits = threshold.view(torch.uint32)
    arrays = gradient, residual, sums.view(-1), words, header, threshold, bits
    launch(kernels().encode, blocks(count), THREADS, *arrays, np.float32(scale))


def adapt(sums: Tensor, threshold: Tensor, multiple: float) -> None:
    """Set the threshold to a multiple of the mean of the sampled magnitudes."""
    _adapt(sums, threshold, multiple, only_zero=False)


def decode(out: Tensor, header: Tensor, codes: Tensor, scale: float, accumulate: bool) -> None:
    """Write or add the decoded values; see `threshold.decode`."""
    count = out.numel()
    if count:
        options = np.float32(scale), np.bool_(accumulate)
        words = codes.view(torch.uint32)
        launch(kernels().decode, blocks(count), THREADS, out, header, words, *options)


def _adapt(sums: Tensor, threshold: Tensor, multiple: float, *, only_zero: bool) -> None:
    if not sums.numel():
        threshold.zero_()
        return
    options = np.float64(multiple), np.bool_(only_zero)
    launch(kernels().adapt, 1, LANES, sums, threshold, *options)


class _Kernels(NamedTuple):
    """Compiled kernels."""

    magnitudes: Any
    encode: Any
    adapt: Any
    decode: Any


@cache
def kernels() -> _Kernels:
    """Return the compiled kernels."""
    kernel_functions = threshold_magnitudes, threshold_encode, threshold_adapt, threshold_decode
    return _Kernels(*map(cuda.jit, kernel_functions))


def threshold_magnitudes(gradient: Any, sums: Any, threshold: Any, scale: Any) -> None:
    """Write the sum and the number of each block's magnitudes, if the threshold is zero."""
    # All threads of a block take the same branch, as the barriers in `tree_sum` demand.
    if threshold[0] == float32(0):
        lanes = cuda.shared.array((1, THREADS), float32)
        lane, first = cuda.threadIdx.x, cuda.blockIdx.x * BLOCK
        size = min(gradient.size - first, BLOCK)
        total = float32(0)
        for part in range(BLOCK // THREADS):
            element = part * THREADS + lane
            if element < size:
                magnitude = abs(multiply(gradient[first + element], scale))
                if magnitude <= float32(LARGEST):
                    total = add(total, magnitude)
        lanes[0, lane] = total
        tree_sum(lanes, lane)
        if lane == 0:
            sums[2 * cuda.blockIdx.x] = float64(lanes[0, 0])
            sums[2 * cuda.blockIdx.x + 1] = float64(size)


def threshold_encode(
    gradient: Any,
    residual: Any,
    sums: Any,
    words: Any,
    header: Any,
    threshold: Any,
    threshold_bits: Any,
    scale: Any,
) -> None:
    """Kernel with the arguments of `encode`; `sums` has one dimension.

    `threshold_bits` is the threshold as uint32[1].
    """
    lanes = cuda.shared.array((1, THREADS), float32)
    values = cuda.local.array(PLANES, float32)
    lane, first = cuda.threadIdx.x, cuda.blockIdx.x * BLOCK
    size = min(gradient.size - first, BLOCK)
    count = (size + PLANES - 1) // PLANES
    limit = larger(threshold[0], float32(SMALLEST))
    # See `threshold.first_plane`.
    first_plane = uint32(threshold_bits[0] * uint32(MULTIPLIER)) >> uint32(PLANE_SHIFT)
    sampled_plane = (cuda.blockIdx.x + first_plane) % PLANES
    # Infinity is not sampled.
    sample = float32(np.inf)
    # Loads without branches, and before all that uses them: many are in flight at once.
    if size == BLOCK:
        for p in range(PLANES):
            at = first + p * THREADS + lane
            values[p] = add(multiply(gradient[at], scale), residual[at])
            sample = abs(values[p]) if p == sampled_plane else sample
    else:
        for p in range(PLANES):
            values[p] = float32(0)
            element = p * count + lane
            if lane < count and element < size:
                scaled = multiply(gradient[first + element], scale)
                values[p] = add(scaled, residual[first + element])
                if p == sampled_plane:
                    sample = abs(values[p])
    is_sampled = sample <= float32(LARGEST)
    lanes[0, lane] = sample if is_sampled else float32(0)
    number = cuda.syncthreads_count(int32(1 if is_sampled else 0))
    tree_sum(lanes, lane)
    if lane == 0:
        sums[2 * cuda.blockIdx.x] = float64(lanes[0, 0])
        sums[2 * cuda.blockIdx.x + 1] = float64(number)
        if first == 0:
            header[0] = limit
    if lane < count:
        word = uint32(0)
        for p in range(PLANES):
            element = p * count + lane
            if element < size:
                value, sent, code = values[p], float32(0), uint32(0)
                if value >= limit:
                    sent, code = limit, uint32(POSITIVE)
                if value <= -limit:
                    sent, code = -limit, uint32(NEGATIVE)
                # The residual of an element that is not finite stays as it is.
                if abs(value) <= float32(LARGEST):
                    residual[first + element] = subtract(value, sent)
                else:
                    code = uint32(NOT_FINITE)
                word = uint32(word | (code << uint32(BITS * p)))
        words[cuda.blockIdx.x * THREADS + lane] = word


def threshold_adapt(sums: Any, threshold: Any, multiple: Any, only_zero: Any) -> None:
    """Set the threshold to a multiple of the mean of all blocks; one thread block runs it.

    Args:
        sums: float64[blocks, 2]: sum and number of the magnitudes.
        threshold: float32[1].
        multiple: Factor of the mean.
        only_zero: Keep a threshold that is not zero.
    """
    if not only_zero or threshold[0] == float32(0):
        total, number = sum_of_column(sums, 0), sum_of_column(sums, 1)
        # All threads have read the threshold above: `sum_of_column` has barriers.
        if cuda.threadIdx.x == 0:
            mean = total / max(number, float64(1))
            next_threshold = multiply_double(mean, multiple)
            threshold[0] = float32(min(next_threshold, float64(LARGEST)))


def threshold_decode(out: Any, header: Any, words: Any, scale: Any, accumulate: Any) -> None:
    """Kernel with the arguments of `decode`; `words` are the codes as uint32."""
    values = cuda.local.array(PLANES, float32)
    lane, first = cuda.threadIdx.x, cuda.blockIdx.x * BLOCK
    size = min(out.size - first, BLOCK)
    count = (size + PLANES - 1) // PLANES
    if lane < count:
        limit = multiply(header[0], scale)
        word = words[cuda.blockIdx.x * THREADS + lane]
        if accumulate and size == BLOCK:
            for p in range(PLANES):
                values[p] = out[first + p * THREADS + lane]
        else:
            for p in range(PLANES):
                values[p] = float32(0)
                if accumulate and p * count + lane < size:
                    values[p] = out[first + p * count + lane]
        for p in range(PLANES):
            element = p * count + lane
            if element < size:
                code = (word >> uint32(BITS * p)) & uint32(3)
                value = limit if code == POSITIVE else float32(0)
                if code == NEGATIVE:
                    value = subtract(float32(0), limit)
                if code == NOT_FINITE:
                    value = float32(np.nan)
                out[first + element] = add(values[p], value)
