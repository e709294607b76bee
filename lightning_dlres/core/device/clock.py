"""Clocks of the work on a device: on a GPU, work is done later than Python issues it."""

from __future__ import annotations

import time
from typing import Any, Protocol

from lightning_dlres.core.device.gpu import Gpu


class Clock(Protocol):
    """Clock that marks points in the work of this thread."""

    def mark(self) -> Any:
        """Return a mark behind all work that this thread has issued so far."""

    def seconds(self, start: Any, end: Any) -> float:
        """Return the time of the work between two marks, after the device has reached both."""


class HostClock:
    """Clock of a CPU."""

    def mark(self) -> float:
        """See `Clock.mark`."""
        return time.perf_counter()

    def seconds(self, start: float, end: float) -> float:
        """See `Clock.seconds`."""
        return end - start


class GpuClock:
    """Clock of a GPU's current stream.

    Args:
        gpu: The GPU.
    """

    def __init__(self, gpu: Gpu) -> None:
        self._gpu = gpu

    def mark(self) -> Any:
        """See `Clock.mark`."""
        return self._gpu.timed_event()

    def seconds(self, start: Any, end: Any) -> float:
        """See `Clock.seconds`."""
        end.synchronize()
        return float(start.elapsed_time(end)) / 1e3


def clock_of(gpu: Gpu | None) -> Clock:
    """Return the clock of a GPU; without one, that of the CPU."""
    return HostClock() if gpu is None else GpuClock(gpu)
