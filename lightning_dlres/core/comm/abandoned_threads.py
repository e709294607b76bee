"""Threads that still wait for a lost rank when their process ends.

Gloo cannot stop waiting. A thread that returns from gloo while the interpreter shuts down is ended
in the middle of C++ code. That aborts the process with a meaningless message.
"""

from __future__ import annotations

import atexit
import os
import sys
import threading
import time
from collections.abc import Sequence

# Time that all threads together get at exit to end by themselves.
_PATIENCE_SECONDS = 2.0
_threads: list[threading.Thread] = []


def abandon(threads: Sequence[threading.Thread]) -> None:
    """Register threads of a failed run, so that the process can exit although they still wait.

    If one of them still runs a few seconds after the exit has begun, the process ends at once, with
    status 1.
    """
    if threads and not _threads:
        atexit.register(_exit_despite_threads)
    _threads.extend(threads)


def _exit_despite_threads() -> None:
    deadline = time.monotonic() + _PATIENCE_SECONDS
    for thread in _threads:
        thread.join(max(deadline - time.monotonic(), 0.0))
    if any(thread.is_alive() for thread in _threads):
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1)
