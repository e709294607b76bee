"""Zero-value compression on the CPU, on as many cores as torch computes with.

Every thread takes a piece that begins at a whole word of the mask. The loops are in `zvc_portable`
and `zvc_x86`.
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
# Less than this for a thread costs more to hand over than it saves.
_PIECE_BYTES = 1 << 19
_WORD_ELEMENTS = 64
# Bytes behind what counts that the loops may write to: a vector.
OVERRUN = 32


def encode(source: Bytes, width: int, mask: Bytes, values: Bytes) -> int:
    """Write the mask and, side by side, the elements that are not zero; return their number.

    Args:
        source: the elements' bytes.
        width: bytes of an element: 1, 2 or 4.
        mask: uint8[mask_bytes(count)].
        values: as many bytes as `source`; more than what counts is overwritten.
    """
    body, kind = ENCODERS[width], _KINDS[width]
    elements, room = source.view(kind), values.view(kind)
    mask[elements.size // 8 :] = 0
    pieces = _pieces(elements.size, width)
    found = workers.run(
        [
            partial(body, elements[a:b], mask[a // 8 : -(-b // 8)], room[a:b])
            for a, b in pairwise(pieces)
        ]
    )
    kept = found[0]
    for start, more in zip(pieces[1:], found[1:], strict=False):
        # Each thread has left its own where they would be if nothing were zero.
        ctypes.memmove(
            values.ctypes.data + kept * width, values.ctypes.data + start * width, more * width
        )
        kept += more
    return int(kept)


def encode_on_one_core(source: Bytes, width: int, mask: Bytes, values: Bytes) -> int:
    """Do what `encode` does, where `values` has room for what counts and `OVERRUN` bytes more:
    threads would write over each other's beginnings."""
    elements = source.view(_KINDS[width])
    mask[elements.size // 8 :] = 0
    room = values[: values.size // width * width].view(_KINDS[width])
    return int(ENCODERS[width](elements, mask, room))


def count_nonzero(source: Bytes, width: int) -> int:
    """Return how many elements are not zero, bit for bit."""
    return int(np.count_nonzero(source.view(_KINDS[width])))


def decode(mask: Bytes, values: Bytes, width: int, out: Bytes) -> None:
    """Write the elements that `encode` was given.

    Args:
        mask: uint8[mask_bytes(count)].
        values: the bytes of the elements that are not zero: as many as the mask says.
        width: bytes of an element: 1, 2 or 4.
        out: the elements' bytes.
    """
    body, kind = DECODERS[width], _KINDS[width]
    elements, packed = out.view(kind), values.view(kind)
    pieces = _pieces(elements.size, width)
    masks = [mask[a // 8 : -(-b // 8)] for a, b in pairwise(pieces)]
    ends = np.cumsum([0, *(kept(mask[a // 8 : -(-b // 64) * 8]) for a, b in pairwise(pieces))])
    workers.run(
        [
            partial(body, part, packed[start:end], elements[a:b])
            for part, (start, end), (a, b) in zip(
                masks, pairwise(ends.tolist()), pairwise(pieces), strict=True
            )
        ]
    )


def kept(mask: Bytes) -> int:
    """Return how many bits of a mask are set; its length is a multiple of 8 bytes."""
    return int(_count(mask.view(np.uint64)))


def density(address: int, count: int, width: int, runs: int, length: int) -> float:
    """Return which part of the elements is not zero, of so many runs of this length, or of all
    elements where there are no more.

    Args:
        address: of the first element.
        count: how many there are.
    """
    if count <= runs * length:
        runs, length = 1, count
    step = count // max(runs, 1)
    return float(_counter(width)(address, step, runs, length)) / max(runs * length, 1)


@cache
def _counter(width: int) -> Any:
    """Return the compiled function: from an address, as arrays take longer to hand over than the
    sample takes."""
    address = types.CPointer(_TYPES[width])
    return compiled_for_addresses(
        _count_nonzero, types.int64(address, types.int64, types.int64, types.int64)
    )


def _pieces(count: int, width: int) -> list[int]:
    """Return where the threads' pieces begin and end: at whole words of the mask."""
    number = min(workers.count(), max(count * width // _PIECE_BYTES, 1))
    words = -(-count // _WORD_ELEMENTS)
    return [min(words * i // number * _WORD_ELEMENTS, count) for i in range(number + 1)]


@compiled((types.uint64[::1],), nogil=True)
def _count(words: Any) -> Any:
    total = np.uint64(0)
    for word in words:
        total += count_bits(word)
    return total


def _count_nonzero(first: Any, step: Any, runs: Any, length: Any) -> Any:
    elements, found = carray(first, (step * runs,)), 0
    for run in range(runs):
        for place in range(length):
            found += elements[run * step + place] != 0
    return found


_TYPES: dict[int, Any] = {1: types.uint8, 2: types.uint16, 4: types.uint32, 8: types.uint64}
_KINDS: dict[int, Any] = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}
ENCODERS: dict[int, Any] = zvc_portable.ENCODERS | zvc_x86.ENCODERS
DECODERS: dict[int, Any] = zvc_portable.DECODERS | zvc_x86.DECODERS
