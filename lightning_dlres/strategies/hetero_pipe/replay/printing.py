"""Text that a training step prints.

The step runs on several ranks, and may run several times. Its text is captured, and printed once,
on rank 0.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
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
    disabled_level = logging.root.manager.disable
    if not shows_logging:
        # A debugger's prompt would be captured with all other output. The user would not see it,
        # and the run would wait for ever.
        sys.breakpointhook = _ignore_breakpoint
        logging.disable(logging.CRITICAL)
    try:
        with redirect_stdout(text):
            yield text
    except Exception:
        sys.stdout.write(text.getvalue())
        raise
    finally:
        sys.breakpointhook = breakpoint_hook
        logging.disable(disabled_level)


def _ignore_breakpoint(*args: object, **kwargs: object) -> None:
    """Replacement for `sys.breakpointhook` that does nothing."""
