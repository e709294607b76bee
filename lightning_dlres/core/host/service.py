"""Service threads: if one dies, its process ends.

Otherwise clients would wait for a process that lives but no longer answers.
"""

from __future__ import annotations

import os
import sys
import threading
import traceback
from collections.abc import Callable

# Exit status of a process whose service thread died: EX_SOFTWARE of sysexits.h.
STATUS = 70


def start_service(
    run: Callable[[], None], name: str, on_death: Callable[[], None] | None = None
) -> threading.Thread:
    """Start a daemon thread and return it.

    Args:
        run: Function that the thread runs.
        name: Name of the thread, for the message when it dies.
        on_death: Called after the exception is printed. None: end the process with `STATUS`.
    """

    def guarded() -> None:
        try:
            run()
        except BaseException:
            sys.stderr.write(f"dlres: thread {name!r} died; this process ends:\n")
            traceback.print_exc()
            sys.stderr.flush()
            (on_death or _end)()

    thread = threading.Thread(target=guarded, name=name, daemon=True)
    thread.start()
    return thread


def _end() -> None:
    # No cleanup: it could wait forever for locks that other threads hold.
    os._exit(STATUS)
