"""Files on disk for data that exceeds memory; their disk space is allocated in advance."""

from __future__ import annotations

import errno
import os
import stat
import tempfile
from pathlib import Path

from lightning_dlres.core.errors import ConfigError
from lightning_dlres.core.units import format_bytes


def trim(descriptor: int, max_bytes: int) -> None:
    """Empty a log file that is open for appending, if it has more than `max_bytes` bytes.

    The next write must append: in another mode it would leave a hole of the old size.
    """
    state = os.fstat(descriptor)
    if stat.S_ISREG(state.st_mode) and state.st_size > max_bytes:
        os.ftruncate(descriptor, 0)
        os.write(descriptor, f"({state.st_size} bytes removed.)\n".encode())


def temporary_file(directory: Path, name: str, nbytes: int) -> tuple[int, str]:
    """Return the descriptor and the path of a new file of `nbytes` bytes.

    The caller closes and removes it.

    Raises:
        ConfigError: If the directory is not writable, or has too little free space.
    """
    try:
        descriptor, path = tempfile.mkstemp(prefix=f"{name}-", dir=directory)
    except OSError as error:
        raise ConfigError(
            f"directory must be writable, got {directory}: {error.strerror}. Use another directory."
        ) from error
    try:
        # Without allocated space, a write through `mmap` to a full disk kills the process (SIGBUS).
        os.posix_fallocate(descriptor, 0, max(nbytes, 1))
    except OSError as error:
        os.close(descriptor)
        os.unlink(path)
        if error.errno not in (errno.ENOSPC, errno.EFBIG):
            raise
        state = os.statvfs(directory)
        free = format_bytes(state.f_bavail * state.f_frsize)
        raise ConfigError(
            f"directory must have {format_bytes(nbytes)} of free space, got {free} in {directory}. "
            "Free some space, or use another directory or a smaller size."
        ) from error
    return descriptor, path
