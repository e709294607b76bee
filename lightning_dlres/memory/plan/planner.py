"""Planner: the fastest plan of a step that meets the limits.

For every saved storage it decides to keep, compress, offload, or both. It also decides which
modules run again in backward, and which reuse memory. The plan is a pure function of the profile.

An integer program finds choices that meet the limits. Where copies overlap with the computation,
the cost of one choice depends on the others. The planner then starts a local search from the
solutions of several programs. It changes one or two choices at a time, for as long as the simulator
predicts a faster step.
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
    PACKED_MARGIN,
    MemoryLimits,
    StorageChoice,
    packed_capacity,
    tier_capacity,
)
from lightning_dlres.memory.plan.milp import OffloadProgram, Selection, choices_of
from lightning_dlres.memory.plan.placement import Lifetime, overlap, place
from lightning_dlres.memory.plan.plan import MemoryPlan, StorageDecision
from lightning_dlres.memory.plan.simulator import Outcome, simulate
from lightning_dlres.memory.profile.step_profile import SavedStorageProfile, StepProfile

# Shares of a copy's time that the programs count where copies overlap with the computation. The
# program of each share gives one start of the local search.
_COUNTED_SHARES = (1.0, 0.3, 0.02)
# Limit on the simulated events of one local search; a trial simulates every event of the step.
_MAX_EVENTS = 400_000
# The search stops at a plan that is slower than the plain step by at most this share of its time.
_GOOD_OVERHEAD = 1e-4
# Share of the peak. A note tells the user if offloading cannot lower the peak by more.
_MIN_HELP = 0.02
# Share of the step that stalls may take. A note tells the user if they take more.
_NOTED_STALLS = 0.05
# Attempts to fit the slabs into the tiers, each with smaller limits than the one before.
_MAX_PLACEMENTS = 6


def plan_memory(
    profile: StepProfile,
    limits: MemoryLimits,
    actions: Sequence[MemoryAction] = tuple(MemoryAction),
    recompute: bool = True,
    reuse: bool = True,
) -> MemoryPlan:
    """Return the fastest plan that meets the limits.

    Args:
        profile: Profile of the step.
        limits: Limits of the device, of saved storages on it, and of the tiers.
        actions: Actions that may be used.
        recompute: Whether modules may run again in backward.
        reuse: Whether modules may reuse memory.

    Raises:
        ConfigError: If no plan meets the limits. The message names the smallest limit that can be
            met.
    """
    keep_all = tuple(KEEP for _ in profile.storages)
    plain = simulate(profile, keep_all)
    selection = Selection(keep_all)
    if _fits(profile, selection, limits):
        return _build_plan(profile, selection, limits, plain)
    tiers = dict(limits.tiers)
    for _ in range(_MAX_PLACEMENTS):
        best = _fastest(profile, replace(limits, tiers=tiers), actions, recompute, reuse)
        plan = _build_plan(profile, best, limits, plain)
        over = {tier: size - limits.of(tier) for tier, size in plan.tiers.items()}
        if all(extra <= 0 for extra in over.values()):
            return plan
        # Gaps between storages make a slab larger than the sum of its storages.
        tiers = {tier: tiers.get(tier, inf) - max(over.get(tier, 0), 0) for tier in tiers}
    raise ConfigError(
        _infeasible_message(profile, replace(limits, tiers=tiers), actions, recompute, reuse)
    )


def _fastest(
    profile: StepProfile,
    limits: MemoryLimits,
    actions: Sequence[MemoryAction],
    recompute: bool,
    reuse: bool,
) -> Selection:
    """Return the fastest selection that the programs and the local searches find."""
    best: tuple[float, Selection] | None = None
    overlaps = any(link.overlaps for link in profile.links)
    good_seconds = sum(profile.seconds) * (1 + _GOOD_OVERHEAD)
    for counted_share in _COUNTED_SHARES if overlaps else (1.0,):
        selection = OffloadProgram(profile, actions, recompute, counted_share, reuse).select(limits)
        if selection is None:
            raise ConfigError(_infeasible_message(profile, limits, actions, recompute, reuse))
        seconds = _outcome(profile, selection, limits).seconds
        if overlaps and seconds > good_seconds:
            selection = _improved(profile, selection, limits, actions)
            seconds = _outcome(profile, selection, limits).seconds
        if best is None or seconds < best[0]:
            best = seconds, selection
        if seconds <= good_seconds:
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
    """Return the smallest device limit in bytes that can be met together with the other limits.

    Raises:
        ConfigError: If no plan meets the other limits.
    """
    others = replace(limits, device=inf)
    budget = OffloadProgram(profile, actions, recompute, reuse=reuse).smallest(others, "device")
    if budget is None:
        raise ConfigError(_infeasible_message(profile, others, actions, recompute, reuse))
    return budget


def _fits(profile: StepProfile, selection: Selection, limits: MemoryLimits) -> bool:
    return _outcome(profile, selection, limits).excess <= 0


def _outcome(
    profile: StepProfile, selection: Selection, limits: MemoryLimits, margin: float = PACKED_MARGIN
) -> Outcome:
    return simulate(
        profile,
        selection.choices,
        limits,
        regions=selection.regions,
        reuses=selection.reuses,
        margin=margin,
    )


def _infeasible_message(
    profile: StepProfile,
    limits: MemoryLimits,
    actions: Sequence[MemoryAction],
    recompute: bool,
    reuse: bool,
) -> str:
    """Return the message of an error about limits that no plan meets."""
    program = OffloadProgram(profile, actions, recompute, reuse=reuse)
    if limits.saved < inf:
        saved = program.smallest(replace(limits, device=inf), "saved")
        if saved is None or saved > limits.saved:
            return _too_small("saved_budget", limits.saved, saved, "the tensors saved for backward")
    device = program.smallest(limits, "device")
    return _too_small("budget", limits.device, device, "everything on the device in one step")


def _too_small(argument: str, limit: float, smallest: int | None, content: str) -> str:
    if smallest is None:
        return (
            f"host_budget and disk_budget must allow a plan together with {argument}, but none was "
            "found. Raise host_budget or disk_budget."
        )
    return (
        f"{argument} must be at least {format_bytes(smallest)} ({smallest} bytes) for {content}, "
        f"got {format_bytes(int(limit))}. Raise it, use smaller batches, or allow more actions."
    )


def _improved(
    profile: StepProfile, start: Selection, limits: MemoryLimits, actions: Sequence[MemoryAction]
) -> Selection:
    """Return the result of a local search from `start`.

    It changes the choices of one or two storages at a time, while that makes the step faster.
    """
    not_saved = _not_saved(profile, start)
    options = {
        number: [KEEP, *choices_of(profile, storage, actions)]
        for number, storage in enumerate(profile.storages)
        if number not in not_saved and storage.can_leave
    }
    trials = _Trials(profile, start, limits)
    better = True
    while better and not trials.is_exhausted:
        better = False
        for number, choices in options.items():
            for choice in choices:
                better |= trials.change({number: choice})
        for number, other in _neighbours(list(options)):
            if trials.choices[number] != KEEP and trials.choices[other] == KEEP:
                for choice in options[other][1:]:
                    better |= trials.change({number: KEEP, other: choice})
    return replace(start, choices=tuple(trials.choices))


class _Trials:
    """Best choices of a local search so far, and the number of trials that are left."""

    def __init__(self, profile: StepProfile, start: Selection, limits: MemoryLimits) -> None:
        self._profile, self._start, self._limits = profile, start, limits
        self.choices = list(start.choices)
        self._trials_left = _MAX_EVENTS // len(profile.seconds)
        self._best_seconds = self._seconds(self.choices)

    @property
    def is_exhausted(self) -> bool:
        """Return whether no trials are left."""
        return self._trials_left <= 0

    def change(self, changes: dict[int, StorageChoice]) -> bool:
        """Adopt these changes if they make the step faster; return whether they do."""
        changed = list(self.choices)
        for number, choice in changes.items():
            changed[number] = choice
        if changed == self.choices or self.is_exhausted:
            return False
        seconds = self._seconds(changed)
        if seconds >= self._best_seconds * (1 - 1e-9):
            return False
        self.choices, self._best_seconds = changed, seconds
        return True

    def _seconds(self, choices: Sequence[StorageChoice]) -> float:
        self._trials_left -= 1
        selection = replace(self._start, choices=tuple(choices))
        outcome = _outcome(self._profile, selection, self._limits)
        # Even the program's own choices may exceed a limit by rounding.
        return inf if outcome.excess > 0 else outcome.seconds


def _not_saved(profile: StepProfile, selection: Selection) -> set[int]:
    """Return the indices of the storages that autograd no longer saves under a selection."""
    recomputed = {n for index in selection.regions for n in profile.regions[index].storages}
    reuses = [profile.reuses[index] for index in selection.reuses]
    return recomputed | {reuse.storage for reuse in reuses if reuse.overwritten_at is None}


def _neighbours(numbers: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Yield every storage with itself and the three before and after it in the order of saving."""
    for index, number in enumerate(numbers):
        for other in numbers[max(0, index - 3) : index + 4]:
            yield number, other


@dataclass(frozen=True)
class _Place:
    """Offset and reserved bytes of a storage in its tier."""

    offset: int = 0
    capacity: int = 0


def _build_plan(
    profile: StepProfile, selection: Selection, limits: MemoryLimits, plain: Outcome
) -> MemoryPlan:
    # Predict with the profiled sizes of compressed storages, not with their reserved capacity.
    outcome = _outcome(profile, selection, limits, margin=1.0)
    places, tiers = _places(profile, selection.choices)
    not_saved = _not_saved(profile, selection)
    reuses = [profile.reuses[index] for index in selection.reuses]
    decisions = tuple(
        StorageDecision(
            nbytes=storage.nbytes,
            dtype=storage.dtype,
            layer=storage.layer,
            action=selection.choices[number].action,
            saved=storage.saved,
            tier=selection.choices[number].tier,
            offset=places[number].offset,
            capacity=_capacity(storage, selection.choices[number], places[number]),
            offloaded_by=outcome.offloaded_by[number],
            prefetch_at=outcome.prefetch_at[number],
            first_use=storage.uses[0] if storage.uses else None,
            uses=storage.uses,
        )
        for number, storage in enumerate(profile.storages)
        if number not in not_saved
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


def _capacity(storage: SavedStorageProfile, choice: StorageChoice, place: _Place) -> int:
    return packed_capacity(storage) if choice.action is MemoryAction.COMPRESS else place.capacity


def _notes(plan: MemoryPlan, profile: StepProfile) -> list[str]:
    notes = [
        f"other copies, such as those of ParameterMirror, take {link.taken:.0%} of the link to the "
        f"{link.tier}"
        for link in profile.links
        if link.taken
    ]
    base = max(profile.base, default=0)
    movable = sum(storage.nbytes for storage in profile.storages if storage.can_leave)
    if plan.plain_peak - base <= _MIN_HELP * plan.plain_peak or not movable:
        notes.append(
            "offloading cannot lower the peak much: parameters, gradients, optimizer state and "
            f"workspace take up to {format_bytes(base)} on the device, and the saved tensors that "
            f"could leave it take {format_bytes(movable)}"
        )
    stalled = sum(plan.stalls)
    if plan.seconds and stalled > _NOTED_STALLS * plan.seconds:
        notes.append(
            f"waiting for copies, compression and recomputation take {format_seconds(stalled)} of "
            f"the step's {format_seconds(plan.seconds)}"
        )
    return notes


def _places(
    profile: StepProfile, choices: Sequence[StorageChoice]
) -> tuple[list[_Place], dict[str, int]]:
    """Return the place of every storage in its tier, and the size of each tier's slab."""
    places, slab_sizes = [_Place() for _ in choices], {}
    for link in profile.links:
        numbers = [n for n, choice in enumerate(choices) if choice.tier == link.tier]
        capacities = [tier_capacity(profile.storages[n], choices[n]) for n in numbers]
        lives = [
            Lifetime(capacity, profile.storages[n].saved, profile.storages[n].end)
            for n, capacity in zip(numbers, capacities, strict=True)
        ]
        offsets, size = place(lives)
        clash = overlap(lives, offsets)
        assert clash is None, f"places overlap: {clash}"
        for n, offset, capacity in zip(numbers, offsets, capacities, strict=True):
            places[n] = _Place(offset, capacity)
        if numbers:
            slab_sizes[link.tier] = size
    return places, slab_sizes
