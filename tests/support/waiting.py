"""Waiting for other threads and processes, with a deadline instead of fixed pauses."""

from __future__ import annotations

import time
from collections.abc import Callable


def no_failure() -> None:
    """Check for failures of other ranks during a wait: there are none."""


def wait_until(condition: Callable[[], object], what: str, timeout: float = 20.0) -> None:
    """Return as soon as the condition holds; fail, naming `what`, after `timeout` seconds."""
    deadline = time.monotonic() + timeout
    while not condition():
        if time.monotonic() > deadline:
            raise AssertionError(f"condition must hold within {timeout:g} s, but did not: {what}")
        time.sleep(0.01)
