"""Zero-value compression on the CPU, with as many threads as torch uses.

Each thread takes a piece that begins at a whole 64-bit word of the mask. The loops are in
`zvc_portable` and `zvc_x86`.
"""

from __future__ import annotations

import ctypes
from functools import cache, partial
from itertools import pairwise
from typing import Any

import numpy as np
from numba import carray, types
from numpy.typing import NDArray

from lightning_dlres.core.compiled import compiled, compiled_for_addresses
from lightning_dlres.kernels import workers, zvc_portable, zvc_x86
from lightning_dlres.kernels.x86 import count_bits

Bytes = NDArray[np.uint8]
# Smallest piece of a thread, in bytes. Submitting a smaller one costs more time than it saves.
_PIECE_BYTES = 1 << 19
_WORD_ELEMENTS = 64
# Bytes after the result that the loops may overwrite: one AVX2 vector.
OVERRUN = 32


def encode(source: Bytes, width: int, mask: Bytes, values: Bytes) -> int:
    """Write the mask and the non-zero elements, in order; return the number of these elements.

    Args:
        source: Bytes of the elements.
        width: Bytes of an element: 1, 2 or 4.
        mask: uint8[mask_bytes(count)] for `count` elements; see `zvc`.
        values: As many bytes as `source`. Bytes after the result are overwritten, too.
    """
    loop, dtype = ENCODERS[width], _DTYPES[width]
    elements, target = source.view(dtype), values.view(dtype)
    mask[elements.size // 8 :] = 0
    pieces = _pieces(elements.size, width)
    counts = workers.run(
        [
            partial(loop, elements[a:b], mask[a // 8 : -(-b // 8)], target[a:b])
            for a, b in pairwise(pieces)
        ]
    )
    total = counts[0]
    for start, count in zip(pieces[1:], counts[1:], strict=False):
        # Each thread wrote its values from the start of its own piece on. Close the gaps.
        ctypes.memmove(
            values.ctypes.data + total * width, values.ctypes.data + start * width, count * width
        )
        total += count
    return int(total)


def encode_on_one_core(source: Bytes, width: int, mask: Bytes, values: Bytes) -> int:
    """Encode with one thread; return the number of non-zero elements.

    See `encode` for the arguments. Here `values` may be smaller than `source`: it needs the size of
    the result plus `OVERRUN` bytes. In `encode`, each thread writes at the offset of its own piece,
    which needs the full size.
    """
    elements = source.view(_DTYPES[width])
    mask[elements.size // 8 :] = 0
    target = values[: values.size // width * width].view(_DTYPES[width])
    return int(ENCODERS[width](elements, mask, target))


def count_nonzero(source: Bytes, width: int) -> int:
    """Return the number of elements with any bit set."""
    return int(np.count_nonzero(source.view(_DTYPES[width])))


def decode(mask: Bytes, values: Bytes, width: int, out: Bytes) -> None:
    """Write the elements that `encode` compressed.

    Args:
        mask: uint8[mask_bytes(count)] for `count` elements; see `zvc`.
        values: Bytes of the non-zero elements; their number must equal the mask's set bits.
        width: Bytes of an element: 1, 2 or 4.
        out: Memory for the elements' bytes.
    """
    loop, dtype = DECODERS[width], _DTYPES[width]
    elements, packed = out.view(dtype), values.view(dtype)
    pieces = _pieces(elements.size, width)
    masks = [mask[a // 8 : -(-b // 8)] for a, b in pairwise(pieces)]
    # Count in whole words: bits after the last element are 0.
    counts = [count_set_bits(mask[a // 8 : -(-b // 64) * 8]) for a, b in pairwise(pieces)]
    ends = np.cumsum([0, *counts])
    workers.run(
        [
            partial(loop, part, packed[start:end], elements[a:b])
            for part, (start, end), (a, b) in zip(
                masks, pairwise(ends.tolist()), pairwise(pieces), strict=True
            )
        ]
    )


def count_set_bits(mask: Bytes) -> int:
    """Return the number of set bits of a mask; its length is a multiple of 8 bytes."""
    return int(_count_set_bits(mask.view(np.uint64)))


def density(address: int, count: int, width: int, runs: int, length: int) -> float:
    """Return the share of non-zero elements in a sample, or in all elements if they are fewer.

    Args:
        address: Address of the first element.
        count: Number of elements.
        width: Bytes of an element: 1, 2, 4 or 8.
        runs: Number of runs of adjacent elements in the sample; they are evenly spaced.
        length: Number of elements in a run.
    """
    if count <= runs * length:
        runs, length = 1, count
    step = count // max(runs, 1)
    return float(_sample_counter(width)(address, step, runs, length)) / max(runs * length, 1)


@cache
def _sample_counter(width: int) -> Any:
    """Return the compiled counter of non-zero elements in the runs of a sample.

    It takes an address: passing an array costs more time.
    """
    address = types.CPointer(_NUMBA_TYPES[width])
    return compiled_for_addresses(
        _count_nonzero_in_runs, types.int64(address, types.int64, types.int64, types.int64)
    )


def _pieces(count: int, width: int) -> list[int]:
    """Return the bounds of the threads' pieces; pieces begin at a whole word of the mask."""
    piece_count = min(workers.count(), max(count * width // _PIECE_BYTES, 1))
    words = -(-count // _WORD_ELEMENTS)
    return [min(words * i // piece_count * _WORD_ELEMENTS, count) for i in range(piece_count + 1)]


@compiled((types.uint64[::1],), nogil=True)
def _count_set_bits(words: Any) -> Any:
    total = np.uint64(0)
    for word in words:
        total += count_bits(word)
    return total


def _count_nonzero_in_runs(first: Any, step: Any, runs: Any, length: Any) -> Any:
    elements, nonzero = carray(first, (step * runs,)), 0
    for run in range(runs):
        for position in range(length):
            nonzero += elements[run * step + position] != 0
    return nonzero


_NUMBA_TYPES: dict[int, Any] = {1: types.uint8, 2: types.uint16, 4: types.uint32, 8: types.uint64}
_DTYPES: dict[int, Any] = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}
ENCODERS: dict[int, Any] = zvc_portable.ENCODERS | zvc_x86.ENCODERS
DECODERS: dict[int, Any] = zvc_portable.DECODERS | zvc_x86.DECODERS
