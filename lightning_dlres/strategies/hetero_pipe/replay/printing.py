"""Text that a training step prints.

The step runs on several ranks, and may run several times. Its text is captured, and printed once,
on rank 0.
"""

from __future__ import annotations

import logging
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, redirect_stdout
from io import StringIO

# Key of the printed text among the fingerprints of changed attributes.
PRINTED = "print()"


@contextmanager
def isolated_output(shows_logging: bool) -> Iterator[StringIO]:
    """Context manager that captures standard output in the yielded text.

    If user code raises, the text is printed at once, since it may explain the error.

    Args:
        shows_logging: Whether messages of Python's `logging` appear, and breakpoints stop.
    """
    text, breakpoint_hook = StringIO(), sys.breakpointhook
    if not shows_logging:
        # A debugger's prompt would be captured with all other output. The user would not see it,
        # and the run would wait for ever.
        sys.breakpointhook = _ignore_breakpoint
    try:
        with nullcontext() if shows_logging else _without_logging(), redirect_stdout(text):
            yield text
    except Exception:
        sys.stdout.write(text.getvalue())
        raise
    finally:
        sys.breakpointhook = breakpoint_hook


@contextmanager
def _without_logging() -> Iterator[None]:
    """Context manager that drops messages of `logging` from this thread.

    `logging.disable` would empty the cache of every logger in the process, which takes as long as
    a small step, and would drop the messages of other threads, too.
    """
    thread, handle = threading.get_ident(), logging.Logger.handle

    def handle_of_other_threads(logger: logging.Logger, record: logging.LogRecord) -> None:
        if threading.get_ident() != thread:
            handle(logger, record)

    logging.Logger.handle = handle_of_other_threads  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        logging.Logger.handle = handle  # type: ignore[method-assign]


def _ignore_breakpoint(*args: object, **kwargs: object) -> None:
    """Replacement for `sys.breakpointhook` that does nothing."""
