"""Reads of many local files with one compiled call that releases the interpreter's lock.

A thread that reads ahead in Python would wait for that lock after every system call.
"""

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

# Maximum size of a buffer that is used again, as a multiple of the size of the data.
_MAX_SIZE_RATIO = 4

# Functions of the C library. `open` takes a mode, too, but reads it only when it creates a file.
_open = ExternalFunction("open", int32(uintp, int32))
_pread = ExternalFunction("pread", int64(int32, uintp, uint64, int64))
_close = ExternalFunction("close", int32(int32))


def read_whole(paths: Sequence[str], sizes: Lengths) -> tuple[Bytes, Lengths]:
    """Return the contents of whole files, concatenated, and the number of bytes read of each.

    The data is valid only if every count equals its size.

    Args:
        paths: Paths of the files.
        sizes: int64[n], expected sizes in bytes.

    Returns:
        Data, uint8[sum of sizes], and the number of bytes read of each file, int64[n]. A count that
        is one more than its size shows that the file has grown. A count below its size shows that
        the file has shrunk, or cannot be opened (-1) or read.
    """
    names = bytearray(os.fsencode("\0".join(paths)))
    names.append(0)
    data, counts = _allocate(sizes)
    _read_whole(np.frombuffer(names, np.uint8), os.O_RDONLY | os.O_CLOEXEC, sizes, data, counts)
    return data[:-1], counts


def read_parts(
    descriptors: NDArray[np.int32], starts: Lengths, sizes: Lengths
) -> tuple[Bytes, Lengths]:
    """Return parts of open files, concatenated, and the number of bytes read of each.

    Args:
        descriptors: int32[n], the open files.
        starts: int64[n], offsets in bytes.
        sizes: int64[n], in bytes.

    Returns:
        Data and counts as `read_whole` returns them, but a count is never more than its size.
    """
    data, counts = _allocate(sizes)
    _read_parts(descriptors, starts, sizes, data, counts)
    return data[:-1], counts


def _allocate(sizes: Lengths) -> tuple[Bytes, Lengths]:
    # One byte more, to detect that the last file has grown. An extra byte of any other file is
    # overwritten by the data of the next file.
    return buffer_pool.get(int(sizes.sum()) + 1), np.empty(len(sizes), dtype=np.int64)


class BufferPool:
    """Pool of buffers. A buffer returns to the pool once all arrays and other views of it are gone.

    Fresh memory costs a page fault for every 4 KiB, which takes longer than the copy into it.

    Args:
        max_free: Maximum number of free buffers in the pool.
    """

    def __init__(self, max_free: int = 8) -> None:
        # Any thread takes and returns buffers. The garbage collector returns them, too, even in a
        # thread that is inside `get`. A lock would then deadlock; `deque` needs none.
        self._free: deque[Bytes] = deque(maxlen=max_free)

    def get(self, length: int) -> Bytes:
        """Return uint8[length], not initialized."""
        for _ in range(len(self._free)):
            try:
                memory = self._free.popleft()
            except IndexError:
                break
            if length <= len(memory) <= _MAX_SIZE_RATIO * length:
                return self._lend(memory, length)
            self._free.append(memory)
        # Not np.empty: it asks for huge pages, which the system may first have to free.
        # MAP_PRIVATE: a process that is forked later must not read into the same memory.
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        memory = np.frombuffer(mmap.mmap(-1, length + length // 8, flags), dtype=np.uint8)
        return self._lend(memory, length)

    def _lend(self, memory: Bytes, length: int) -> Bytes:
        return np.asarray(_Loan(memory, self._free))[:length]


class _Loan:
    """Owner of the memory below an array; returns it to the pool when the last view is gone."""

    def __init__(self, memory: Bytes, free: deque[Bytes]) -> None:
        self._memory, self._free = memory, free
        self.__array_interface__ = memory.__array_interface__

    def __del__(self) -> None:
        self._free.append(self._memory)


buffer_pool = BufferPool()


@compiled((uint8[::1], int32, int64[::1], uint8[::1], int64[::1]), nogil=True)
def _read_whole(names: Any, flags: Any, sizes: Any, data: Any, counts: Any) -> None:
    # Signed, as the sizes are: Numba adds signed and unsigned integers as floats.
    name, target, at = int64(names.ctypes.data), int64(data.ctypes.data), 0
    for file in range(len(sizes)):
        descriptor = _open(uintp(name + at), flags)
        while names[at] != 0:
            at += 1
        at += 1
        count = int64(-1)
        if descriptor >= 0:
            count = int64(0)
            while count < sizes[file]:
                # One byte more shows that the file has grown.
                missing = uint64(sizes[file] + 1 - count)
                more = _pread(descriptor, uintp(target + count), missing, count)
                if more <= 0:
                    break
                count += more
            if sizes[file] == 0:
                count = _pread(descriptor, uintp(target), uint64(1), int64(0))
            _close(descriptor)
        counts[file] = count
        target += sizes[file]


@compiled((int32[::1], int64[::1], int64[::1], uint8[::1], int64[::1]), nogil=True)
def _read_parts(descriptors: Any, starts: Any, sizes: Any, data: Any, counts: Any) -> None:
    target = int64(data.ctypes.data)
    for part in range(len(sizes)):
        count = int64(0)
        while count < sizes[part]:
            missing = uint64(sizes[part] - count)
            start = int64(starts[part] + count)
            more = _pread(descriptors[part], uintp(target + count), missing, start)
            if more <= 0:
                break
            count += more
        counts[part] = count
        target += sizes[part]
