"""Decisions from measured steps: a drift that calls for a new plan, the use of a coordinator."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence

from lightning_dlres.core.checks import finite, whole_number
from lightning_dlres.core.errors import ConfigError, got_expected

# Part of the step that a coordinator must gain. It costs messages and a single point of failure,
# and repeated measurements of steps differ by about as much.
COORDINATOR_GAIN = 0.02
# Values of `coordinator`, the one with the fewest messages first.
_MODES = ("none", "replay", "always")


class DriftDetector:
    """Detector of steps that have become slower or faster since the plan was made.

    The median of the first window of steps is the reference for later windows. Ranks measure
    different times, so one rank may detect a drift alone: after each window, the ranks agree
    whether to plan again. Their windows end with the same step if all ranks add a time in each
    step.

    Args:
        window: Number of steps of a window.
        band: Factor by which the median of a window may differ from the reference.
        skip: Steps after planning that are ignored. Connections and memory are new in them.

    Attributes:
        is_window_complete: True if the last step completed a window, so that ranks should agree.

    Raises:
        ConfigError: If an argument has a bad value.
    """

    def __init__(self, *, window: int = 20, band: float = 1.3, skip: int = 3) -> None:
        self._window = whole_number("window", window, "window=20")
        self._band = finite("band", band, "band=1.3", least=1.0, above=True)
        self._skip = whole_number("skip", skip, "skip=3", least=0)
        self.reset()

    def reset(self, pause: int = 0) -> None:
        """Start again, after a new plan was made.

        Args:
            pause: Steps after the reference in which no window counts as complete, so that ranks
                do not plan again at once.
        """
        self._pause = pause
        self._ignored = 0
        self._seconds: list[float] = []
        self._reference: float | None = None
        self.is_window_complete = False

    def add(self, seconds: float) -> bool:
        """Report the time of a step; return True if it completes a window out of the band."""
        self.is_window_complete = False
        if self._ignored < self._skip:
            self._ignored += 1
            return False
        self._seconds.append(seconds)
        if len(self._seconds) < self._window:
            return False
        median = statistics.median(self._seconds)
        self._seconds.clear()
        if self._reference is None:
            self._reference = median
            return False
        self._pause -= self._window
        if self._pause >= 0:
            return False
        self.is_window_complete = True
        return not self._reference / self._band <= median <= self._reference * self._band


def choose_coordinator(seconds: Mapping[str, Sequence[float]]) -> str:
    """Return the value of `coordinator` with the shortest median step: "none", "replay" or
    "always".

    One with more messages wins only if it gains more than `COORDINATOR_GAIN` of the step.

    Args:
        seconds: Times of steps by value of `coordinator`, "none" among them.

    Raises:
        ConfigError: If a value is unknown or has no times, or "none" is missing.
    """
    if "none" not in seconds or set(seconds) - set(_MODES) or not all(seconds.values()):
        rule = f"times of steps with 'none' and others of {list(_MODES)}"
        raise ConfigError(got_expected("seconds", dict(seconds), rule, "{'none': [0.1]}"))
    best = "none"
    for mode in _MODES[1:]:
        if mode in seconds:
            median = statistics.median(seconds[mode])
            if median < (1 - COORDINATOR_GAIN) * statistics.median(seconds[best]):
                best = mode
    return best
