"""Counter of refused messages, with a log of limited length: peers could fill the disk."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable

# Number of refusals that are logged one by one. Each later line covers a growing interval.
_LOGGED_SINGLY = 5
# Seconds between two lines.
_FIRST_INTERVAL, _LONGEST_INTERVAL = 10.0, 3600.0
# Largest number of characters in a line: a peer chooses parts of the text.
_LONGEST_LINE = 500


class Refusals:
    """Counter of refusals that logs some of them.

    Args:
        log: Function that gets a line without control characters; None prints to standard error.
        clock: Function that returns seconds.

    Attributes:
        count: Number of refusals so far.
    """

    def __init__(
        self,
        log: Callable[[str], None] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.log = log or _to_stderr
        self.count = 0
        self._clock = clock
        # Value of `count` at the last line.
        self._logged_count = 0
        self._interval, self._next_line = _FIRST_INTERVAL, 0.0

    def note(self, error: object) -> None:
        """Count a refusal; log it if it is one of the first or the interval has passed."""
        self.count += 1
        now = self._clock()
        if self.count > _LOGGED_SINGLY:
            if now < self._next_line:
                return
            self._interval = min(2 * self._interval, _LONGEST_INTERVAL)
        self._next_line = now + self._interval
        unlogged = self.count - self._logged_count - 1
        self._logged_count = self.count
        unlogged_text = f" ({unlogged} more before it)" if unlogged else ""
        self.log(f"Refused{unlogged_text}: {_printable(str(error))}")


def _printable(text: str) -> str:
    """Return a text with its control characters escaped, and its length limited."""
    shortened = text[:_LONGEST_LINE]
    printable = "".join(char if char.isprintable() else ascii(char)[1:-1] for char in shortened)
    return printable + "..." * (len(text) > len(shortened))


def _to_stderr(line: str) -> None:
    print(f"dlres: {line}", file=sys.stderr, flush=True)
