"""Memory shared by processes of one host; the kernel frees it after the last process ends.

On Linux it has no name in any file system: other processes open it through its creator's /proc
entry. It also takes no space in /dev/shm, which is small in containers.
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
    """Shared memory of this process.

    Attributes:
        data: uint8[nbytes].
        path: Path by which other processes of this host can open it; "" if it has no bytes.
    """

    data: NDArray[np.uint8]
    path: str

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return len(self.data)


def create(name: str, nbytes: int, directory: Path | None = None) -> SharedMemory:
    """Return new shared memory, which this process keeps open until it ends.

    Args:
        name: Name shown in /proc/PID/maps; need not be unique.
        nbytes: Size in bytes; 0 allocates nothing.
        directory: Directory on a local disk, for an unnamed file with the bytes. None: use RAM.

    Raises:
        ConfigError: If the directory is not writable, or has too little free space.
    """
    if not nbytes:
        return SharedMemory(np.empty(0, dtype=np.uint8), "")
    descriptor, path = _open(name, nbytes, directory)
    return SharedMemory(_map(descriptor, nbytes), path)


def attach(path: str, nbytes: int) -> NDArray[np.uint8]:
    """Return the shared memory of another process of this host.

    Raises:
        OSError: If that process has ended, or belongs to another user.
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
        # Without /proc other processes need the file's name. If this process ends, the next cache
        # process removes the file.
        return descriptor, path
    os.unlink(path)
    return descriptor, f"/proc/{os.getpid()}/fd/{descriptor}"


def _map(descriptor: int, nbytes: int) -> NDArray[np.uint8]:
    return np.frombuffer(mmap.mmap(descriptor, nbytes), dtype=np.uint8)
