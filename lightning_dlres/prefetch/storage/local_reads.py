"""Reading many local files with one call that lets go of the interpreter's lock: a thread that
reads ahead in Python would wait for it after every system call."""

from __future__ import annotations

import mmap
import os
from collections import deque
from collections.abc import Sequence
from typing import Any

import numpy as np
from numba import int32, int64, uint8, uint64, uintp
from numba.types import ExternalFunction
from numpy.typing import NDArray

from lightning_dlres.core.compiled import compiled

Bytes = NDArray[np.uint8]
Lengths = NDArray[np.int64]

# How many times as large a buffer may be as what it is used for.
_MOST_WASTE = 4

# Of the C library. `open` takes a mode, too, but reads it only where it creates a file.
_open = ExternalFunction("open", int32(uintp, int32))
_pread = ExternalFunction("pread", int64(int32, uintp, uint64, int64))
_close = ExternalFunction("close", int32(int32))


def read_whole(paths: Sequence[str], sizes: Lengths) -> tuple[Bytes, Lengths]:
    """Read whole files, one behind the other.

    Args:
        paths: of the files.
        sizes: int64[n], in bytes.

    Returns:
        uint8[sum of sizes], and int64[n] with the bytes that were there: one more than its size for
        a file that has grown, -1 for one that cannot be read. Only where all are as long as they
        should be the bytes are theirs.
    """
    names = bytearray(os.fsencode("\0".join(paths)))
    names.append(0)
    data, counts = _room(sizes)
    _read_whole(np.frombuffer(names, np.uint8), os.O_RDONLY | os.O_CLOEXEC, sizes, data, counts)
    return data[:-1], counts


def read_parts(
    descriptors: NDArray[np.int32], starts: Lengths, sizes: Lengths
) -> tuple[Bytes, Lengths]:
    """Read parts of open files, one behind the other: int32[n], int64[n] and int64[n]. Returns what
    `read_whole` does."""
    data, counts = _room(sizes)
    _read_parts(descriptors, starts, sizes, data, counts)
    return data[:-1], counts


def _room(sizes: Lengths) -> tuple[Bytes, Lengths]:
    # One byte more shows that the last file has grown. Behind other files it is the next one's.
    return buffers.get(int(sizes.sum()) + 1), np.empty(len(sizes), dtype=np.int64)


class Buffers:
    """Memory that is used again once neither an array nor anything made of it without a copy is
    left. Fresh memory costs a page fault for every 4 KiB, more than the copy into it.

    Args:
        most: how many buffers wait to be used again.
    """

    def __init__(self, most: int = 8) -> None:
        # Taken and given back by any thread, also by the garbage collector: so it has no lock.
        self._free: deque[Bytes] = deque(maxlen=most)

    def get(self, length: int) -> Bytes:
        """Return uint8[length]."""
        for _ in range(len(self._free)):
            try:
                memory = self._free.popleft()
            except IndexError:
                break
            if length <= len(memory) <= _MOST_WASTE * length:
                return self._lent(memory, length)
            self._free.append(memory)
        # Not np.empty: it asks for huge pages, for which the system may first have to make room.
        # Private, or a process forked later would read into the same memory.
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        memory = np.frombuffer(mmap.mmap(-1, length + length // 8, flags), dtype=np.uint8)
        return self._lent(memory, length)

    def _lent(self, memory: Bytes, length: int) -> Bytes:
        return np.asarray(_Loan(memory, self._free))[:length]


class _Loan:
    """Stands between an array and the memory below it; gone, it gives the memory back."""

    def __init__(self, memory: Bytes, free: deque[Bytes]) -> None:
        self._memory, self._free = memory, free
        self.__array_interface__ = memory.__array_interface__

    def __del__(self) -> None:
        self._free.append(self._memory)


buffers = Buffers()


@compiled((uint8[::1], int32, int64[::1], uint8[::1], int64[::1]), nogil=True)
def _read_whole(names: Any, flags: Any, sizes: Any, data: Any, counts: Any) -> None:
    # Signed, as the sizes are: Numba adds signed and unsigned numbers as floats.
    name, target, at = int64(names.ctypes.data), int64(data.ctypes.data), 0
    for number in range(len(sizes)):
        descriptor = _open(uintp(name + at), flags)
        while names[at] != 0:
            at += 1
        at += 1
        count = int64(-1)
        if descriptor >= 0:
            count = int64(0)
            while count < sizes[number]:
                wanted = uint64(sizes[number] + 1 - count)
                more = _pread(descriptor, uintp(target + count), wanted, count)
                if more <= 0:
                    break
                count += more
            if sizes[number] == 0:
                count = _pread(descriptor, uintp(target), uint64(1), int64(0))
            _close(descriptor)
        counts[number] = count
        target += sizes[number]


@compiled((int32[::1], int64[::1], int64[::1], uint8[::1], int64[::1]), nogil=True)
def _read_parts(descriptors: Any, starts: Any, sizes: Any, data: Any, counts: Any) -> None:
    target = int64(data.ctypes.data)
    for number in range(len(sizes)):
        count = int64(0)
        while count < sizes[number]:
            wanted = uint64(sizes[number] - count)
            place = int64(starts[number] + count)
            more = _pread(descriptors[number], uintp(target + count), wanted, place)
            if more <= 0:
                break
            count += more
        counts[number] = count
        target += sizes[number]
