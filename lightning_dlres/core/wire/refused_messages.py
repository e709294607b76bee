"""A count of what peers have sent in vain, and a log of it that stays short whatever they send."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable

# The first few say what is wrong. After them one line tells of many, ever more rarely.
_SAID_AT_ONCE = 5
_FIRST_PAUSE, _LONGEST_PAUSE = 10.0, 3600.0
# Of a line; a peer chooses parts of it.
_LONGEST_LINE = 500


class Refusals:
    """Counts refusals and passes some of them on.

    Args:
        say: gets a line, without control characters. None: printed on standard error.
        clock: returns seconds.

    Attributes:
        count: how many refusals there were.
    """

    def __init__(
        self,
        say: Callable[[str], None] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.say = say or _to_stderr
        self.count = 0
        self._clock = clock
        self._said = 0
        self._pause, self._next = _FIRST_PAUSE, 0.0

    def note(self, error: object) -> None:
        """Count a refusal, and say so if it is one of the first or nothing was said for long."""
        self.count += 1
        now = self._clock()
        if self.count > _SAID_AT_ONCE:
            if now < self._next:
                return
            self._pause = min(2 * self._pause, _LONGEST_PAUSE)
        self._next = now + self._pause
        unsaid = self.count - self._said - 1
        self._said = self.count
        others = f" ({unsaid} more before it)" if unsaid else ""
        self.say(f"Refused{others}: {_printable(str(error))}")


def _printable(text: str) -> str:
    """Return text that cannot end a line of a log or move a terminal's cursor."""
    cut = text[:_LONGEST_LINE]
    shown = "".join(char if char.isprintable() else ascii(char)[1:-1] for char in cut)
    return shown + "..." * (len(text) > len(cut))


def _to_stderr(line: str) -> None:
    print(f"dlres: {line}", file=sys.stderr, flush=True)
