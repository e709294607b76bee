"""What a step takes, and holds, if data go where they are told: the planner's model of the engine.

One link to each tier carries both directions. Where it works beside the device, what leaves holds
its memory until it has left, what comes back holds it from the moment at which it is asked for, and
the device waits where memory or data are missing. Else the device waits for every copy.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import inf

import numpy as np

from lightning_dlres.memory.execute.actions import MemoryAction
from lightning_dlres.memory.plan.choices import (
    NO_LIMITS,
    SPARE,
    MemoryLimits,
    StorageChoice,
    away_bytes,
    holding,
    packed_room,
    relief,
    room_for,
)
from lightning_dlres.memory.profile.step_profile import Reuse, StepProfile, TierLink


@dataclass(frozen=True)
class Outcome:
    """How a step goes.

    Attributes:
        seconds: of the step.
        stalls: seconds in which the device waits, for every event; compression counts as computing.
        held: bytes of data on the device in every interval.
        resident: bytes of data on the device at every event, with what is saved or fetched there.
        excess: by how many bytes the limits are missed, at the worst moment; 0 if they are met.
        left_by, fetch_at: events at which a saved_storage must have left, and may be fetched.
        moved: bytes over the links.
        away: most bytes in each tier.
        base: most bytes of all else on the device, in every interval.
    """

    seconds: float
    stalls: tuple[float, ...]
    held: tuple[int, ...]
    resident: tuple[int, ...]
    excess: float
    left_by: tuple[int | None, ...]
    fetch_at: tuple[int | None, ...]
    moved: int
    away: dict[str, int]
    base: tuple[int, ...]

    @property
    def peak(self) -> int:
        """Return the most bytes on the device."""
        return max(h + b for h, b in zip(self.held, self.base, strict=True))


def simulate(
    profile: StepProfile,
    choices: Sequence[StorageChoice],
    limits: MemoryLimits = NO_LIMITS,
    regions: Sequence[int] = (),
    spare: float = SPARE,
    reuses: Sequence[int] = (),
) -> Outcome:
    """Return how the step goes.

    Args:
        profile: the step.
        choices: for every saved_storage; those of a region that runs again do not count, nor those of a
            saved_storage in the place of which signs are saved.
        limits: what the engine waits for, and what is fetched ahead only if there is room.
        regions: which of the profile's regions run again in backward.
        spare: room for compressed data, over what they took in the profile; 1 predicts what will
            be, if they do not change.
        reuses: which of the profile's reuses there are.
    """
    return _Step(profile, choices, limits, regions, spare, reuses).run()


class _Step:
    def __init__(
        self,
        profile: StepProfile,
        choices: Sequence[StorageChoice],
        limits: MemoryLimits,
        regions: Sequence[int],
        spare: float,
        reuses: Sequence[int],
    ) -> None:
        self._spare = spare
        self._profile, self._choices, self._limits = profile, choices, limits
        data, self._events = profile.data, len(profile.seconds) - 1
        self._links = {link.tier: link for link in profile.links}
        self._at: list[tuple[int, bool]] = [(0, False)] * self._events
        for number, saved_storage in enumerate(data):
            self._at[saved_storage.saved] = (number, True)
            for use in saved_storage.uses:
                self._at[use] = (number, False)
        self._again: dict[int, int] = {}
        self._base = list(profile.base)
        self._extra: dict[int, float] = {}
        self._wait = [0.0] * (self._events + 1)
        # What memory is given back after an interval, and what takes it besides the data saved.
        self._freed: list[int] = [0] * (self._events + 2)
        self._taken: list[int] = [0] * (self._events + 2)
        self._regions = regions
        self._without: set[int] = set()
        for index in regions:
            self._add_region(index)
        self._relief: list[tuple[int, int, int]] = []
        for index in reuses:
            self._add_reuse(profile.reuses[index])
        self._add_least()
        self._time = 0.0
        self._busy = dict.fromkeys(self._links, 0.0)
        self._held = 0
        self._leaving: deque[tuple[int, float]] = deque()
        self._left_by: list[int | None] = [None] * len(data)
        self._fetch_at: list[int | None] = [None] * len(data)
        self._arrives: dict[int, float] = {}
        self._stalls = [0.0] * (self._events + 1)
        self._excess = 0.0
        self._moved = 0
        self._wanted = self._just_in_time()

    def _add_region(self, index: int) -> None:
        region = self._profile.regions[index]
        first = min(self._profile.data[number].uses[0] for number in region.data)
        for number in region.data:
            self._again[number] = first
        self._extra[first] = self._extra.get(first, 0.0) + region.seconds
        self._base[first + 1] += region.workspace
        self._taken[region.entry] += region.inputs
        self._freed[first + 1] += region.inputs

    def _add_reuse(self, reuse: Reuse) -> None:
        saved_storage = self._profile.data[reuse.saved_storage]
        spans = [span for span in relief(saved_storage, reuse) if span[0] <= span[1]]
        if reuse.at is None:
            # Nobody asks for it: it goes when others let go of it.
            self._without.add(reuse.saved_storage)
            spans = [span for span in spans if span[2] > 0]
        for first, last, nbytes in spans:
            self._taken[first] += nbytes
            self._freed[last] += nbytes
        self._relief += spans
        place = saved_storage.uses[-1] if reuse.at is None else reuse.at
        self._wait[place] += reuse.seconds

    def _leaves(self, number: int) -> TierLink | None:
        """Return the link that a saved_storage takes; None where it stays."""
        choice = self._choices[number]
        if number in self._again or number in self._without or not choice.leaves:
            return None
        assert choice.tier is not None
        return self._links[choice.tier]

    def _just_in_time(self) -> deque[tuple[int, float]]:
        """Return what is fetched beside the computing, in the order in which it is needed, with
        the latest time at which that can begin without a wait."""
        profile, times = self._profile, list(accumulate(self._profile.seconds))
        self._nominal = times
        need: list[tuple[int, int]] = []
        for number, saved_storage in enumerate(profile.data):
            link = self._leaves(number)
            if link is not None and link.overlaps and saved_storage.uses:
                need.append((saved_storage.uses[0], number))
        need.sort(reverse=True)
        begins, found = inf, []
        for use, number in need:
            link = self._leaves(number)
            assert link is not None
            size = away_bytes(profile.data[number], self._choices[number])
            begins = min(times[use], begins) - link.in_seconds(size)
            found.append((number, begins))
        return deque(reversed(found))

    def run(self) -> Outcome:
        profile, held, resident = self._profile, [], []
        for event in range(self._events):
            self._held += self._taken[event]
            held.append(self._held)
            self._check(self._held + self._base[event], self._limits.device)
            self._time += profile.seconds[event]
            self._held -= self._freed[event]
            self._time += self._wait[event]
            started = self._time
            number, is_saved = self._at[event]
            most = self._save(number, event) if is_saved else self._use(number, event)
            resident.append(most)
            self._check(most, self._limits.saved)
            self._settle(event)
            self._fetch_ahead(event)
            # What is fetched may need the room of what is still leaving.
            self._settle(event)
            self._stalls[event] = self._time - started
        self._held += self._taken[self._events]
        held.append(self._held)
        self._check(self._held + self._base[-1], self._limits.device)
        self._time += profile.seconds[-1]
        away = self._away()
        for tier, most in away.items():
            self._check(most, self._limits.of(tier))
        return Outcome(
            seconds=self._time,
            stalls=tuple(self._stalls),
            held=tuple(held),
            resident=tuple(resident),
            excess=self._excess,
            left_by=tuple(self._left_by),
            fetch_at=tuple(self._fetch_at),
            moved=self._moved,
            away=away,
            base=tuple(self._base),
        )

    def _check(self, found: int, limit: float) -> None:
        self._excess = max(self._excess, found - limit)

    def _save(self, number: int, event: int) -> int:
        saved_storage, choice = self._profile.data[number], self._choices[number]
        if number in self._again:
            return self._held
        if number in self._without:
            self._held += saved_storage.nbytes
            self._freed[saved_storage.gone] += saved_storage.nbytes
            return self._held
        link = self._leaves(number)
        self._held += saved_storage.nbytes
        most = self._held
        if choice.action in (MemoryAction.COMPRESS, MemoryAction.BOTH):
            self._time += saved_storage.encode_seconds
        if choice.action is MemoryAction.COMPRESS:
            packed = packed_room(saved_storage, self._spare)
            self._held += packed
            most = self._held
            self._freed[saved_storage.end + 1] += packed
            self._freed[saved_storage.gone] += saved_storage.nbytes
        elif link is None:
            self._freed[saved_storage.end + 1] += saved_storage.nbytes
        else:
            size = away_bytes(saved_storage, choice)
            self._moved += size
            if link.overlaps:
                begins = max(self._time, self._busy[link.tier])
                done = begins + link.out_seconds(size)
                self._busy[link.tier] = done
                self._leaving.append((number, done))
            else:
                self._time += link.out_seconds(size)
                self._left_by[number] = event
                self._freed[saved_storage.gone] += saved_storage.nbytes
        return most

    def _use(self, number: int, event: int) -> int:
        saved_storage, choice = self._profile.data[number], self._choices[number]
        if number in self._again:
            if self._again[number] == event:
                self._time += self._extra.pop(event)
            # All that its region saves comes back at the first use of any of it.
            for other, first in self._again.items():
                if first == event:
                    nbytes, end = self._profile.data[other].nbytes, self._profile.data[other].end
                    self._held += nbytes
                    self._freed[end + 1] += nbytes
            if self._again[number] == event:
                self._again = {n: (-1 if f == event else f) for n, f in self._again.items()}
            return self._held
        if (
            number in self._without
            or choice.action is MemoryAction.KEEP
            or event != saved_storage.uses[0]
        ):
            return self._held
        link = self._leaves(number)
        if link is not None:
            size = away_bytes(saved_storage, choice)
            if number in self._arrives:
                self._time = max(self._time, self._arrives[number])
            else:
                self._moved += size
                if link.overlaps:
                    self._wanted = deque(w for w in self._wanted if w[0] != number)
                    self._leave_until(number, event)
                    self._time = max(self._time, self._busy[link.tier])
                    self._fetch_at[number] = event
                    self._make_room(event, saved_storage.nbytes)
                self._time += link.in_seconds(size)
                self._busy[link.tier] = self._time
                self._held += saved_storage.nbytes
        else:
            self._held += saved_storage.nbytes
        if choice.action is not MemoryAction.OFFLOAD:
            self._time += saved_storage.decode_seconds
        self._freed[saved_storage.end + 1] += saved_storage.nbytes
        return self._held

    def _leave_until(self, number: int, event: int) -> None:
        """Wait until a saved_storage has left."""
        while any(n == number for n, _ in self._leaving):
            self._wait_for_oldest(event)

    def _wait_for_oldest(self, event: int) -> None:
        number, done = self._leaving.popleft()
        self._time = max(self._time, done)
        self._left_by[number] = event
        saved_storage = self._profile.data[number]
        if saved_storage.gone > event:
            self._freed[saved_storage.gone] += saved_storage.nbytes
        else:
            self._held -= saved_storage.nbytes

    def _make_room(self, event: int, nbytes: int) -> None:
        while self._leaving and self._held + nbytes > self._limits.saved:
            self._wait_for_oldest(event)

    def _settle(self, event: int) -> None:
        """Let go of what has left, and wait for it where the next interval has no room."""
        while self._leaving and self._leaving[0][1] <= self._time:
            self._wait_for_oldest(event)
        if not self._leaving:
            return
        ahead, need = event + 1, self._taken[event + 1]
        saves = 0
        if ahead < self._events:
            number, is_saved = self._at[ahead]
            if is_saved and number not in self._again:
                saved_storage = self._profile.data[number]
                packs = self._choices[number].action is MemoryAction.COMPRESS
                saves = saved_storage.nbytes + (
                    packed_room(saved_storage, self._spare) if packs else 0
                )
        while self._leaving and (
            self._held + need + self._base[ahead] > self._limits.device
            or self._held + need + saves > self._limits.saved
        ):
            self._wait_for_oldest(event)

    def _fetch_ahead(self, event: int) -> None:
        # The next event would be too late.
        while self._wanted and self._wanted[0][1] < self._nominal[event + 1]:
            number, _ = self._wanted[0]
            saved_storage, link = self._profile.data[number], self._leaves(number)
            assert link is not None
            use = saved_storage.uses[0]
            if saved_storage.saved >= event or any(n == number for n, _ in self._leaving):
                return
            if not self._has_room(event, use, saved_storage.nbytes):
                return
            self._wanted.popleft()
            begins = max(self._time, self._busy[link.tier])
            size = away_bytes(saved_storage, self._choices[number])
            self._moved += size
            self._arrives[number] = self._busy[link.tier] = begins + link.in_seconds(size)
            self._fetch_at[number] = event
            self._held += saved_storage.nbytes
            self._ahead[event + 1 : use + 1] += saved_storage.nbytes

    def _has_room(self, event: int, use: int, nbytes: int) -> bool:
        """Return whether what is fetched now has room up to its use, beside all that must be there
        by then."""
        held = self._least_held[event + 1 : use + 1] + self._ahead[event + 1 : use + 1]
        at_events = self._least_resident[event:use] + self._ahead[event + 1 : use + 1]
        most, most_saved = held.max(initial=0.0), at_events.max(initial=0.0)
        return (
            most + nbytes <= self._limits.device
            and most_saved + nbytes <= self._limits.saved
            and self._held + nbytes <= self._limits.saved
        )

    def _add_least(self) -> None:
        """Note what is there at least, in every interval and at every event."""
        places = self._events + 3
        held = np.zeros(places)
        for number, saved_storage in enumerate(self._profile.data):
            if number in self._without:
                spans = iter([(saved_storage.saved + 1, saved_storage.gone, saved_storage.nbytes)])
            elif number in self._again:
                spans = iter(
                    [(self._again[number] + 1, saved_storage.end + 1, saved_storage.nbytes)]
                )
            else:
                spans = holding(saved_storage, self._choices[number], self._spare)
            for first, last, nbytes in spans:
                held[first] += nbytes
                held[last + 1] -= nbytes
        for first, last, nbytes in self._relief:
            held[first] += nbytes
            held[last + 1] -= nbytes
        for index in self._regions:
            region = self._profile.regions[index]
            held[region.entry] += region.inputs
            held[min(self._profile.data[n].uses[0] for n in region.data) + 2] -= region.inputs
        held = held.cumsum()
        # What is there at an event is there in the interval after it.
        self._least_resident = held[1 : self._events + 1]
        self._least_held = held[: self._events + 1] + self._base
        self._ahead = np.zeros(self._events + 1)

    def _away(self) -> dict[str, int]:
        changes: dict[str, list[int]] = {}
        for number, saved_storage in enumerate(self._profile.data):
            if self._leaves(number) is None:
                continue
            tier = self._choices[number].tier
            assert tier is not None
            change = changes.setdefault(tier, [0] * (self._events + 2))
            size = room_for(saved_storage, self._choices[number])
            change[saved_storage.saved] += size
            change[saved_storage.end + 1] -= size
        most = {}
        for tier, change in changes.items():
            now = most[tier] = 0
            for step in change:
                now += step
                most[tier] = max(most[tier], now)
        return most
