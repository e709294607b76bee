"""Simulator of a step under a plan: the planner's model of the engine.

Each tier has one link, which carries both directions. Over a link that overlaps, the device
computes during copies. An offloaded storage then holds its memory until its copy ends, and a
fetched one from the start of its fetch. The device waits where memory is full, or a storage has not
arrived. Over any other link the device waits for every copy.
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
    PACKED_MARGIN,
    MemoryLimits,
    StorageChoice,
    held_bytes,
    packed_capacity,
    reuse_changes,
    tier_bytes,
    tier_capacity,
)
from lightning_dlres.memory.profile.step_profile import Reuse, StepProfile, TierLink


@dataclass(frozen=True)
class Outcome:
    """Outcome of a simulated step.

    Attributes:
        seconds: Duration of the step.
        stalls: Seconds for which the device waits, compresses or recomputes, for every event.
        held: Bytes of saved storages on the device in every interval.
        resident: Bytes of saved storages on the device at every event, including the storage that
            the event saves or fetches.
        excess: Most bytes by which a limit is exceeded; 0 if all limits are met.
        offloaded_by: Event at whose end each storage must have left the device; None: no deadline,
            as for a storage that is not offloaded.
        prefetch_at: Event at which the fetch of each storage starts; None: at its first use.
        moved: Bytes that are copied over the links.
        tier_peaks: Most bytes in each tier, by its name.
        base: Most bytes of everything else on the device, in every interval.
    """

    seconds: float
    stalls: tuple[float, ...]
    held: tuple[int, ...]
    resident: tuple[int, ...]
    excess: float
    offloaded_by: tuple[int | None, ...]
    prefetch_at: tuple[int | None, ...]
    moved: int
    tier_peaks: dict[str, int]
    base: tuple[int, ...]

    @property
    def peak(self) -> int:
        """Return the most bytes on the device."""
        return max(h + b for h, b in zip(self.held, self.base, strict=True))


def simulate(
    profile: StepProfile,
    choices: Sequence[StorageChoice],
    limits: MemoryLimits = NO_LIMITS,
    *,
    regions: Sequence[int] = (),
    reuses: Sequence[int] = (),
    margin: float = PACKED_MARGIN,
) -> Outcome:
    """Return the outcome of a step.

    Args:
        profile: Profile of the step.
        choices: Choice for every storage. The choices for recomputed storages, and for storages
            that signs replace, have no effect.
        limits: Limits. To meet them, the device waits for copies, and prefetches wait for memory.
        regions: Indices of the regions that run again in backward.
        reuses: Indices of the reuses that are applied.
        margin: Reserved size of compressed storages as a multiple of their profiled size; 1
            predicts the outcome if the sizes do not change.
    """
    return _Step(profile, choices, limits, regions=regions, reuses=reuses, margin=margin).run()


class _Step:
    """State of one simulation. `held` counts saved storages, `base` everything else."""

    def __init__(
        self,
        profile: StepProfile,
        choices: Sequence[StorageChoice],
        limits: MemoryLimits,
        *,
        regions: Sequence[int],
        reuses: Sequence[int],
        margin: float,
    ) -> None:
        self._margin = margin
        self._profile, self._choices, self._limits = profile, choices, limits
        storages, self._events = profile.storages, len(profile.seconds) - 1
        self._links = {link.tier: link for link in profile.links}
        # For every event its storage, and whether the event saves it.
        self._at: list[tuple[int, bool]] = [(0, False)] * self._events
        for number, storage in enumerate(storages):
            self._at[storage.saved] = (number, True)
            for use in storage.uses:
                self._at[use] = (number, False)
        # Event at which each recomputed storage's region runs again; -1 once it has run.
        self._recomputed_at: dict[int, int] = {}
        self._base = list(profile.base)
        # Seconds of recomputation and of reuse, by event.
        self._recompute_seconds: dict[int, float] = {}
        self._reuse_seconds = [0.0] * (self._events + 1)
        # Bytes that are freed at the end of each interval, and bytes that are allocated at its
        # start. The storages that events save are not among the latter.
        self._freed: list[int] = [0] * (self._events + 2)
        self._allocated: list[int] = [0] * (self._events + 2)
        self._regions = regions
        # Storages that are not saved, as a ReLU saves signs in their place.
        self._replaced: set[int] = set()
        for index in regions:
            self._add_region(index)
        self._reuse_changes: list[tuple[int, int, int]] = []
        for index in reuses:
            self._add_reuse(profile.reuses[index])
        self._set_least_bytes()
        self._time = 0.0
        # Time until which each link is busy.
        self._busy = dict.fromkeys(self._links, 0.0)
        self._held = 0
        # Storages on their way to a tier, each with the time at which its copy ends.
        self._leaving: deque[tuple[int, float]] = deque()
        self._offloaded_by: list[int | None] = [None] * len(storages)
        self._prefetch_at: list[int | None] = [None] * len(storages)
        self._arrives: dict[int, float] = {}
        self._stalls = [0.0] * (self._events + 1)
        self._excess = 0.0
        self._moved = 0
        self._to_fetch = self._just_in_time()

    def _add_region(self, index: int) -> None:
        region = self._profile.regions[index]
        first = min(self._profile.storages[number].uses[0] for number in region.storages)
        for number in region.storages:
            self._recomputed_at[number] = first
        self._recompute_seconds[first] = self._recompute_seconds.get(first, 0.0) + region.seconds
        self._base[first + 1] += region.workspace
        self._allocated[region.entry] += region.inputs
        self._freed[first + 1] += region.inputs

    def _add_reuse(self, reuse: Reuse) -> None:
        storage = self._profile.storages[reuse.storage]
        spans = [span for span in reuse_changes(storage, reuse) if span[0] <= span[1]]
        if reuse.overwritten_at is None:
            # Backward does not ask for it. `_save` frees it at `shared_until`; add only the signs.
            self._replaced.add(reuse.storage)
            spans = [span for span in spans if span[2] > 0]
        for first, last, nbytes in spans:
            self._allocated[first] += nbytes
            self._freed[last] += nbytes
        self._reuse_changes += spans
        event = storage.uses[-1] if reuse.overwritten_at is None else reuse.overwritten_at
        self._reuse_seconds[event] += reuse.seconds

    def _link_of(self, number: int) -> TierLink | None:
        """Return the link over which a storage is offloaded; None if it stays."""
        choice = self._choices[number]
        if number in self._recomputed_at or number in self._replaced or not choice.uses_tier:
            return None
        assert choice.tier is not None
        return self._links[choice.tier]

    def _just_in_time(self) -> deque[tuple[int, float]]:
        """Return (storage, latest start of its fetch) in the order of first use.

        A fetch that starts by this time does not delay the device. Only links that overlap with the
        computation count, as if they were one link.
        """
        # End of every interval if the device never waits.
        profile, times = self._profile, list(accumulate(self._profile.seconds))
        self._nominal_ends = times
        first_uses: list[tuple[int, int]] = []
        for number, storage in enumerate(profile.storages):
            link = self._link_of(number)
            if link is not None and link.overlaps and storage.uses:
                first_uses.append((storage.uses[0], number))
        first_uses.sort(reverse=True)
        start, starts = inf, []
        for use, number in first_uses:
            link = self._link_of(number)
            assert link is not None
            size = tier_bytes(profile.storages[number], self._choices[number])
            start = min(times[use], start) - link.in_seconds(size)
            starts.append((number, start))
        return deque(reversed(starts))

    def run(self) -> Outcome:
        profile, held, resident = self._profile, [], []
        for event in range(self._events):
            self._held += self._allocated[event]
            held.append(self._held)
            self._check(self._held + self._base[event], self._limits.device)
            self._time += profile.seconds[event]
            self._held -= self._freed[event]
            self._time += self._reuse_seconds[event]
            started = self._time
            number, is_saved = self._at[event]
            most = self._save(number, event) if is_saved else self._use(number, event)
            resident.append(most)
            self._check(most, self._limits.saved)
            self._free_offloaded(event)
            self._fetch_ahead(event)
            # A fetched storage may need the memory of storages that are still leaving.
            self._free_offloaded(event)
            self._stalls[event] = self._time - started
        self._held += self._allocated[self._events]
        held.append(self._held)
        self._check(self._held + self._base[-1], self._limits.device)
        self._time += profile.seconds[-1]
        tier_peaks = self._tier_peaks()
        for tier, most in tier_peaks.items():
            self._check(most, self._limits.of(tier))
        return Outcome(
            seconds=self._time,
            stalls=tuple(self._stalls),
            held=tuple(held),
            resident=tuple(resident),
            excess=self._excess,
            offloaded_by=tuple(self._offloaded_by),
            prefetch_at=tuple(self._prefetch_at),
            moved=self._moved,
            tier_peaks=tier_peaks,
            base=tuple(self._base),
        )

    def _check(self, nbytes: int, limit: float) -> None:
        self._excess = max(self._excess, nbytes - limit)

    def _save(self, number: int, event: int) -> int:
        """Save a storage; return the most bytes of storages on the device at this event."""
        storage, choice = self._profile.storages[number], self._choices[number]
        if number in self._recomputed_at:
            return self._held
        if number in self._replaced:
            self._held += storage.nbytes
            self._freed[storage.shared_until] += storage.nbytes
            return self._held
        link = self._link_of(number)
        self._held += storage.nbytes
        most = self._held
        if choice.action in (MemoryAction.COMPRESS, MemoryAction.BOTH):
            self._time += storage.encode_seconds
        if choice.action is MemoryAction.COMPRESS:
            packed = packed_capacity(storage, self._margin)
            self._held += packed
            most = self._held
            self._freed[storage.end + 1] += packed
            self._freed[storage.shared_until] += storage.nbytes
        elif link is None:
            self._freed[storage.end + 1] += storage.nbytes
        else:
            size = tier_bytes(storage, choice)
            self._moved += size
            if link.overlaps:
                start = max(self._time, self._busy[link.tier])
                done = start + link.out_seconds(size)
                self._busy[link.tier] = done
                self._leaving.append((number, done))
            else:
                self._time += link.out_seconds(size)
                self._offloaded_by[number] = event
                self._freed[storage.shared_until] += storage.nbytes
        return most

    def _use(self, number: int, event: int) -> int:
        """Use a storage; return the most bytes of storages on the device at this event."""
        storage, choice = self._profile.storages[number], self._choices[number]
        if number in self._recomputed_at:
            if self._recomputed_at[number] == event:
                self._time += self._recompute_seconds.pop(event)
            # All storages of a region come back at the first use of any of them.
            for other, first in self._recomputed_at.items():
                if first == event:
                    recomputed = self._profile.storages[other]
                    self._held += recomputed.nbytes
                    self._freed[recomputed.end + 1] += recomputed.nbytes
            if self._recomputed_at[number] == event:
                self._recomputed_at = {
                    n: (-1 if f == event else f) for n, f in self._recomputed_at.items()
                }
            return self._held
        if (
            number in self._replaced
            or choice.action is MemoryAction.KEEP
            or event != storage.uses[0]
        ):
            return self._held
        link = self._link_of(number)
        if link is not None:
            size = tier_bytes(storage, choice)
            if number in self._arrives:
                self._time = max(self._time, self._arrives[number])
            else:
                self._moved += size
                if link.overlaps:
                    self._to_fetch = deque(f for f in self._to_fetch if f[0] != number)
                    self._wait_until_left(number, event)
                    self._time = max(self._time, self._busy[link.tier])
                    self._prefetch_at[number] = event
                    self._make_room(event, storage.nbytes)
                self._time += link.in_seconds(size)
                self._busy[link.tier] = self._time
                self._held += storage.nbytes
        else:
            self._held += storage.nbytes
        if choice.action is not MemoryAction.OFFLOAD:
            self._time += storage.decode_seconds
        self._freed[storage.end + 1] += storage.nbytes
        return self._held

    def _wait_until_left(self, number: int, event: int) -> None:
        """Wait until a storage has left the device."""
        while any(n == number for n, _ in self._leaving):
            self._wait_for_oldest(event)

    def _wait_for_oldest(self, event: int) -> None:
        number, done = self._leaving.popleft()
        self._time = max(self._time, done)
        self._offloaded_by[number] = event
        storage = self._profile.storages[number]
        if storage.shared_until > event:
            self._freed[storage.shared_until] += storage.nbytes
        else:
            self._held -= storage.nbytes

    def _make_room(self, event: int, nbytes: int) -> None:
        while self._leaving and self._held + nbytes > self._limits.saved:
            self._wait_for_oldest(event)

    def _free_offloaded(self, event: int) -> None:
        """Free storages that have left; wait for more if the next interval would exceed a limit."""
        while self._leaving and self._leaving[0][1] <= self._time:
            self._wait_for_oldest(event)
        if not self._leaving:
            return
        ahead, need = event + 1, self._allocated[event + 1]
        saved_bytes = 0
        if ahead < self._events:
            number, is_saved = self._at[ahead]
            if is_saved and number not in self._recomputed_at:
                storage = self._profile.storages[number]
                packs = self._choices[number].action is MemoryAction.COMPRESS
                capacity = packed_capacity(storage, self._margin) if packs else 0
                saved_bytes = storage.nbytes + capacity
        while self._leaving and (
            self._held + need + self._base[ahead] > self._limits.device
            or self._held + need + saved_bytes > self._limits.saved
        ):
            self._wait_for_oldest(event)

    def _fetch_ahead(self, event: int) -> None:
        """Start the fetches for which the next event would be too late."""
        while self._to_fetch and self._to_fetch[0][1] < self._nominal_ends[event + 1]:
            number, _ = self._to_fetch[0]
            storage, link = self._profile.storages[number], self._link_of(number)
            assert link is not None
            use = storage.uses[0]
            if storage.saved >= event or any(n == number for n, _ in self._leaving):
                return
            if not self._has_room(event, use, storage.nbytes):
                return
            self._to_fetch.popleft()
            start = max(self._time, self._busy[link.tier])
            size = tier_bytes(storage, self._choices[number])
            self._moved += size
            self._arrives[number] = self._busy[link.tier] = start + link.in_seconds(size)
            self._prefetch_at[number] = event
            self._held += storage.nbytes
            self._prefetched[event + 1 : use + 1] += storage.nbytes

    def _has_room(self, event: int, use: int, nbytes: int) -> bool:
        """Return whether a storage that is fetched now fits until its use.

        It must fit beside everything that must be on the device until then.
        """
        held = self._least_held[event + 1 : use + 1] + self._prefetched[event + 1 : use + 1]
        at_events = self._least_resident[event:use] + self._prefetched[event + 1 : use + 1]
        most, most_saved = held.max(initial=0.0), at_events.max(initial=0.0)
        return (
            most + nbytes <= self._limits.device
            and most_saved + nbytes <= self._limits.saved
            and self._held + nbytes <= self._limits.saved
        )

    def _set_least_bytes(self) -> None:
        """Set the fewest bytes that are on the device in every interval and at every event."""
        held = np.zeros(self._events + 3)
        for number, storage in enumerate(self._profile.storages):
            if number in self._replaced:
                spans = iter([(storage.saved + 1, storage.shared_until, storage.nbytes)])
            elif number in self._recomputed_at:
                spans = iter([(self._recomputed_at[number] + 1, storage.end + 1, storage.nbytes)])
            else:
                spans = held_bytes(storage, self._choices[number], self._margin)
            for first, last, nbytes in spans:
                held[first] += nbytes
                held[last + 1] -= nbytes
        for first, last, nbytes in self._reuse_changes:
            held[first] += nbytes
            held[last + 1] -= nbytes
        for index in self._regions:
            region = self._profile.regions[index]
            first = min(self._profile.storages[n].uses[0] for n in region.storages)
            held[region.entry] += region.inputs
            held[first + 2] -= region.inputs
        held = held.cumsum()
        # A storage that is resident at an event is held in the interval after it.
        self._least_resident = held[1 : self._events + 1]
        self._least_held = held[: self._events + 1] + self._base
        # Bytes of prefetched storages, in every interval until their use.
        self._prefetched = np.zeros(self._events + 1)

    def _tier_peaks(self) -> dict[str, int]:
        """Return the most bytes in each tier, by its name."""
        changes: dict[str, list[int]] = {}
        for number, storage in enumerate(self._profile.storages):
            if self._link_of(number) is None:
                continue
            tier = self._choices[number].tier
            assert tier is not None
            change = changes.setdefault(tier, [0] * (self._events + 2))
            size = tier_capacity(storage, self._choices[number])
            change[storage.saved] += size
            change[storage.end + 1] -= size
        most = {}
        for tier, change in changes.items():
            now = most[tier] = 0
            for step in change:
                now += step
                most[tier] = max(most[tier], now)
        return most
