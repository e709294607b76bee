"""What a training step prints, kept back: it runs on several ranks, and more than once, and its
lines shall come once, on rank 0."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from io import StringIO

# Stands for what a step prints, among the paths of attributes that it changes.
PRINTED = "print()"


@contextmanager
def printing_held(logs: bool) -> Iterator[StringIO]:
    """Context manager that keeps what is printed in the yielded text; printed where user code
    raises.

    Args:
        logs: whether messages of Python's `logging` are let through.
    """
    text, hook, level = StringIO(), sys.breakpointhook, logging.root.manager.disable
    if not logs:
        # A debugger would wait for an answer to what nobody sees.
        sys.breakpointhook = _go_on
        logging.disable(logging.CRITICAL)
    try:
        with redirect_stdout(text):
            yield text
    except Exception:
        sys.stdout.write(text.getvalue())
        raise
    finally:
        sys.breakpointhook = hook
        logging.disable(level)


def _go_on(*args: object, **kwargs: object) -> None:
    """Take the place of a breakpoint."""
