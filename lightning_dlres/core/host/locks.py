"""File locks, and directories that are removed when their owners have ended.

The kernel releases a lock when its holder ends, even by a crash. The directory `name` of an owner
lies beside its lock, `name.lock`, and perhaps its log, `name.log`.
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

# Ending of lock files.
LOCK = ".lock"


def private_directory(parent: Path, name: str) -> Path:
    """Return a directory that only this user may enter; create it if it is missing.

    Raises:
        ConfigError: If it belongs to another user or is open to others, or cannot be created.
    """
    path = parent / name
    try:
        with contextlib.suppress(FileExistsError):
            path.mkdir(mode=0o700)
        state = path.lstat()
    except OSError as error:
        raise ConfigError(
            f"{path} must be a directory that can be created, got: {error.strerror}. Set TMPDIR to "
            "another directory."
        ) from error
    if state.st_uid != os.getuid() or not stat.S_ISDIR(state.st_mode) or state.st_mode & 0o077:
        raise ConfigError(
            f"{path} must be a directory of this user alone, got one of another user or one that "
            "others may enter. Remove it, or set TMPDIR to another directory."
        )
    return path


@contextlib.contextmanager
def locked(path: Path, kind: int = fcntl.LOCK_EX) -> Iterator[int | None]:
    """Context manager that yields a descriptor holding the lock, or None if another process has it.

    A child process that inherits the descriptor also holds the lock.
    """
    flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
    descriptor = os.open(path, flags, 0o600)
    try:
        try:
            fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
            # Another process may have removed the file between its opening and the lock.
            held = os.path.samestat(os.fstat(descriptor), path.stat())
        except (BlockingIOError, FileNotFoundError):
            held = False
        yield descriptor if held else None
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def locked_if_possible(path: Path) -> Iterator[bool]:
    """Context manager that yields True if no other process holds the lock.

    After True it removes the lock's file at the end. On a file system without locks it always
    yields True.
    """
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
    """Remove the directories of owners that have ended, among names with this prefix.

    Links are not followed.
    """
    for path in base.glob(f"{glob.escape(prefix)}*{LOCK}"):
        with contextlib.suppress(OSError), locked(path) as lock:
            if lock is not None:
                remove_owned(path)


def remove_owned(lock: Path) -> None:
    """Remove a directory, its log and, last, its lock, which this process must hold."""
    shutil.rmtree(lock.with_suffix(""), ignore_errors=True)
    lock.with_suffix(".log").unlink(missing_ok=True)
    lock.unlink(missing_ok=True)
