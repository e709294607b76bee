"""Arithmetic of GPU kernels that gives the bits of a CPU.

The compiler of GPU code (NVVM) contracts a * b + c into one fused operation, which rounds once
instead of twice. The last bit then differs from a CPU. Numba has no option for this: its
`fastmath=False` leaves the contraction on. PTX without a rounding mode lets the assembler contract,
too. The functions below have a rounding mode in PTX (`mul.rn`, `add.rn`), which forbids both.

Results that are NaN have other bits on a GPU (0x7fffffff) than on a CPU (0x7fc00000). Kernels that
write NaN into payloads therefore select a constant. Decoded values may differ in the bits of NaN.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
from numba import cuda

from lightning_dlres.kernels.cuda_launch import SIMULATED

if SIMULATED:
    # The simulator runs Python code on NumPy scalars, and has no libdevice.
    multiply = multiply_double = operator.mul
    add = add_double = operator.add
    subtract, divide = operator.sub, operator.truediv
    round_to_even, round_down = np.rint, np.floor
    device_function: Callable[..., Any] = cuda.jit(device=True)
else:
    from numba.cuda import libdevice

    multiply, multiply_double = libdevice.fmul_rn, libdevice.dmul_rn
    add, add_double = libdevice.fadd_rn, libdevice.dadd_rn
    subtract, divide = libdevice.fsub_rn, libdevice.fdiv_rn
    round_to_even, round_down = libdevice.rintf, libdevice.floorf
    # Inlined functions need no driver when kernels are only compiled to PTX.
    device_function = partial(cuda.jit, device=True, inline="always")


def _larger(magnitude: Any, other: Any) -> Any:
    return magnitude if magnitude >= other else other


larger = device_function(_larger)


def _tree(combine: Any) -> Any:
    """Return a function that combines the columns of a matrix in shared memory, row by row."""

    def reduce(lanes: Any, lane: Any) -> None:
        """Combine the upper half of the columns with the lower one until one is left.

        All threads of a block call it. Column 0 then has the results, for all threads.

        Args:
            lanes: Matrix with a power of two of columns; overwritten.
            lane: Number of the thread.
        """
        cuda.syncthreads()
        half = lanes.shape[1] // 2
        while half > 0:
            if lane < half:
                for row in range(lanes.shape[0]):
                    lanes[row, lane] = combine(lanes[row, lane], lanes[row, lane + half])
            cuda.syncthreads()
            half //= 2

    return device_function(reduce)


tree_sum, tree_sum_double, tree_largest = _tree(add), _tree(add_double), _tree(larger)
