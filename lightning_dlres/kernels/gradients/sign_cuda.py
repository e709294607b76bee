"""One-bit quantisation on a GPU: one pass over memory; see `sign`.

A thread block of the GPU works on one block of elements, and a thread on one word of codes.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import torch
from numba import cuda, float32, uint32
from torch import Tensor

from lightning_dlres.kernels.cuda_launch import launch
from lightning_dlres.kernels.gradients.arithmetic_cuda import (
    add,
    divide,
    multiply,
    subtract,
    tree_sum,
)
from lightning_dlres.kernels.gradients.layout import BLOCK, LARGEST, blocks

# Planes of a block: bits of a word, see `layout`.
_PLANES = 32
# One thread for each word of a block.
THREADS = BLOCK // _PLANES


def encode(gradient: Tensor, residual: Tensor, means: Tensor, codes: Tensor, scale: float) -> None:
    """Write the means and the codes of a payload, and update the residual; see `sign.encode`."""
    count = gradient.numel()
    if count:
        kernel, _ = kernels()
        words = codes.view(torch.uint32)
        launch(kernel, blocks(count), THREADS, gradient, residual, means, words, np.float32(scale))


def decode(out: Tensor, means: Tensor, codes: Tensor, scale: float, accumulate: bool) -> None:
    """Write or add the decoded values; see `sign.decode`."""
    count = out.numel()
    if count:
        _, kernel = kernels()
        words = codes.view(torch.uint32)
        options = np.float32(scale), np.bool_(accumulate)
        launch(kernel, blocks(count), THREADS, out, means, words, *options)


@cache
def kernels() -> tuple[Any, Any]:
    """Return the compiled encoder and decoder."""
    return cuda.jit(sign_encode), cuda.jit(sign_decode)


def sign_encode(gradient: Any, residual: Any, means: Any, words: Any, scale: Any) -> None:
    """Kernel with the arguments of `sign_cpu.encode`, except that `means` has one dimension."""
    lanes = cuda.shared.array((3, THREADS), float32)
    values = cuda.local.array(_PLANES, float32)
    lane, first = cuda.threadIdx.x, cuda.blockIdx.x * BLOCK
    size = min(gradient.size - first, BLOCK)
    count = (size + _PLANES - 1) // _PLANES
    # Loads without branches, and before all that uses them: many are in flight at once.
    if size == BLOCK:
        for p in range(_PLANES):
            at = first + p * THREADS + lane
            values[p] = add(multiply(gradient[at], scale), residual[at])
    else:
        for p in range(_PLANES):
            values[p] = float32(0)
            element = p * count + lane
            if lane < count and element < size:
                scaled = multiply(gradient[first + element], scale)
                values[p] = add(scaled, residual[first + element])
    # Elements of this thread are those before `end`. Adding a zero changes no sum.
    end = size if lane < count else 0
    above, below, at_least_zero = float32(0), float32(0), float32(0)
    for p in range(_PLANES):
        positive = values[p] >= float32(0)
        above = add(above, values[p] if positive else float32(0))
        below = add(below, float32(0) if positive else values[p])
        is_counted = positive and p * count + lane < end
        at_least_zero = add(at_least_zero, float32(1) if is_counted else float32(0))
    lanes[0, lane], lanes[1, lane], lanes[2, lane] = above, below, at_least_zero
    tree_sum(lanes, lane)
    above, below, at_least_zero = lanes[0, 0], lanes[1, 0], lanes[2, 0]
    is_finite = subtract(above, below) <= float32(LARGEST)
    above = divide(above, max(at_least_zero, float32(1)))
    below = divide(below, max(subtract(float32(size), at_least_zero), float32(1)))
    if lane == 0:
        means[2 * cuda.blockIdx.x] = above if is_finite else float32(np.nan)
        means[2 * cuda.blockIdx.x + 1] = below if is_finite else float32(np.nan)
    if lane < count:
        word = uint32(0)
        # The residual of a block that is not finite stays as it is.
        if is_finite:
            for p in range(_PLANES):
                element = p * count + lane
                if element < size:
                    positive = values[p] >= float32(0)
                    mean = above if positive else below
                    residual[first + element] = subtract(values[p], mean)
                    word = uint32(word | (uint32(1 if positive else 0) << uint32(p)))
        words[cuda.blockIdx.x * THREADS + lane] = word


def sign_decode(out: Any, means: Any, words: Any, scale: Any, accumulate: Any) -> None:
    """Kernel with the arguments of `sign_cpu.decode`, except that `means` has one dimension."""
    values = cuda.local.array(_PLANES, float32)
    lane, first = cuda.threadIdx.x, cuda.blockIdx.x * BLOCK
    size = min(out.size - first, BLOCK)
    count = (size + _PLANES - 1) // _PLANES
    if lane < count:
        above = multiply(means[2 * cuda.blockIdx.x], scale)
        below = multiply(means[2 * cuda.blockIdx.x + 1], scale)
        word = words[cuda.blockIdx.x * THREADS + lane]
        if accumulate and size == BLOCK:
            for p in range(_PLANES):
                values[p] = out[first + p * THREADS + lane]
        else:
            for p in range(_PLANES):
                values[p] = float32(0)
                if accumulate and p * count + lane < size:
                    values[p] = out[first + p * count + lane]
        for p in range(_PLANES):
            element = p * count + lane
            if element < size:
                value = above if (word >> uint32(p)) & uint32(1) else below
                out[first + element] = add(values[p], value)
