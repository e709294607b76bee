"""Memory that processes of one host share, and that is gone with the last of them, however they
end.

On Linux it has no name in any file system: others open it through the process that made it. That
also needs no room in /dev/shm, of which containers have little.
"""

from __future__ import annotations

import errno
import mmap
import os
import tempfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from lightning_dlres.core.errors import ConfigError
from lightning_dlres.core.units import format_bytes


@dataclass(frozen=True)
class SharedMemory:
    """So many bytes as uint8[nbytes], and the path by which others on this host can open them."""

    data: NDArray[np.uint8]
    path: str

    @property
    def nbytes(self) -> int:
        """How many."""
        return len(self.data)


def create(name: str, nbytes: int, directory: Path | None = None) -> SharedMemory:
    """Return new memory, which this process keeps open until it ends.

    Args:
        name: shown in /proc/PID/maps; need not be unique.
        nbytes: size; 0 has no memory.
        directory: where a nameless file on a local disk holds the bytes instead.

    Raises:
        ConfigError: the directory cannot be written to, or has too little room.
    """
    if not nbytes:
        return SharedMemory(np.empty(0, dtype=np.uint8), "")
    try:
        descriptor, path = _open(name, directory)
    except OSError as error:
        raise ConfigError(
            f"a file in {directory}: {error.strerror}. Expected a directory that can be written to."
        ) from error
    if directory is None:
        os.ftruncate(descriptor, nbytes)
    else:
        _fill(descriptor, nbytes, directory)
    return SharedMemory(_map(descriptor, nbytes), path)


def attach(path: str, nbytes: int) -> NDArray[np.uint8]:
    """Return the memory that another process of this host has made.

    Raises:
        OSError: that process has ended, or belongs to somebody else.
    """
    if not nbytes:
        return np.empty(0, dtype=np.uint8)
    descriptor = os.open(path, os.O_RDWR)
    try:
        return _map(descriptor, nbytes)
    finally:
        os.close(descriptor)


def _open(name: str, directory: Path | None) -> tuple[int, str]:
    if directory is None and hasattr(os, "memfd_create"):
        descriptor = os.memfd_create(name)
        return descriptor, f"/proc/{os.getpid()}/fd/{descriptor}"
    descriptor, path = tempfile.mkstemp(prefix=f"{name}-", dir=directory)
    if not Path("/proc/self/fd").is_dir():
        # Without /proc others need the name; whoever starts the next cache removes what is left.
        return descriptor, path
    os.unlink(path)
    return descriptor, f"/proc/{os.getpid()}/fd/{descriptor}"


def _fill(descriptor: int, nbytes: int, directory: Path) -> None:
    try:
        # A file with holes would end the process when the disk is full at the wrong moment.
        os.posix_fallocate(descriptor, 0, nbytes)
    except OSError as error:
        os.close(descriptor)
        if error.errno not in (errno.ENOSPC, errno.EFBIG):
            raise
        state = os.statvfs(directory)
        free = format_bytes(state.f_bavail * state.f_frsize)
        raise ConfigError(
            f"a file in {directory}: got {free} of free room, expected {format_bytes(nbytes)}. Try "
            "another directory, or a smaller size."
        ) from error


def _map(descriptor: int, nbytes: int) -> NDArray[np.uint8]:
    return np.frombuffer(mmap.mmap(descriptor, nbytes), dtype=np.uint8)
