"""Return of freed memory to the operating system, where an allocator would keep it.

glibc takes blocks of up to 32 MiB from a heap that it keeps. Smaller allocations fill the holes
that freed tensors leave, so in a step that frees and allocates many tensors the heap grows beyond
what is ever in use. A process under a limit of memory is killed for such holes, too.
"""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager

# Blocks of at least this many bytes get pages of their own, which return when they are freed. The
# kernel fills new pages with zeros, which takes time.
_LEAST_BYTES = 1 << 20
# Size from which glibc gives blocks their own pages in the end, if it finds the size by itself, and
# the free bytes at the end of a heap that it then keeps.
_USUAL_BYTES, _USUAL_KEPT_BYTES = 32 << 20, 64 << 20
# Parameters of `mallopt`, see its manual page.
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
# Users who set these have chosen the allocator's behaviour themselves.
_USER_SETTINGS = ("MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_", "GLIBC_TUNABLES")

_lock = threading.Lock()
# Contexts that are open now.
_open_count = 0


@contextmanager
def returning_freed_memory() -> Iterator[None]:
    """Context manager in which large blocks of the process return to the system when they are
    freed; no effect without glibc.

    Contexts may overlap, in any threads. After the first one, glibc no longer finds the size of
    such blocks by itself, and keeps to the largest that it would choose.
    """
    _change_count(1)
    try:
        yield
    finally:
        _change_count(-1)


def _change_count(change: int) -> None:
    global _open_count
    with _lock:
        was_open = _open_count > 0
        _open_count += change
        is_open = _open_count > 0
        if is_open != was_open and _LIBRARY is not None:
            _LIBRARY.mallopt(_MMAP_THRESHOLD, _LEAST_BYTES if is_open else _USUAL_BYTES)
            _LIBRARY.mallopt(_TRIM_THRESHOLD, _USUAL_KEPT_BYTES)


def _glibc() -> ctypes.CDLL | None:
    """Return the C library of this process if it has glibc's allocator and its usual settings."""
    if any(name in os.environ for name in _USER_SETTINGS):
        return None
    try:
        library = ctypes.CDLL(None)
        library.gnu_get_libc_version  # noqa: B018 - only glibc has it
        library.mallopt.argtypes = [ctypes.c_int, ctypes.c_int]
    except (OSError, AttributeError, TypeError):
        return None
    return library


_LIBRARY = _glibc()
