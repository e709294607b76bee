"""Locks on files, which end with their holders however these end, and directories that are removed
when their owners are gone.

The directory `name` of an owner lies beside its lock, `name.lock`, and maybe its log, `name.log`.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import glob
import os
import shutil
import stat
from collections.abc import Iterator
from pathlib import Path

from lightning_dlres.core.errors import ConfigError

LOCK = ".lock"


def private_directory(parent: Path, name: str) -> Path:
    """Return a directory of this user, which nobody else may enter; made where it is missing.

    Raises:
        ConfigError: somebody else has made it, or it cannot be made.
    """
    path = parent / name
    try:
        with contextlib.suppress(FileExistsError):
            path.mkdir(mode=0o700)
        found = path.lstat()
    except OSError as error:
        raise ConfigError(
            f"{path} must be a directory that can be made, got: {error.strerror}. Set TMPDIR to "
            "another place."
        ) from error
    if found.st_uid != os.getuid() or not stat.S_ISDIR(found.st_mode) or found.st_mode & 0o077:
        raise ConfigError(
            f"{path}: it belongs to another user or others may enter it; expected a directory of "
            "this user alone. Remove it, or set TMPDIR to another place."
        )
    return path


@contextlib.contextmanager
def locked(path: Path, kind: int = fcntl.LOCK_EX) -> Iterator[int | None]:
    """Context manager that gives a descriptor which holds the lock, or None where another process
    holds it. A process that inherits the descriptor goes on holding the lock."""
    flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
    descriptor = os.open(path, flags, 0o600)
    try:
        try:
            fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
            # Somebody may have removed the file between its opening and the lock.
            held = os.path.samestat(os.fstat(descriptor), path.stat())
        except (BlockingIOError, FileNotFoundError):
            held = False
        yield descriptor if held else None
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def locked_if_possible(path: Path) -> Iterator[bool]:
    """Context manager that gives whether no other process holds the lock, and removes its file. On
    a file system without locks nobody holds one."""
    with contextlib.ExitStack() as stack:
        try:
            held = stack.enter_context(locked(path)) is not None
        except OSError as error:
            if error.errno not in (errno.ENOSYS, errno.ENOTSUP, errno.ENOLCK):
                raise
            held = True
        try:
            yield held
        finally:
            if held:
                with contextlib.suppress(OSError):
                    path.unlink()


def sweep(base: Path, prefix: str = "") -> None:
    """Remove the directories of owners that are gone, of those whose names begin with a prefix.
    Links are not followed."""
    for path in base.glob(f"{glob.escape(prefix)}*{LOCK}"):
        with contextlib.suppress(OSError), locked(path) as lock:
            if lock is not None:
                remove_owned(path)


def remove_owned(lock: Path) -> None:
    """Remove a directory, its log and, last, the lock that this process holds."""
    shutil.rmtree(lock.with_suffix(""), ignore_errors=True)
    lock.with_suffix(".log").unlink(missing_ok=True)
    lock.unlink(missing_ok=True)
