"""Threads that still wait for a lost rank when their process ends.

Gloo has no way to stop waiting. A thread that comes back from it while the interpreter shuts down
is ended in the middle of foreign code, which aborts the process with a message that says nothing.
"""

from __future__ import annotations

import atexit
import os
import sys
import threading
import time
from collections.abc import Sequence

_PATIENCE_SECONDS = 2.0
_threads: list[threading.Thread] = []


def leave_behind(threads: Sequence[threading.Thread]) -> None:
    """Leave threads of a failed run to themselves; the process will end without minding them."""
    if threads and not _threads:
        atexit.register(_end)
    _threads.extend(threads)


def _end() -> None:
    deadline = time.monotonic() + _PATIENCE_SECONDS
    for thread in _threads:
        thread.join(max(deadline - time.monotonic(), 0.0))
    if any(thread.is_alive() for thread in _threads):
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1)
