"""Numba functions whose cache directory several processes can share safely.

Numba stores the code of each signature of a function in a numbered file, and picks a free number
without a lock. If two processes compile two signatures at once, both may pick the same number. A
later process would load code for wrong types, and compute wrong results or crash. Signatures are
therefore declared in advance, and one process at a time compiles them.
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

# Seconds to wait for another process. Compiling all functions takes a minute on a slow machine.
LOCK_TIMEOUT = 300.0
# Seconds between two attempts to take the lock.
_POLL = 0.01
# Error numbers of file systems without locks (an option of Lustre and NFS mounts), and of NFS for a
# file that is open only for reading. In these cases code is compiled without a lock.
_NO_LOCKS = (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP, errno.EBADF)

_functions: list[Compiled] = []


class Compiled:
    """Function that its first call compiles for fixed signatures, or loads from the cache.

    A call with other types raises a TypeError.

    Args:
        function: Function to compile.
        signatures: Tuples of Numba types, one type for each argument.
        nogil: Release the interpreter's lock during a call.
    """

    def __init__(
        self, function: Callable[..., Any], signatures: Sequence[Any], nogil: bool = False
    ) -> None:
        self.__doc__ = function.__doc__
        self._dispatcher = subroutine(function, nogil=nogil)
        # Signatures that are not compiled yet.
        self._pending = list(signatures)
        self._compile_lock = threading.Lock()
        _functions.append(self)

    def __call__(self, *arguments: Any) -> Any:
        if self._pending:
            self.load()
        return self._dispatcher(*arguments)

    @property
    def cache_directory(self) -> str | None:
        """Directory of the compiled code; None if no directory is writable."""
        directory: str | None = self._dispatcher.stats.cache_path
        return directory

    def load(self) -> None:
        """Compile the signatures now, or load them from the cache.

        Raises:
            PeerTimeoutError: If another process compiles for too long.
        """
        with self._compile_lock:
            if not self._pending:
                return
            with cache_lock(self.cache_directory):
                for signature in self._pending:
                    self._dispatcher.compile(signature)
            self._dispatcher.disable_compile()
            self._pending = []


def compiled(*signatures: Any, nogil: bool = False) -> Callable[[Callable[..., Any]], Any]:
    """Return a decorator that turns a function into a `Compiled`."""
    return lambda function: Compiled(function, signatures, nogil)


def subroutine(function: Callable[..., Any], nogil: bool = False) -> Any:
    """Return a Numba function that only compiled functions may call; its callers compile it."""
    try:
        return njit(function, nogil=nogil, cache=True)
    except RuntimeError:
        # Numba found no writable cache directory.
        return njit(function, nogil=nogil)


def compiled_for_addresses(function: Callable[..., Any], signature: Any) -> Any:
    """Return a function, compiled to C calling conventions, of integers and addresses.

    A call releases the interpreter's lock.

    Args:
        function: Function to compile.
        signature: Numba signature. Pointers are passed as addresses, and other arguments as int64.
    """
    directory = subroutine(function).stats.cache_path
    with cache_lock(directory):
        compiled_function = cfunc(signature, cache=directory is not None)(function).ctypes
    is_address = [isinstance(kind, types.CPointer) for kind in signature.args]
    compiled_function.argtypes = [
        ctypes.c_void_p if address else ctypes.c_int64 for address in is_address
    ]
    return compiled_function


def load_all() -> None:
    """Compile or load all `Compiled` functions of the imported modules."""
    for function in list(_functions):
        function.load()


@contextlib.contextmanager
def cache_lock(directory: str | None) -> Iterator[None]:
    """Context manager that lets one process at a time change the code in a directory.

    Args:
        directory: Cache directory; None: no cache and no lock.

    Raises:
        PeerTimeoutError: If another process holds the lock for `LOCK_TIMEOUT` seconds.
    """
    if directory is None:
        yield
        return
    path = Path(directory) / "dlres.lock"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = _open_lock_file(path)
    except OSError:
        # Numba cannot write to this directory, either.
        yield
        return
    deadline = time.monotonic() + LOCK_TIMEOUT
    try:
        while not _try_lock(descriptor):
            if time.monotonic() > deadline:
                raise PeerTimeoutError(
                    f"waited {format_seconds(LOCK_TIMEOUT)} for another process that compiles into "
                    f"{directory}. End the process that has {path} open, or set NUMBA_CACHE_DIR "
                    "to another directory."
                )
            time.sleep(_POLL)
        yield
    finally:
        # Unlock explicitly: a process forked in the meantime has the file open, too, and would keep
        # the lock.
        with contextlib.suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_UN)
        os.close(descriptor)


def _open_lock_file(path: Path) -> int:
    flags = os.O_CREAT | os.O_CLOEXEC
    try:
        # NFS locks only files that are open for writing.
        return os.open(path, os.O_RDWR | flags, 0o666)
    except PermissionError:
        # The file belongs to another user.
        return os.open(path, os.O_RDONLY | flags, 0o666)


def _try_lock(descriptor: int) -> bool:
    """Return False if another process holds the lock; without file locks, return True."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise
    return True
