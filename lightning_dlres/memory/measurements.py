"""Measurements of the steps that followed a plan, to be compared with its prediction."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

# Numbers of the latest durations and of the latest mismatches that are stored.
_MAX_DURATIONS, _MAX_MISMATCHES = 1000, 100


@dataclass
class StepMeasurements:
    """Measurements of planned steps.

    Attributes:
        steps: Number of steps.
        seconds: Durations of the latest steps, in seconds.
        saved_peak: Most bytes of saved storages on the device.
        device_peak: Most bytes on the device; None: unknown. The device's counter of the peak is
            not reset, since the user may read it, too. So the peak of a planned step is known only
            if it is the highest of the process so far.
        mismatches: Differences of the latest steps that did not match their plan.
        curve: Bytes of saved storages over the latest step: (seconds since its start, bytes).
    """

    steps: int = 0
    seconds: list[float] = field(default_factory=list)
    saved_peak: int = 0
    device_peak: int | None = None
    mismatches: list[str] = field(default_factory=list)
    curve: Sequence[tuple[float, int]] = ()

    def add(self, seconds: float, saved_peak: int, mismatch: str | None) -> None:
        """Add a step."""
        self.steps += 1
        self.seconds.append(seconds)
        del self.seconds[:-_MAX_DURATIONS]
        self.saved_peak = max(self.saved_peak, saved_peak)
        if mismatch is not None:
            self.mismatches.append(mismatch)
            del self.mismatches[:-_MAX_MISMATCHES]
