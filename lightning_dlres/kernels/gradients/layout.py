"""Layout of packed codes: blocks of elements, each stored as planes of 32-bit words.

A block of `BLOCK` elements with codes of `bits` bits fills `BLOCK * bits / 32` words. A plane is as
many consecutive elements as the block has words. Word i holds the code of element i of each plane,
the first plane in the lowest bits. Neighbouring elements thus lie in neighbouring words, so that a
CPU packs with vector instructions, and the threads of a GPU read neighbouring addresses. A last,
shorter block has as few words as hold its elements, and its planes are shorter, too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache, partial
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from lightning_dlres.core.arrays import array_of, typed_array
from lightning_dlres.kernels import workers

Array = NDArray[Any]

# Elements of a block: 16 KiB of float32, so that a block and its residual stay in the L1 cache.
BLOCK = 4096
# Partial sums of a block, see `sums`. They are independent, which allows vector instructions, and a
# GPU has one thread for each.
LANES = 256
# Largest finite float32. Comparisons with it also find NaN, because a comparison with NaN is false.
LARGEST = float(np.finfo(np.float32).max)
# Smallest piece of a thread, in elements. A smaller one costs more time to submit than it saves.
_PIECE = 1 << 17


def blocks(count: int) -> int:
    """Return the number of blocks of `count` elements."""
    return -(-count // BLOCK)


@cache
def block_numbers(count: int) -> NDArray[np.int64]:
    """Return int64[blocks(count)], the numbers of the blocks; it must not be changed.

    Kept, because `arange` releases the interpreter's lock, and then waits for other threads.
    """
    return np.arange(blocks(count))


def words(count: int, bits: int) -> int:
    """Return the number of 32-bit words of `count` codes of `bits` bits (1, 2, 4, 8 or 16)."""
    whole, rest = divmod(count, BLOCK)
    planes = 32 // bits
    return whole * (BLOCK // planes) + -(-rest // planes)


def run(
    kernel: Callable[..., None],
    count: int,
    bits: int,
    *,
    elements: Sequence[Array],
    per_block: Sequence[Array] = (),
    codes: Array | None = None,
    options: Sequence[Any] = (),
) -> None:
    """Call a CPU kernel for pieces of the elements, in as many threads as torch uses.

    Pieces begin at whole blocks, and blocks are independent. The result therefore does not depend
    on the number of threads. The kernel gets the arrays and options in the order of the parameters
    below.

    Args:
        kernel: Function to call.
        count: Number of elements.
        bits: Bits of a code.
        elements: Arrays with one entry for each element.
        per_block: Arrays with one entry for each block.
        codes: Packed codes; None if the kernel has none.
        options: Further arguments.
    """
    pieces = min(workers.count(), max(count // _PIECE, 1))
    if pieces == 1:
        kernel(*elements, *per_block, *(() if codes is None else (codes,)), *options)
        return
    bounds = [min(blocks(count) * i // pieces * BLOCK, count) for i in range(pieces + 1)]
    tasks = []
    for first, stop in pairwise(bounds):
        arrays = [array[first:stop] for array in elements]
        arrays += [array[blocks(first) : blocks(stop)] for array in per_block]
        if codes is not None:
            arrays.append(codes[words(first, bits) : words(stop, bits)])
        tasks.append(partial(kernel, *arrays, *options))
    workers.run(tasks)


def word_array(memory: Tensor) -> NDArray[np.uint32]:
    """Return uint8[4 * n] on the CPU, aligned to 4 bytes, as an array of words."""
    return array_of(memory).view(np.uint32)


def float_array(tensor: Tensor) -> NDArray[np.float32]:
    """Return contiguous float32[n] on the CPU as an array."""
    return typed_array(tensor, "<f4")


def double_array(tensor: Tensor) -> NDArray[np.float64]:
    """Return contiguous float64 on the CPU as an array of the same shape."""
    return typed_array(tensor, "<f8").reshape(tensor.shape)
