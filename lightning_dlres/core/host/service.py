"""Threads that others count on: one that dies takes its process with it, so that nobody waits for a
process that lives and does not answer."""

from __future__ import annotations

import os
import sys
import threading
import traceback
from collections.abc import Callable

# EX_SOFTWARE of sysexits.h.
STATUS = 70


def start_service(
    run: Callable[[], None], name: str, died: Callable[[], None] | None = None
) -> threading.Thread:
    """Start a daemon thread and return it.

    Args:
        run: what it does, until it returns.
        name: of the thread, for the last words.
        died: called after an exception has been printed. None: the process ends with `STATUS`.
    """

    def guarded() -> None:
        try:
            run()
        except BaseException:
            sys.stderr.write(f"dlres: thread {name!r} has died, and this process with it:\n")
            traceback.print_exc()
            sys.stderr.flush()
            (died or _end)()

    thread = threading.Thread(target=guarded, name=name, daemon=True)
    thread.start()
    return thread


def _end() -> None:
    # Other threads may hold locks for ever, so nothing is cleaned up.
    os._exit(STATUS)
