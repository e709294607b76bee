"""Numba functions whose compiled code several processes may keep in one place.

Numba keeps code of one function for two signatures in numbered files, and looks for a free number
without locking: of two processes that compile another signature each, one may leave its code under
the other's name. Whoever loads that later runs code for other types than it has: it computes
nonsense, or crashes. So the signatures are said beforehand, and compiled by one process at a time.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from numba import cfunc, njit, types

from lightning_dlres.core.errors import PeerTimeoutError
from lightning_dlres.core.units import format_seconds

# All that others compile at a time takes a minute on a slow machine.
PATIENCE = 300.0
_POLL = 0.01
# What file systems without locks say (Lustre and NFS may be mounted so), and NFS of a file that
# this process may only read: then there are none.
_NO_LOCKS = (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP, errno.EBADF)

_made: list[Compiled] = []


class Compiled:
    """A function compiled for some signatures when it is first called, or loaded from where an
    earlier process has kept it. Called with other types it raises a TypeError.

    Args:
        function: what to compile.
        signatures: tuples of Numba types, one for each argument.
        nogil: whether it lets go of the interpreter's lock.
    """

    def __init__(
        self, function: Callable[..., Any], signatures: Sequence[Any], nogil: bool = False
    ) -> None:
        self.__doc__ = function.__doc__
        self._dispatcher = part(function, nogil=nogil)
        self._waiting = list(signatures)
        self._compiling = threading.Lock()
        _made.append(self)

    def __call__(self, *arguments: Any) -> Any:
        if self._waiting:
            self.load()
        return self._dispatcher(*arguments)

    @property
    def kept_in(self) -> str | None:
        """The directory where the code is kept, if there is one."""
        found: str | None = self._dispatcher.stats.cache_path
        return found

    def load(self) -> None:
        """Compile now, or load what was compiled.

        Raises:
            PeerTimeoutError: another process compiles and does not end.
        """
        with self._compiling:
            if not self._waiting:
                return
            with in_turn(self.kept_in):
                for signature in self._waiting:
                    self._dispatcher.compile(signature)
            self._dispatcher.disable_compile()
            self._waiting = []


def compiled(*signatures: Any, nogil: bool = False) -> Callable[[Callable[..., Any]], Any]:
    """Return a decorator that makes a function a `Compiled` one."""
    return lambda function: Compiled(function, signatures, nogil)


def part(function: Callable[..., Any], nogil: bool = False) -> Any:
    """Return a function for compiled ones to call; with their types, and in their turn."""
    try:
        return njit(function, nogil=nogil, cache=True)
    except RuntimeError:
        # There is no directory where code could be kept.
        return njit(function, nogil=nogil)


def compiled_for_addresses(function: Callable[..., Any], signature: Any) -> Any:
    """Return a C function with a Numba signature, whose arguments are numbers and addresses; it
    lets go of the interpreter's lock."""
    kept = part(function).stats.cache_path
    with in_turn(kept):
        found = cfunc(signature, cache=kept is not None)(function).ctypes
    is_address = [isinstance(kind, types.CPointer) for kind in signature.args]
    found.argtypes = [ctypes.c_void_p if address else ctypes.c_int64 for address in is_address]
    return found


def load_all() -> None:
    """Compile or load every such function of the modules that were imported."""
    for function in list(_made):
        function.load()


@contextlib.contextmanager
def in_turn(directory: str | None) -> Iterator[None]:
    """Let one process at a time change the code that is kept in a directory (None: nowhere).

    Raises:
        PeerTimeoutError: another one has not ended after `PATIENCE` seconds.
    """
    if directory is None:
        yield
        return
    path = Path(directory) / "dlres.lock"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = _opened(path)
    except OSError:
        # Numba cannot write there, either.
        yield
        return
    deadline = time.monotonic() + PATIENCE
    try:
        while not _locked(descriptor):
            if time.monotonic() > deadline:
                raise PeerTimeoutError(
                    f"waited {format_seconds(PATIENCE)} for another process that compiles into "
                    f"{directory}. See who has {path} open, and end it; or set NUMBA_CACHE_DIR to "
                    "another directory."
                )
            time.sleep(_POLL)
        yield
    finally:
        # Not only closed: a process forked meanwhile has it open, too.
        with contextlib.suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_UN)
        os.close(descriptor)


def _opened(path: Path) -> int:
    flags = os.O_CREAT | os.O_CLOEXEC
    try:
        # NFS locks only what may be written.
        return os.open(path, os.O_RDWR | flags, 0o666)
    except PermissionError:
        # Somebody else has made it.
        return os.open(path, os.O_RDONLY | flags, 0o666)


def _locked(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise
    return True
