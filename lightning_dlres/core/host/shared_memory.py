"""Memory that processes of one host share, and that is gone with the last of them, however they
end.

On Linux it has no name in any file system: others open it through the process that made it. That
also needs no room in /dev/shm, of which containers have little.
"""

from __future__ import annotations

import mmap
import os
import tempfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from lightning_dlres.core.host.disk import temporary_file


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
    descriptor, path = _open(name, nbytes, directory)
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


def _open(name: str, nbytes: int, directory: Path | None) -> tuple[int, str]:
    if directory is None and hasattr(os, "memfd_create"):
        descriptor = os.memfd_create(name)
        os.ftruncate(descriptor, nbytes)
        return descriptor, f"/proc/{os.getpid()}/fd/{descriptor}"
    descriptor, path = temporary_file(directory or Path(tempfile.gettempdir()), name, nbytes)
    if not Path("/proc/self/fd").is_dir():
        # Without /proc others need the name; whoever starts the next cache removes what is left.
        return descriptor, path
    os.unlink(path)
    return descriptor, f"/proc/{os.getpid()}/fd/{descriptor}"


def _map(descriptor: int, nbytes: int) -> NDArray[np.uint8]:
    return np.frombuffer(mmap.mmap(descriptor, nbytes), dtype=np.uint8)
