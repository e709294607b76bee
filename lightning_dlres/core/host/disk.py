"""Files on a disk that hold memory's overflow: their room is there before they are used."""

from __future__ import annotations

import errno
import os
import stat
import tempfile
from pathlib import Path

from lightning_dlres.core.errors import ConfigError
from lightning_dlres.core.units import format_bytes


def trim(descriptor: int, most: int) -> None:
    """Empty a file that is being appended to, if it has more than so many bytes."""
    state = os.fstat(descriptor)
    if stat.S_ISREG(state.st_mode) and state.st_size > most:
        os.ftruncate(descriptor, 0)
        os.write(descriptor, f"({state.st_size} bytes were here.)\n".encode())


def temporary_file(directory: Path, name: str, nbytes: int) -> tuple[int, str]:
    """Return the descriptor and the path of a new file of so many bytes, which the caller closes
    and removes.

    Raises:
        ConfigError: the directory cannot be written to, or has too little room.
    """
    try:
        descriptor, path = tempfile.mkstemp(prefix=f"{name}-", dir=directory)
    except OSError as error:
        raise ConfigError(
            f"a file in {directory}: {error.strerror}. Expected a directory that can be written to."
        ) from error
    try:
        # A file with holes would end the process when the disk is full at the wrong moment.
        os.posix_fallocate(descriptor, 0, max(nbytes, 1))
    except OSError as error:
        os.close(descriptor)
        os.unlink(path)
        if error.errno not in (errno.ENOSPC, errno.EFBIG):
            raise
        state = os.statvfs(directory)
        free = format_bytes(state.f_bavail * state.f_frsize)
        raise ConfigError(
            f"a file in {directory}: got {free} of free room, expected {format_bytes(nbytes)}. Try "
            "another directory, or a smaller size."
        ) from error
    return descriptor, path
