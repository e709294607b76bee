"""Uniform quantisation to levels on a GPU: one pass over memory; see `levels`."""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import numpy as np
import torch
from numba import cuda, float32, int32, uint32
from torch import Tensor

from lightning_dlres.kernels.cuda_launch import launch
from lightning_dlres.kernels.gradients.arithmetic_cuda import (
    add,
    device_function,
    divide,
    larger,
    multiply,
    round_down,
    round_to_even,
    subtract,
    tree_largest,
)
from lightning_dlres.kernels.gradients.layout import BLOCK, LARGEST, blocks
from lightning_dlres.kernels.gradients.levels_cpu import LARGEST_LEVEL, SMALLEST_STEP, mixed_bits

# A thread encodes the elements of one to four whole words.
THREADS = 256
_PER_THREAD = BLOCK // THREADS
_mixed = device_function(mixed_bits)


def encode_nearest(
    gradient: Tensor, residual: Tensor, steps: Tensor, codes: Tensor, scale: float, bits: int
) -> None:
    """Write the steps and the codes of a payload; see `levels.encode_nearest`."""
    count = gradient.numel()
    if count:
        arrays = gradient, residual, steps, codes.view(torch.uint32)
        launch(kernels(bits).nearest, blocks(count), THREADS, *arrays, np.float32(scale))


def encode_stochastic(
    gradient: Tensor,
    steps: Tensor,
    codes: Tensor,
    scale: float,
    bits: int,
    seed: int,
    per_block: bool,
) -> None:
    """Write the codes of a payload; with `per_block`, also the steps.

    See `levels.encode_stochastic`.
    """
    count = gradient.numel()
    if count:
        kernel = kernels(bits).stochastic if per_block else kernels(bits).stochastic_with_step
        arrays = gradient, steps, codes.view(torch.uint32)
        options = np.float32(scale), np.uint32(seed & 0xFFFFFFFF)
        launch(kernel, blocks(count), THREADS, *arrays, *options)


def decode(
    out: Tensor, steps: Tensor, codes: Tensor, scale: float, bits: int, accumulate: bool
) -> None:
    """Write or add the decoded values; see `levels.decode`.

    Args:
        out: float32[n].
        steps: float32[blocks(n)] or float32[1].
        codes: uint8[4 * words(n, bits)].
        scale: Factor of the decoded values.
        bits: Bits of a code.
        accumulate: Add to `out`.
    """
    count = out.numel()
    if count:
        options = np.float32(scale), np.bool_(accumulate)
        words = codes.view(torch.uint32)
        launch(kernels(bits).decode, blocks(count), THREADS, out, steps, words, *options)


class LevelKernels(NamedTuple):
    """Kernels of one width of codes, compiled or as plain functions.

    Attributes:
        nearest: Takes (gradient, residual, steps, words, scale).
        stochastic: Takes (gradient, steps, words, scale, seed), and writes a step per block.
        stochastic_with_step: Takes the same arguments, and reads `steps[0]`.
        decode: Takes (out, steps, words, scale, accumulate).
    """

    nearest: Any
    stochastic: Any
    stochastic_with_step: Any
    decode: Any


@cache
def kernels(bits: int) -> LevelKernels:
    """Return the compiled kernels of codes of 2, 4 or 8 bits."""
    return LevelKernels(*map(cuda.jit, kernel_functions(bits)))


@device_function
def _step_of_block(own: Any, top: Any, lanes: Any, lane: Any) -> Any:
    """Return a block's step to all its threads; NaN if a value is not finite.

    Args:
        own: Largest magnitude of this thread's elements; infinity if one is not finite.
        top: Highest level.
        lanes: float32[1, THREADS] in shared memory.
        lane: Number of the thread.
    """
    lanes[0, lane] = own
    tree_largest(lanes, lane)
    # A selected NaN has the same bits as on the CPU; a NaN from a division does not.
    is_finite = lanes[0, 0] <= float32(LARGEST)
    largest = min(lanes[0, 0], float32(LARGEST_LEVEL))
    return divide(largest, top) if is_finite else float32(np.nan)


@device_function
def _inverse(step: Any) -> Any:
    return divide(float32(1), step) if step >= float32(SMALLEST_STEP) else float32(0)


@device_function
def _clipped(exact: Any, top: Any) -> Any:
    return max(min(exact, top), -top)


def kernel_functions(bits: int) -> LevelKernels:
    """Return the kernels of codes of 2, 4 or 8 bits as plain functions, to be compiled."""
    planes = 32 // bits
    words_of_block, words_of_thread = BLOCK // planes, _PER_THREAD // planes
    top, mask = float32((1 << (bits - 1)) - 1), int32((1 << bits) - 1)

    def nearest(gradient: Any, residual: Any, steps: Any, words: Any, scale: Any) -> None:
        lanes = cuda.shared.array((1, THREADS), float32)
        values = cuda.local.array(_PER_THREAD, float32)
        lane, first = cuda.threadIdx.x, cuda.blockIdx.x * BLOCK
        size = min(gradient.size - first, BLOCK)
        count = (size + planes - 1) // planes
        largest = float32(0)
        for w in range(words_of_thread):
            word_index = w * THREADS + lane
            for p in range(planes):
                element = p * count + word_index
                # All loads come before the first store, so that many loads are in flight.
                value = float32(0)
                if word_index < count and element < size:
                    scaled = multiply(gradient[first + element], scale)
                    value = add(scaled, residual[first + element])
                values[w * planes + p] = value
                is_finite = abs(value) <= float32(LARGEST)
                largest = larger(abs(value) if is_finite else float32(np.inf), largest)
        step = _step_of_block(largest, top, lanes, lane)
        inverse = _inverse(step)
        if lane == 0:
            steps[cuda.blockIdx.x] = step
        for w in range(words_of_thread):
            word_index = w * THREADS + lane
            if word_index < count:
                word = uint32(0)
                # The residual of a block that is not finite stays as it is.
                if step <= float32(LARGEST):
                    for p in range(planes):
                        element = p * count + word_index
                        if element < size:
                            value = values[w * planes + p]
                            exact = _clipped(multiply(value, inverse), top)
                            level = int32(round_to_even(exact))
                            sent = multiply(float32(level), step)
                            residual[first + element] = subtract(value, sent)
                            code = uint32(level & mask)
                            word = uint32(word | (code << uint32(bits * p)))
                words[cuda.blockIdx.x * words_of_block + word_index] = word

    def stochastic_encoder(per_block: bool) -> Any:
        def stochastic(gradient: Any, steps: Any, words: Any, scale: Any, seed: Any) -> None:
            lanes = cuda.shared.array((1, THREADS), float32)
            values = cuda.local.array(_PER_THREAD, float32)
            lane, first = cuda.threadIdx.x, cuda.blockIdx.x * BLOCK
            size = min(gradient.size - first, BLOCK)
            count = (size + planes - 1) // planes
            largest = float32(0)
            for w in range(words_of_thread):
                word_index = w * THREADS + lane
                for p in range(planes):
                    element = p * count + word_index
                    value = float32(0)
                    if word_index < count and element < size:
                        value = multiply(gradient[first + element], scale)
                    values[w * planes + p] = value
                    is_finite = abs(value) <= float32(LARGEST)
                    largest = larger(abs(value) if is_finite else float32(np.inf), largest)
            if per_block:
                step = _step_of_block(largest, top, lanes, lane)
                if lane == 0:
                    steps[cuda.blockIdx.x] = step
            else:
                step = steps[0]
            inverse, mixed_seed = _inverse(step), _mixed(uint32(seed))
            for w in range(words_of_thread):
                word_index = w * THREADS + lane
                if word_index < count:
                    word = uint32(0)
                    if step <= float32(LARGEST):
                        for p in range(planes):
                            element = p * count + word_index
                            if element < size:
                                random = _mixed(uint32(uint32(first + element) ^ mixed_seed))
                                # 24 bits: a float32 in [0, 1).
                                high = float32(random >> uint32(8))
                                chance = multiply(high, float32(2.0**-24))
                                exact = multiply(values[w * planes + p], inverse)
                                exact = _clipped(exact, top)
                                lower = round_down(exact)
                                level = int32(lower)
                                if subtract(exact, lower) > chance:
                                    level = int32(level + int32(1))
                                code = uint32(level & mask)
                                word = uint32(word | (code << uint32(bits * p)))
                    words[cuda.blockIdx.x * words_of_block + word_index] = word

        return stochastic

    def decoder(out: Any, steps: Any, words: Any, scale: Any, accumulate: Any) -> None:
        values = cuda.local.array(planes, float32)
        lane, first = cuda.threadIdx.x, cuda.blockIdx.x * BLOCK
        size = min(out.size - first, BLOCK)
        count = (size + planes - 1) // planes
        step = multiply(steps[min(cuda.blockIdx.x, steps.size - 1)], scale)
        for w in range(words_of_thread):
            word_index = w * THREADS + lane
            if word_index < count:
                word = words[cuda.blockIdx.x * words_of_block + word_index]
                for p in range(planes):
                    values[p] = float32(0)
                    if accumulate and p * count + word_index < size:
                        values[p] = out[first + p * count + word_index]
                for p in range(planes):
                    element = p * count + word_index
                    if element < size:
                        code = int32((word >> uint32(bits * p)) & uint32(mask))
                        # Two's complement: the upper half of the codes is negative.
                        level = code - (2 * (code & int32(1 << (bits - 1))))
                        value = multiply(float32(level), step)
                        out[first + element] = add(values[p], value)

    return LevelKernels(nearest, stochastic_encoder(True), stochastic_encoder(False), decoder)
