"""Watch over the steps of one rank: it tells when the ranks should agree whether to plan again."""

from __future__ import annotations

import time

from lightning_dlres.gradsync.plan.measured_steps import DriftDetector

# Fraction of the step's time that is added to the exposed time of synchronisation. Without it, the
# noise of an exposed time near 0 would count as drift, though such a time hardly matters.
_STEP_FRACTION = 0.1
# Number of steps after a planning before the ranks may plan again: after the first planning, and at
# most. The number doubles with each planning, so that noise costs little: a measurement takes about
# as long as some steps.
_FIRST_PAUSE, _LONGEST_PAUSE = 100, 10_000


class DriftWatch:
    """Watch over the exposed times and the steps of one rank.

    The exposed time lasts from the last ready gradient of a step until all gradients are means. All
    ranks call `begin_step` in the same steps, and all of them are due after the same step.

    Args:
        detector: Detector of drifts; None makes one.
        first_pause: Steps before the ranks may plan again for the first time.

    Attributes:
        is_due: True if a window of steps is complete, so that all ranks should agree whether to
            plan again.
        is_drifting: True if that window has drifted on this rank.
    """

    def __init__(
        self,
        detector: DriftDetector | None = None,
        *,
        first_pause: int = _FIRST_PAUSE,
    ) -> None:
        self._detector, self._pause = detector or DriftDetector(), first_pause
        self._detector.reset(first_pause)
        self.is_due = self.is_drifting = False
        # Times at which the last gradient was ready, and the last mean was there.
        self._ready = self._done = 0.0
        self._last_done: float | None = None

    def ready(self) -> None:
        """Note that gradients of this rank are ready; the last call in a step counts."""
        self._ready = time.perf_counter()

    def done(self) -> None:
        """Note that gradients have become means; the last call in a step counts.

        Any thread may call it.
        """
        self._done = time.perf_counter()

    def begin_step(self) -> None:
        """Add the step before this one, whose gradients are all means."""
        done, last_done = self._done, self._last_done
        self._last_done = done
        if last_done is not None:
            self.add(max(done - self._ready, 0.0), done - last_done)

    def add(self, exposed_seconds: float, step_seconds: float) -> None:
        """Add the exposed time and the whole time of a step."""
        is_drifting = self._detector.add(exposed_seconds + _STEP_FRACTION * step_seconds)
        if self._detector.is_window_complete:
            self.is_due, self.is_drifting = True, is_drifting

    def agreed(self) -> None:
        """Note that the ranks have agreed to keep the plan for now."""
        self.is_due = False

    def planned(self) -> None:
        """Begin anew, with a longer pause, after the ranks have planned again."""
        self.is_due, self._last_done = False, None
        self._pause = min(2 * self._pause, _LONGEST_PAUSE)
        self._detector.reset(self._pause)
