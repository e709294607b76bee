"""Integer program that chooses the action of every saved storage.

It is exact for a device that waits for every copy. Where copies overlap with the computation, its
choices still meet the limits, if the device waits for copies where necessary.

The limits hold in every interval, but few intervals are binding. The program starts without limit
rows, and adds those that a solution violates until it violates none.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import inf

import highspy
import numpy as np
from highspy import HighsModelStatus, HighsVarType
from numpy.typing import NDArray

from lightning_dlres.memory.execute.actions import MemoryAction
from lightning_dlres.memory.plan.choices import (
    KEEP,
    MemoryLimits,
    StorageChoice,
    held_bytes,
    reuse_changes,
    tier_bytes,
    tier_capacity,
)
from lightning_dlres.memory.profile.step_profile import (
    Region,
    Reuse,
    SavedStorageProfile,
    StepProfile,
)

# Maximum number of violated limits that become rows in one round; the worst violations come first.
_MAX_NEW_ROWS = 8
# Relative gap to the optimum at which the solver stops.
_GAP = 1e-6
# Time limit of the solver in seconds, per round.
_ROUND_SECONDS = 5.0
# Unit of all bytes in the program: HiGHS is most accurate with numbers near 1.
_UNIT = float(1 << 20)

FloatArray = NDArray[np.float64]


@dataclass(frozen=True)
class _Option:
    """Column of the program: a choice for a storage, a recomputed region, or a reuse.

    Exactly one of `storage`, `region` and `reuse` is not None.

    Attributes:
        seconds: Seconds that the option adds to a step.
        storage: Index of the storage.
        choice: Choice for that storage.
        region: Index of the region.
        reuse: Index of the reuse.
    """

    seconds: float
    storage: int | None = None
    choice: StorageChoice = KEEP
    region: int | None = None
    reuse: int | None = None


def choices_of(
    profile: StepProfile, storage: SavedStorageProfile, actions: Sequence[MemoryAction]
) -> Iterator[StorageChoice]:
    """Yield the choices for a storage, except for keeping it."""
    if not storage.can_leave:
        return
    packs = storage.packed is not None and storage.packed < storage.nbytes
    if packs and MemoryAction.COMPRESS in actions:
        yield StorageChoice(MemoryAction.COMPRESS)
    for link in profile.links:
        if MemoryAction.OFFLOAD in actions:
            yield StorageChoice(MemoryAction.OFFLOAD, link.tier)
        if packs and MemoryAction.BOTH in actions:
            yield StorageChoice(MemoryAction.BOTH, link.tier)


def seconds_of(
    profile: StepProfile, storage: SavedStorageProfile, choice: StorageChoice, counted_share: float
) -> float:
    """Return the seconds that a choice adds to a step.

    Args:
        profile: Profile of the step.
        storage: Storage.
        choice: Choice for the storage.
        counted_share: Share of a copy's time that counts where copies overlap with the computation.
    """
    seconds = 0.0
    if choice.action in (MemoryAction.COMPRESS, MemoryAction.BOTH):
        seconds += storage.encode_seconds + storage.decode_seconds
    if choice.uses_tier:
        link = next(link for link in profile.links if link.tier == choice.tier)
        size = tier_bytes(storage, choice)
        copies = link.out_seconds(size) + link.in_seconds(size)
        seconds += copies * counted_share if link.overlaps else copies
    return seconds


def excludes(region: Region, reuse: Reuse) -> bool:
    """Return whether a reuse is impossible if a region runs again.

    This is so if the reuse concerns one of the region's storages or modules.
    """
    return reuse.storage in region.storages or any(
        name == region.layer or name.startswith(f"{region.layer}.") for name in reuse.layers
    )


@dataclass(frozen=True)
class Selection:
    """Solution of the program.

    Attributes:
        choices: Choice for every storage.
        regions: Indices of the regions that run again in backward.
        reuses: Indices of the reuses that are applied.
    """

    choices: tuple[StorageChoice, ...]
    regions: tuple[int, ...] = ()
    reuses: tuple[int, ...] = ()


class OffloadProgram:
    """Integer program for one step.

    Args:
        profile: Profile of the step.
        actions: Actions that may be chosen.
        recompute: Whether regions may run again in backward.
        counted_share: See `seconds_of`.
        reuse: Whether modules may reuse memory.
    """

    def __init__(
        self,
        profile: StepProfile,
        actions: Sequence[MemoryAction],
        recompute: bool = True,
        counted_share: float = 1.0,
        reuse: bool = True,
    ) -> None:
        self._profile = profile
        options = [
            _Option(seconds_of(profile, storage, choice, counted_share), number, choice)
            for number, storage in enumerate(profile.storages)
            for choice in choices_of(profile, storage, actions)
        ]
        if recompute:
            options += [
                _Option(region.seconds, region=index)
                for index, region in enumerate(profile.regions)
            ]
        if reuse:
            options += [
                _Option(candidate.seconds, reuse=index)
                for index, candidate in enumerate(profile.reuses)
            ]
        self._options = options
        self._events = len(profile.seconds) - 1
        self._baseline = _Load(profile, [(storage, KEEP) for storage in profile.storages])
        self._loads = [self._difference(option) for option in options]

    def _difference(self, option: _Option) -> _Load:
        """Return the load under an option, less the load if every storage is kept."""
        profile = self._profile
        if option.storage is not None:
            storage = profile.storages[option.storage]
            return _Load(profile, [(storage, option.choice)], [(storage, KEEP)])
        if option.reuse is not None:
            return self._reuse_load(profile.reuses[option.reuse])
        assert option.region is not None
        region = profile.regions[option.region]
        storages = [profile.storages[number] for number in region.storages]
        first = min(storage.uses[0] for storage in storages)
        load = _Load(profile, [], [(storage, KEEP) for storage in storages])
        # All storages of a region come back at the first use of any of them.
        for storage in storages:
            load.add(first + 1, storage.end + 1, storage.nbytes)
        load.held[region.entry : first + 2] += region.inputs
        load.resident[region.entry : first + 1] += region.inputs
        load.held[first + 1] += region.workspace
        return load

    def _reuse_load(self, reuse: Reuse) -> _Load:
        storage = self._profile.storages[reuse.storage]
        load = _Load(self._profile, [])
        for first, last, nbytes in reuse_changes(storage, reuse):
            if nbytes > 0 or reuse.overwritten_at is None:
                load.add(first, last, nbytes)
            else:
                # The resident bytes change one event later than in `add`: at the event after
                # `overwritten_at` the storage still counts.
                load.held[first : last + 1] += nbytes
                load.resident[first:last] += nbytes
        return load

    def select(self, limits: MemoryLimits) -> Selection | None:
        """Return the fastest choices; None if no choices meet the limits."""
        solved = self._solve(limits, None)
        return self._selection(solved[1]) if solved is not None else None

    def smallest(self, limits: MemoryLimits, limit_name: str) -> int | None:
        """Return the smallest limit in bytes that can be met with the others; None if none can.

        Args:
            limits: Limits of a plan. The one that is minimised has no effect.
            limit_name: "device" or "saved": the limit to minimise.
        """
        solved = self._solve(limits, limit_name)
        if solved is None:
            return None
        # Computed from the choices again: the solver's value may be a byte too small.
        (curve,) = [curve for curve in self._curves(limits) if curve.name == limit_name]
        load = curve.baseline + sum(
            curve.options[index] for index in np.flatnonzero(solved[1]).tolist()
        )
        return int(np.ceil(load.max(initial=0.0) - 1e-3))

    def _selection(self, chosen: NDArray[np.bool_]) -> Selection:
        choices = [KEEP] * len(self._profile.storages)
        regions, reuses = [], []
        for option, is_chosen in zip(self._options, chosen, strict=True):
            if not is_chosen:
                continue
            if option.storage is not None:
                choices[option.storage] = option.choice
            elif option.region is not None:
                regions.append(option.region)
            elif option.reuse is not None:
                reuses.append(option.reuse)
        return Selection(tuple(choices), tuple(regions), tuple(reuses))

    def _solve(
        self, limits: MemoryLimits, limit_name: str | None
    ) -> tuple[float, NDArray[np.bool_]] | None:
        """Return (minimised limit in bytes, mask of the chosen options); None if infeasible.

        Args:
            limits: Limits of a plan.
            limit_name: "device" or "saved": the limit to minimise; None: minimise the time.
        """
        count = len(self._options)
        highs = highspy.Highs()
        highs.setOptionValue("output_flag", False)
        highs.setOptionValue("mip_rel_gap", _GAP)
        highs.setOptionValue("time_limit", _ROUND_SECONDS)
        highs.setOptionValue("threads", 1)
        columns = np.arange(count + 1, dtype=np.int32)
        # One binary column for each option. The last column is the limit to minimise.
        upper = np.ones(count + 1)
        upper[-1] = highspy.kHighsInf if limit_name is not None else 0.0
        highs.addVars(count + 1, np.zeros(count + 1), upper)
        kinds = np.full(count + 1, int(HighsVarType.kInteger), dtype=np.uint8)
        kinds[-1] = int(HighsVarType.kContinuous)
        highs.changeColsIntegrality(count + 1, columns, kinds)
        cost = np.array([option.seconds for option in self._options] + [0.0])
        if limit_name is not None:
            cost = np.zeros(count + 1)
            cost[-1] = 1.0
        elif cost.max(initial=0.0) > 0:
            cost = cost / cost.max()
        highs.changeColsCost(count + 1, columns, cost)
        self._add_exclusions(highs)
        self._add_tiers(highs, limits)
        curves = self._curves(limits)
        rows: set[tuple[int, int]] = set()
        chosen = np.zeros(count, dtype=bool)
        value = 0.0
        while True:
            new = self._violations(curves, chosen, rows, limit_name, value)
            if not new:
                return value, chosen
            for curve_index, place in new:
                rows.add((curve_index, place))
                self._add_row(highs, curves[curve_index], place, limit_name)
            highs.run()
            info = highs.getInfo()
            if highs.getModelStatus() == HighsModelStatus.kInfeasible or (
                info.primal_solution_status != highspy.SolutionStatus.kSolutionStatusFeasible
            ):
                return None
            solution = np.array(highs.getSolution().col_value)
            chosen, value = solution[:count] > 0.5, float(solution[-1]) * _UNIT

    def _curves(self, limits: MemoryLimits) -> list[_Curve]:
        """Return the loads over time that have limits."""
        events = self._events
        base = np.array(self._profile.base, dtype=float)
        held = self._baseline.held[: events + 1] + base
        resident = self._baseline.resident[:events]
        return [
            _Curve("device", held, [x.held[: events + 1] for x in self._loads], limits.device),
            _Curve("saved", resident, [x.resident[:events] for x in self._loads], limits.saved),
        ]

    def _violations(
        self,
        curves: Sequence[_Curve],
        chosen: NDArray[np.bool_],
        rows: set[tuple[int, int]],
        limit_name: str | None,
        value: float,
    ) -> list[tuple[int, int]]:
        """Return the worst violations that are not rows, as (index of the curve, place).

        The place is an interval of the curve "device", or an event of the curve "saved".
        """
        violations: list[tuple[float, int, int]] = []
        for curve_index, curve in enumerate(curves):
            limit = value if curve.name == limit_name else curve.limit
            load = curve.baseline.copy()
            for index in np.flatnonzero(chosen).tolist():
                load += curve.options[index]
            for place in np.flatnonzero(load > limit + max(1.0, 1e-7 * value)).tolist():
                if (curve_index, place) not in rows:
                    violations.append((limit - load[place], curve_index, place))
        return [(index, place) for _, index, place in sorted(violations)[:_MAX_NEW_ROWS]]

    def _add_row(
        self, highs: highspy.Highs, curve: _Curve, place: int, limit_name: str | None
    ) -> None:
        values = np.array([option[place] for option in curve.options] + [0.0]) / _UNIT
        limit = curve.limit
        if curve.name == limit_name:
            values[-1], limit = -1.0, 0.0
        used = np.flatnonzero(values).astype(np.int32)
        upper = (limit - curve.baseline[place]) / _UNIT
        highs.addRow(-highspy.kHighsInf, upper, len(used), used, values[used])

    def _add_exclusions(self, highs: highspy.Highs) -> None:
        """Add the rows that allow at most one option to decide about each storage.

        A recomputed region decides about all of its storages. It excludes the reuses inside of it.
        """
        by_storage: dict[int, list[int]] = {}
        for index, option in enumerate(self._options):
            decided = [option.storage] if option.storage is not None else self._replaced(option)
            for number in decided:
                by_storage.setdefault(number, []).append(index)
        groups = {tuple(indices) for indices in by_storage.values() if len(indices) > 1}
        groups |= set(self._exclusive_pairs())
        for indices in groups:
            highs.addRow(
                -highspy.kHighsInf,
                1.0,
                len(indices),
                np.array(indices, dtype=np.int32),
                np.ones(len(indices)),
            )

    def _exclusive_pairs(self) -> Iterator[tuple[int, int]]:
        """Yield (index of a region's option, index of a reuse's option) that exclude each other."""
        for index, option in enumerate(self._options):
            for other_index, other in enumerate(self._options):
                if option.region is not None and other.reuse is not None:
                    region = self._profile.regions[option.region]
                    if excludes(region, self._profile.reuses[other.reuse]):
                        yield index, other_index

    def _replaced(self, option: _Option) -> tuple[int, ...]:
        """Return the indices of the storages that an option's region or reuse does not save."""
        if option.reuse is not None:
            reuse = self._profile.reuses[option.reuse]
            return (reuse.storage,) if reuse.overwritten_at is None else ()
        assert option.region is not None
        return self._profile.regions[option.region].storages

    def _add_tiers(self, highs: highspy.Highs, limits: MemoryLimits) -> None:
        """Add the rows that limit the bytes in each tier."""
        for tier in {link.tier for link in self._profile.links}:
            if limits.of(tier) == inf:
                continue
            # The bytes in a tier grow only at events that save a storage. Rows with the same
            # options are equal, as an option takes the same bytes in all of them.
            rows: dict[tuple[int, ...], tuple[list[int], list[float]]] = {}
            for event in sorted({storage.saved for storage in self._profile.storages}):
                used, sizes = [], []
                for index, option in enumerate(self._options):
                    if option.storage is None or option.choice.tier != tier:
                        continue
                    storage = self._profile.storages[option.storage]
                    if storage.saved <= event <= storage.end:
                        used.append(index)
                        sizes.append(tier_capacity(storage, option.choice) / _UNIT)
                if used:
                    rows[tuple(used)] = (used, sizes)
            for used, sizes in rows.values():
                highs.addRow(
                    -highspy.kHighsInf,
                    limits.of(tier) / _UNIT,
                    len(used),
                    np.array(used, dtype=np.int32),
                    np.array(sizes),
                )


@dataclass(frozen=True)
class _Curve:
    """Load over time, and its limit.

    Attributes:
        name: "device" for bytes in every interval, or "saved" for bytes at every event.
        baseline: These bytes if every storage is kept.
        options: Change of `baseline` by every option.
        limit: Limit in bytes.
    """

    name: str
    baseline: FloatArray
    options: Sequence[FloatArray]
    limit: float


class _Load:
    """Bytes of saved storages on the device: float64[intervals + 1] each.

    Attributes:
        held: Bytes in every interval.
        resident: Bytes at every event.
    """

    def __init__(
        self,
        profile: StepProfile,
        added: Sequence[tuple[SavedStorageProfile, StorageChoice]],
        removed: Sequence[tuple[SavedStorageProfile, StorageChoice]] = (),
    ) -> None:
        size = len(profile.seconds) + 1
        self.held, self.resident = np.zeros(size), np.zeros(size)
        for sign, pairs in ((1, added), (-1, removed)):
            for storage, choice in pairs:
                for first, last, nbytes in held_bytes(storage, choice):
                    self.add(first, last, sign * nbytes)

    def add(self, first: int, last: int, nbytes: int) -> None:
        """Add bytes in intervals `first` to `last`, both included."""
        self.held[first : last + 1] += nbytes
        # Interval i follows event i - 1, at which the bytes are resident already.
        self.resident[first - 1 : last] += nbytes
