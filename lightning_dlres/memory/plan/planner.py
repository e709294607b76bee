"""The planner (Method A, A3): for every saved_storage keep, compress, offload or both, and which modules
run again, so that the limits hold and the step takes the least time.

A pure function of the profile. An integer program finds choices that can be carried out; where
copies run beside the computing, what they cost depends on each other, so several programs make
starts, and single choices are changed while the simulator finds that faster.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import inf

import msgspec

from lightning_dlres.core.errors import ConfigError
from lightning_dlres.core.units import format_bytes, format_seconds
from lightning_dlres.memory.execute.actions import MemoryAction
from lightning_dlres.memory.plan.choices import (
    KEEP,
    NO_LIMITS,
    SPARE,
    MemoryLimits,
    StorageChoice,
    packed_room,
    room_for,
)
from lightning_dlres.memory.plan.milp import Program, Selection, choices_of
from lightning_dlres.memory.plan.placement import Lifetime, overlap, place
from lightning_dlres.memory.plan.plan import MemoryPlan, StorageDecision
from lightning_dlres.memory.plan.simulator import Outcome, simulate
from lightning_dlres.memory.profile.step_profile import SavedStorageProfile, StepProfile

# How much of a copy's time is taken to show where the device computes meanwhile.
_SHOWN = (1.0, 0.3, 0.02)
# A trial simulates every event: so many in all for one start.
_MOST_EVENTS = 400_000
# Faster than this share over plain training is not looked for.
_GOOD = 1e-4
# A plan that is not better than this is no help.
_HELP = 0.02
_MOST_PLACEMENTS = 6


def plan_memory(
    profile: StepProfile,
    limits: MemoryLimits,
    actions: Sequence[MemoryAction] = tuple(MemoryAction),
    recompute: bool = True,
    reuse: bool = True,
) -> MemoryPlan:
    """Return the fastest plan that meets the limits.

    Args:
        profile: one step.
        limits: what the device, the data on it, and the tiers may hold.
        actions: those that may be used.
        recompute: whether modules may run again.
        reuse: whether modules may do with less memory.

    Raises:
        ConfigError: no plan meets the limits; the message has the smallest that can be met.
    """
    everything = tuple(KEEP for _ in profile.data)
    plain = simulate(profile, everything)
    selection = Selection(everything)
    if _fits(profile, selection, limits):
        return _written(profile, selection, limits, plain)
    asked, tiers = limits, dict(limits.tiers)
    for _ in range(_MOST_PLACEMENTS):
        best = _fastest(profile, replace(limits, tiers=tiers), actions, recompute, reuse)
        plan = _written(profile, best, limits, plain)
        over = {tier: size - asked.of(tier) for tier, size in plan.tiers.items()}
        if all(extra <= 0 for extra in over.values()):
            return plan
        # What data take in a slab may be more than they sum up to, as gaps are left between them.
        tiers = {tier: tiers.get(tier, inf) - max(over.get(tier, 0), 0) for tier in tiers}
    raise ConfigError(_refusal(profile, replace(limits, tiers=tiers), actions, recompute, reuse))


def _fastest(
    profile: StepProfile,
    limits: MemoryLimits,
    actions: Sequence[MemoryAction],
    recompute: bool,
    reuse: bool,
) -> Selection:
    best: tuple[float, Selection] | None = None
    overlaps = any(link.overlaps for link in profile.links)
    good = sum(profile.seconds) * (1 + _GOOD)
    for shown in _SHOWN if overlaps else (1.0,):
        found = Program(profile, actions, recompute, shown, reuse).select(limits)
        if found is None:
            raise ConfigError(_refusal(profile, limits, actions, recompute, reuse))
        seconds = _outcome(profile, found, limits).seconds
        if overlaps and seconds > good:
            found = _improved(profile, found, limits, actions)
            seconds = _outcome(profile, found, limits).seconds
        if best is None or seconds < best[0]:
            best = seconds, found
        if seconds <= good:
            break
    assert best is not None
    return best[1]


def smallest_budget(
    profile: StepProfile,
    limits: MemoryLimits = NO_LIMITS,
    actions: Sequence[MemoryAction] = tuple(MemoryAction),
    recompute: bool = True,
    reuse: bool = True,
) -> int:
    """Return the least bytes that the device can do with, within the other limits.

    Raises:
        ConfigError: no budget meets the other limits.
    """
    without = replace(limits, device=inf)
    found = Program(profile, actions, recompute, reuse=reuse).smallest(without, "device")
    if found is None:
        raise ConfigError(_refusal(profile, without, actions, recompute, reuse))
    return found


def _fits(profile: StepProfile, selection: Selection, limits: MemoryLimits) -> bool:
    return _outcome(profile, selection, limits).excess <= 0


def _outcome(
    profile: StepProfile, selection: Selection, limits: MemoryLimits, spare: float = SPARE
) -> Outcome:
    return simulate(profile, selection.choices, limits, selection.regions, spare, selection.reuses)


def _refusal(
    profile: StepProfile,
    limits: MemoryLimits,
    actions: Sequence[MemoryAction],
    recompute: bool,
    reuse: bool,
) -> str:
    program = Program(profile, actions, recompute, reuse=reuse)
    if limits.saved < inf:
        saved = program.smallest(replace(limits, device=inf), "saved")
        if saved is None or saved > limits.saved:
            return _too_small("saved_budget", limits.saved, saved, "data saved for backward")
    device = program.smallest(limits, "device")
    return _too_small("budget", limits.device, device, "all that the device holds in one step")


def _too_small(what: str, got: float, smallest: int | None, of: str) -> str:
    if smallest is None:
        return f"{what}: the limits of host and disk leave no room for any plan. Try larger ones."
    return (
        f"{what}: got {format_bytes(int(got))} for {of}, expected at least "
        f"{format_bytes(smallest)} ({smallest} bytes), the smallest that can be met here. Try "
        "that, a smaller batch, or more actions."
    )


def _improved(
    profile: StepProfile, start: Selection, limits: MemoryLimits, actions: Sequence[MemoryAction]
) -> Selection:
    """Change single choices, or those of two data, while that makes the step faster."""
    inside = _decided(profile, start)
    options = {
        number: [KEEP, *choices_of(profile, saved_storage, actions)]
        for number, saved_storage in enumerate(profile.data)
        if number not in inside and saved_storage.can_leave
    }
    trials = _Trials(profile, start, limits)
    better = True
    while better and not trials.are_over:
        better = False
        for number, own in options.items():
            for choice in own:
                better |= trials.change({number: choice})
        for number, other in _neighbours(list(options)):
            if trials.choices[number] != KEEP and trials.choices[other] == KEEP:
                for choice in options[other][1:]:
                    better |= trials.change({number: KEEP, other: choice})
    return replace(start, choices=tuple(trials.choices))


class _Trials:
    """The best choices so far, and how many more may be tried."""

    def __init__(self, profile: StepProfile, start: Selection, limits: MemoryLimits) -> None:
        self._profile, self._start, self._limits = profile, start, limits
        self.choices = list(start.choices)
        self._left = _MOST_EVENTS // len(profile.seconds)
        self._least = self._seconds(self.choices)

    @property
    def are_over(self) -> bool:
        """Return whether nothing more may be tried."""
        return self._left <= 0

    def change(self, changes: dict[int, StorageChoice]) -> bool:
        """Change these choices if the step is faster then; return whether it is."""
        changed = list(self.choices)
        for number, choice in changes.items():
            changed[number] = choice
        if changed == self.choices or self.are_over:
            return False
        seconds = self._seconds(changed)
        if seconds >= self._least * (1 - 1e-9):
            return False
        self.choices, self._least = changed, seconds
        return True

    def _seconds(self, choices: Sequence[StorageChoice]) -> float:
        self._left -= 1
        selection = replace(self._start, choices=tuple(choices))
        outcome = _outcome(self._profile, selection, self._limits)
        # What the program thinks possible may be missed by rounding.
        return inf if outcome.excess > 0 else outcome.seconds


def _decided(profile: StepProfile, selection: Selection) -> set[int]:
    """Return the data that are not saved any more."""
    found = {n for index in selection.regions for n in profile.regions[index].data}
    reuses = [profile.reuses[index] for index in selection.reuses]
    return found | {reuse.saved_storage for reuse in reuses if reuse.at is None}


def _neighbours(numbers: Sequence[int]) -> Iterator[tuple[int, int]]:
    for index, number in enumerate(numbers):
        for other in numbers[max(0, index - 3) : index + 4]:
            yield number, other


@dataclass(frozen=True)
class _Place:
    offset: int = 0
    room: int = 0


def _written(
    profile: StepProfile, selection: Selection, limits: MemoryLimits, plain: Outcome
) -> MemoryPlan:
    outcome = _outcome(profile, selection, limits, spare=1.0)
    places, tiers = _places(profile, selection.choices)
    inside = _decided(profile, selection)
    reuses = [profile.reuses[index] for index in selection.reuses]
    decisions = tuple(
        StorageDecision(
            nbytes=saved_storage.nbytes,
            dtype=saved_storage.dtype,
            layer=saved_storage.layer,
            action=selection.choices[number].action,
            saved=saved_storage.saved,
            tier=selection.choices[number].tier,
            offset=places[number].offset,
            room=_room(saved_storage, selection.choices[number], places[number]),
            left_by=outcome.left_by[number],
            fetch_at=outcome.fetch_at[number],
            first_use=saved_storage.uses[0] if saved_storage.uses else None,
            uses=saved_storage.uses,
        )
        for number, saved_storage in enumerate(profile.data)
        if number not in inside
    )
    plan = MemoryPlan(
        decisions=decisions,
        recompute=tuple(profile.regions[index].layer for index in selection.regions),
        reuse=tuple(dict.fromkeys(name for reuse in reuses for name in reuse.layers)),
        seconds=outcome.seconds,
        plain_seconds=plain.seconds,
        peak=outcome.peak,
        plain_peak=plain.peak,
        saved_peak=max(outcome.resident, default=0),
        plain_saved_peak=max(plain.resident, default=0),
        device_limit=limits.device if limits.device < inf else None,
        saved_limit=limits.saved if limits.saved < inf else None,
        tiers=tiers,
        held=outcome.held,
        base=outcome.base,
        stalls=outcome.stalls,
        interval_seconds=profile.seconds,
        moved=outcome.moved,
    )
    return msgspec.structs.replace(plan, notes=tuple(_notes(plan, profile)))


def _room(saved_storage: SavedStorageProfile, choice: StorageChoice, place: _Place) -> int:
    return packed_room(saved_storage) if choice.action is MemoryAction.COMPRESS else place.room


def _notes(plan: MemoryPlan, profile: StepProfile) -> list[str]:
    notes = []
    base = max(profile.base, default=0)
    movable = sum(saved_storage.nbytes for saved_storage in profile.data if saved_storage.can_leave)
    if plan.plain_peak - base <= _HELP * plan.plain_peak or not movable:
        notes.append(
            "offload would not help here: at its peak the device holds "
            f"{format_bytes(base)} of parameters, gradients, optimizer state and workspace, "
            f"and {format_bytes(movable)} that could leave it"
        )
    waits = sum(plan.stalls)
    if plan.seconds and waits > 0.05 * plan.seconds:
        notes.append(
            f"the device waits for {format_seconds(waits)} of {format_seconds(plan.seconds)}: "
            "copies that no computing hides"
        )
    return notes


def _places(
    profile: StepProfile, choices: Sequence[StorageChoice]
) -> tuple[list[_Place], dict[str, int]]:
    """Return where every saved_storage lies in its tier, and the size of each tier's slab."""
    places, sizes = [_Place() for _ in choices], {}
    for link in profile.links:
        mine = [n for n, choice in enumerate(choices) if choice.tier == link.tier]
        rooms = [room_for(profile.data[n], choices[n]) for n in mine]
        lives = [
            Lifetime(room, profile.data[n].saved, profile.data[n].end)
            for n, room in zip(mine, rooms, strict=True)
        ]
        offsets, size = place(lives)
        clash = overlap(lives, offsets)
        assert clash is None, f"places overlap: {clash}"
        for n, offset, room in zip(mine, offsets, rooms, strict=True):
            places[n] = _Place(offset, room)
        if mine:
            sizes[link.tier] = size
    return places, sizes
