"""Policies about the window: one that profiles a step, and one that follows a plan."""

from __future__ import annotations

from bisect import bisect_right
from itertools import pairwise
from math import inf
from typing import Any

from lightning_dlres.mirror.execute.window import Window
from lightning_dlres.mirror.plan.window_plan import WindowPlan
from lightning_dlres.mirror.profile.step_profile import UseEvent


class StepRecord:
    """Record of the events of one step.

    Args:
        window: Window whose waiting times do not count as computation.

    Attributes:
        events: Events so far.
    """

    def __init__(self, window: Window) -> None:
        self._window = window
        self.events: list[UseEvent] = []
        # A mark of the clock for each event, and the number of waits for copies before it.
        self._marks: list[tuple[Any, int]] = []

    def add(self, event: UseEvent) -> None:
        """Add an event that happens now."""
        self.events.append(event)
        self._marks.append((self._window.clock.mark(), len(self._window.stalls)))

    def gaps(self) -> tuple[float, ...]:
        """Return the seconds of computation from each event to the next one; 0 after the last."""
        if not self._marks:
            return ()
        seconds, stalls = self._window.clock.seconds, self._window.stalls
        gaps = [
            seconds(start, end) - sum(seconds(*stall) for stall in stalls[before:after])
            for (start, before), (end, after) in pairwise(self._marks)
        ]
        return (*(max(gap, 0.0) for gap in gaps), 0.0)

    def seconds(self) -> float:
        """Return the seconds from the first event to the last one, with all waits for copies."""
        return self._window.clock.seconds(self._marks[0][0], self._marks[-1][0])


class ProfiledWindow:
    """Policy that fetches each unit when it is needed, and drops it after the use.

    Args:
        window: Copies on the device.

    Attributes:
        record: Record of the step.
    """

    def __init__(self, window: Window) -> None:
        self._window = window
        self.record = StepRecord(window)

    def begin(self, unit: int) -> None:
        """See `UseObserver.begin`."""
        self.record.add(UseEvent("begin", unit))

    def end(self, unit: int) -> None:
        """See `UseObserver.end`."""
        self.record.add(UseEvent("end", unit))
        self._window.drop(unit)

    def next_use(self, unit: int) -> float:
        """Return the position of a unit's next use; infinity, as it is not known."""
        return inf


class PlannedWindow:
    """Policy that follows a plan, and continues without one if the step turns out different.

    Args:
        window: Copies on the device.
        plan: Plan of the step.

    Attributes:
        record: Record of the step.
        is_followed: False once the events differ from the plan's.
    """

    def __init__(self, window: Window, plan: WindowPlan) -> None:
        self._window, self._plan = window, plan
        self.record = StepRecord(window)
        self.is_followed = True
        self._begins: dict[int, list[int]] = {}
        for index, event in enumerate(plan.events):
            if event.kind == "begin":
                self._begins.setdefault(event.unit, []).append(index)

    def begin(self, unit: int) -> None:
        """See `UseObserver.begin`."""
        self._observe(UseEvent("begin", unit))

    def end(self, unit: int) -> None:
        """See `UseObserver.end`."""
        self._observe(UseEvent("end", unit))
        if not self.is_followed:
            self._window.drop(unit)

    def next_use(self, unit: int) -> float:
        """Return the position of a unit's next use in the plan; infinity without one."""
        begins = self._begins.get(unit, [])
        index = bisect_right(begins, len(self.record.events) - 1)
        return begins[index] if index < len(begins) else inf

    def _observe(self, event: UseEvent) -> None:
        index = len(self.record.events)
        self.record.add(event)
        events = self._plan.events
        if index >= len(events) or events[index] != event:
            self.is_followed = False
        if not self.is_followed:
            return
        for unit in self._plan.drops[index]:
            self._window.drop(unit)
        for unit in self._plan.fetches[index]:
            self._window.prefetch(unit)
