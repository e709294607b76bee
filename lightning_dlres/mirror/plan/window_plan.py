"""Plan of the window: the units that are fetched and dropped at each event of a step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf

from lightning_dlres.core.tables import render
from lightning_dlres.core.units import format_bytes, format_seconds
from lightning_dlres.mirror.profile.step_profile import MirrorProfile, UseEvent

# The smallest window is chosen whose step is at most this much longer than with all units on the
# device. Predictions are not more exact.
_TOLERANCE = 0.02


@dataclass(frozen=True, kw_only=True)
class WindowPlan:
    """Plan for the window, with its prediction.

    Attributes:
        events: Events of the step.
        drops: Units that are dropped at each event, before those that are fetched.
        fetches: Units whose copy to the device starts at each event.
        peak_bytes: Largest number of bytes on the device at once.
        seconds: Predicted time from the first event to the end of backward.
        stall_seconds: Part of it that is spent waiting for copies.
        fetched_bytes: Bytes that are copied to the device.
        copy_seconds: Time in which the link is busy.
    """

    events: tuple[UseEvent, ...]
    drops: tuple[tuple[int, ...], ...]
    fetches: tuple[tuple[int, ...], ...]
    peak_bytes: int
    seconds: float
    stall_seconds: float
    fetched_bytes: int
    copy_seconds: float

    def table(self) -> str:
        """Return the prediction as a table for printing."""
        rows: list[list[object]] = [
            ["uses of layers", sum(event.kind == "begin" for event in self.events)],
            ["copies to the device", sum(map(len, self.fetches))],
            ["bytes copied", format_bytes(self.fetched_bytes)],
            ["parameters on the device at most", format_bytes(self.peak_bytes)],
            ["time of the copies", format_seconds(self.copy_seconds)],
            ["forward and backward", format_seconds(self.seconds)],
            ["of which waiting for copies", format_seconds(self.stall_seconds)],
        ]
        return render("Window of the device", ["per step", "planned"], rows)


def plan_window(profile: MirrorProfile, limit: float) -> WindowPlan:
    """Return a plan that keeps the units on the device within a limit.

    A unit is fetched as early as there is room for it. It takes the room of units that are needed
    later than itself, those that are needed last first (Belady, 1966).

    Args:
        profile: Profile of the step.
        limit: Bytes of the window. Units that are in use at the same time may exceed it.
    """
    search = _Search(profile, limit)
    for index, event in enumerate(profile.events):
        search.visit(index, event)
    return simulate(profile, search.drops, search.fetches)


def simulate(
    profile: MirrorProfile,
    drops: Sequence[Sequence[int]],
    fetches: Sequence[Sequence[int]],
) -> WindowPlan:
    """Return the plan with these drops and fetches at each event, and its prediction.

    Copies take the link in their order. A use waits until the copy of its unit is done.
    """
    now = link_free = stall = copying = 0.0
    resident = peak = fetched = 0
    done: dict[int, float] = {}
    for index, event in enumerate(profile.events):
        resident -= sum(profile.nbytes[unit] for unit in drops[index])
        for unit in fetches[index]:
            nbytes = profile.nbytes[unit]
            seconds = profile.fetch.seconds(nbytes)
            link_free = max(link_free, now) + seconds
            done[unit] = link_free
            copying += seconds
            resident += nbytes
            fetched += nbytes
        peak = max(peak, resident)
        if event.kind == "begin":
            wait = max(done[event.unit] - now, 0.0)
            stall += wait
            now += wait
        now += profile.gaps[index]
    return WindowPlan(
        events=profile.events,
        drops=tuple(map(tuple, drops)),
        fetches=tuple(map(tuple, fetches)),
        peak_bytes=peak,
        seconds=now,
        stall_seconds=stall,
        fetched_bytes=fetched,
        copy_seconds=copying,
    )


def choose_window(profile: MirrorProfile) -> WindowPlan:
    """Return the plan with the smallest window whose step is about as short as with any window."""
    low = plan_window(profile, 0.0)
    best = plan_window(profile, inf)
    if low.seconds <= best.seconds * (1 + _TOLERANCE):
        return low
    lowest, highest, chosen = low.peak_bytes, best.peak_bytes, best
    # Bisect down to a sixty-fourth of the parameters.
    while highest - lowest > max(best.peak_bytes // 64, 1):
        middle = (lowest + highest) // 2
        plan = plan_window(profile, middle)
        if plan.seconds <= best.seconds * (1 + _TOLERANCE):
            chosen, highest = plan, middle
        else:
            lowest = middle
    return chosen


class _Search:
    """Walk over the events that collects drops and fetches."""

    def __init__(self, profile: MirrorProfile, limit: float) -> None:
        self._profile, self._limit = profile, limit
        events = profile.events
        # Positions at which each unit's uses begin, last first: the next one is at the end.
        self._begins: dict[int, list[int]] = {}
        for index in reversed(range(len(events))):
            if events[index].kind == "begin":
                self._begins.setdefault(events[index].unit, []).append(index)
        self._order = [index for index, event in enumerate(events) if event.kind == "begin"]
        # Position in `_order` of the first use whose unit is not on its way yet.
        self._ahead = 0
        self._resident: set[int] = set()
        self._in_use: set[int] = set()
        self._bytes = 0
        self.drops: list[list[int]] = []
        self.fetches: list[list[int]] = []

    def visit(self, index: int, event: UseEvent) -> None:
        """Decide what is dropped and fetched at an event."""
        self.drops.append([])
        self.fetches.append([])
        unit = event.unit
        if event.kind == "begin":
            self._begins[unit].pop()
            if unit not in self._resident:
                self._make_room(unit, index, needed=True)
                self._fetch(unit)
            self._in_use.add(unit)
        else:
            self._in_use.discard(unit)
            if not self._begins.get(unit):
                self._drop(unit)
        self._fetch_ahead(index)

    def _fetch_ahead(self, index: int) -> None:
        """Fetch the units of the next uses, in their order, as long as there is room."""
        while self._ahead < len(self._order):
            position = self._order[self._ahead]
            unit = self._profile.events[position].unit
            if position > index and unit not in self._resident:
                if not self._make_room(unit, position, needed=False):
                    return
                self._fetch(unit)
            self._ahead += 1

    def _make_room(self, unit: int, position: int, *, needed: bool) -> bool:
        """Drop units that are used after a position, until a unit fits; return True if it may come.

        Args:
            unit: Unit that is to fit.
            position: Its next use.
            needed: The use begins now. So drop also units that are used sooner, and return True
                even if the unit does not fit.
        """
        missing = self._bytes + self._profile.nbytes[unit] - self._limit
        candidates = sorted(
            (other for other in self._resident - self._in_use if other != unit),
            key=lambda other: (-self._next_use(other), other),
        )
        dropped = []
        for other in candidates:
            if missing <= 0 or (not needed and self._next_use(other) < position):
                break
            dropped.append(other)
            missing -= self._profile.nbytes[other]
        if missing > 0 and not needed:
            return False
        for other in dropped:
            self._drop(other)
        return True

    def _next_use(self, unit: int) -> float:
        begins = self._begins.get(unit)
        return begins[-1] if begins else inf

    def _fetch(self, unit: int) -> None:
        self.fetches[-1].append(unit)
        self._resident.add(unit)
        self._bytes += self._profile.nbytes[unit]

    def _drop(self, unit: int) -> None:
        # Drops come before the fetches of an event, so a unit that is fetched at this one stays.
        if unit not in self._resident or unit in self.fetches[-1]:
            return
        self.drops[-1].append(unit)
        self._resident.remove(unit)
        self._bytes -= self._profile.nbytes[unit]
        # A later use must fetch it again.
        self._ahead = min(self._ahead, self._order_of_next_use(unit))

    def _order_of_next_use(self, unit: int) -> int:
        """Return the position in `_order` of a unit's next use; `_ahead` if it has none."""
        position = self._next_use(unit)
        if position == inf:
            return self._ahead
        low, high = 0, len(self._order)
        while low < high:
            middle = (low + high) // 2
            if self._order[middle] < position:
                low = middle + 1
            else:
                high = middle
        return low
