"""Which data leave, as an integer program: exact where the device waits for every copy, and
otherwise the choice that can be carried out at all, by waiting where it must.

Limits hold in every interval, but few of them matter: those that a solution misses are added until
none does.
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
    away_bytes,
    holding,
    relief,
    room_for,
)
from lightning_dlres.memory.profile.step_profile import (
    Region,
    Reuse,
    SavedStorageProfile,
    StepProfile,
)

# Rows that are added at a time.
_MOST_NEW_ROWS = 8
_GAP = 1e-6
_SECONDS = 5.0

Curve = NDArray[np.float64]


@dataclass(frozen=True)
class _Option:
    """One column: a choice for a saved_storage, a region that runs again, or a reuse."""

    seconds: float
    saved_storage: int | None = None
    choice: StorageChoice = KEEP
    region: int | None = None
    reuse: int | None = None


def choices_of(
    profile: StepProfile, saved_storage: SavedStorageProfile, actions: Sequence[MemoryAction]
) -> Iterator[StorageChoice]:
    """Yield what can happen to a saved_storage, but for keeping it."""
    if not saved_storage.can_leave:
        return
    packs = saved_storage.packed is not None and saved_storage.packed < saved_storage.nbytes
    if packs and MemoryAction.COMPRESS in actions:
        yield StorageChoice(MemoryAction.COMPRESS)
    for link in profile.links:
        if MemoryAction.OFFLOAD in actions:
            yield StorageChoice(MemoryAction.OFFLOAD, link.tier)
        if packs and MemoryAction.BOTH in actions:
            yield StorageChoice(MemoryAction.BOTH, link.tier)


def seconds_of(
    profile: StepProfile, saved_storage: SavedStorageProfile, choice: StorageChoice, shown: float
) -> float:
    """Return what a choice costs.

    Args:
        shown: the share of a copy's time that counts where the device computes meanwhile.
    """
    seconds = 0.0
    if choice.action in (MemoryAction.COMPRESS, MemoryAction.BOTH):
        seconds += saved_storage.encode_seconds + saved_storage.decode_seconds
    if choice.leaves:
        link = next(link for link in profile.links if link.tier == choice.tier)
        size = away_bytes(saved_storage, choice)
        both = link.out_seconds(size) + link.in_seconds(size)
        seconds += both * shown if link.overlaps else both
    return seconds


def is_inside(region: Region, reuse: Reuse) -> bool:
    """Return whether a reuse is about what a region that runs again saves, or about its modules."""
    return reuse.saved_storage in region.data or any(
        name == region.layer or name.startswith(f"{region.layer}.") for name in reuse.layers
    )


@dataclass(frozen=True)
class Selection:
    """A solution: what happens to every saved_storage, which regions run again, and which reuses there
    are."""

    choices: tuple[StorageChoice, ...]
    regions: tuple[int, ...] = ()
    reuses: tuple[int, ...] = ()


class Program:
    """The choices for one step.

    Args:
        profile: the step.
        actions: those that may be chosen.
        recompute: whether regions may run again.
        shown: see `seconds_of`.
        reuse: whether modules may do with less memory.
    """

    def __init__(
        self,
        profile: StepProfile,
        actions: Sequence[MemoryAction],
        recompute: bool = True,
        shown: float = 1.0,
        reuse: bool = True,
    ) -> None:
        self._profile = profile
        options = [
            _Option(seconds_of(profile, saved_storage, choice, shown), number, choice)
            for number, saved_storage in enumerate(profile.data)
            for choice in choices_of(profile, saved_storage, actions)
        ]
        if recompute:
            options += [
                _Option(region.seconds, region=index)
                for index, region in enumerate(profile.regions)
            ]
        if reuse:
            options += [
                _Option(found.seconds, reuse=index) for index, found in enumerate(profile.reuses)
            ]
        self._options = options
        self._events = len(profile.seconds) - 1
        self._kept = _Load(profile, [(saved_storage, KEEP) for saved_storage in profile.data])
        self._loads = [self._difference(option) for option in options]

    def _difference(self, option: _Option) -> _Load:
        """Return by how much an option changes what is held if all is kept."""
        profile = self._profile
        if option.saved_storage is not None:
            saved_storage = profile.data[option.saved_storage]
            return _Load(profile, [(saved_storage, option.choice)], [(saved_storage, KEEP)])
        if option.reuse is not None:
            return self._relief(profile.reuses[option.reuse])
        assert option.region is not None
        region = profile.regions[option.region]
        data = [profile.data[number] for number in region.data]
        first = min(saved_storage.uses[0] for saved_storage in data)
        load = _Load(profile, [], [(saved_storage, KEEP) for saved_storage in data])
        for saved_storage in data:
            load.add(first + 1, saved_storage.end + 1, saved_storage.nbytes)
        load.held[region.entry : first + 2] += region.inputs
        load.resident[region.entry : first + 1] += region.inputs
        load.held[first + 1] += region.workspace
        return load

    def _relief(self, reuse: Reuse) -> _Load:
        saved_storage = self._profile.data[reuse.saved_storage]
        load = _Load(self._profile, [])
        for first, last, nbytes in relief(saved_storage, reuse):
            if nbytes > 0 or reuse.at is None:
                load.add(first, last, nbytes)
            else:
                # Up to the event after the interval in which the saved_storage is given up it counts.
                load.held[first : last + 1] += nbytes
                load.resident[first:last] += nbytes if first > reuse.at + 1 else 0
        return load

    def select(self, limits: MemoryLimits) -> Selection | None:
        """Return the choices that take the least time; None where no choices meet the limits."""
        solved = self._solve(limits, None)
        return self._selection(solved[1]) if solved is not None else None

    def smallest(self, limits: MemoryLimits, what: str) -> int | None:
        """Return the least limit of "device" or "saved" with which the other limits can be met;
        None if there is none."""
        solved = self._solve(limits, what)
        if solved is None:
            return None
        # The solver's own value may be a byte too small, within its tolerance.
        (curve,) = [curve for curve in self._curves(limits) if curve.what == what]
        load = curve.kept + sum(
            curve.options[index] for index in np.flatnonzero(solved[1]).tolist()
        )
        return int(np.ceil(load.max(initial=0.0) - 1e-3))

    def _selection(self, chosen: NDArray[np.bool_]) -> Selection:
        choices = [KEEP] * len(self._profile.data)
        regions, reuses = [], []
        for option, is_chosen in zip(self._options, chosen, strict=True):
            if not is_chosen:
                continue
            if option.saved_storage is not None:
                choices[option.saved_storage] = option.choice
            elif option.region is not None:
                regions.append(option.region)
            elif option.reuse is not None:
                reuses.append(option.reuse)
        return Selection(tuple(choices), tuple(regions), tuple(reuses))

    def _solve(
        self, limits: MemoryLimits, smallest: str | None
    ) -> tuple[float, NDArray[np.bool_]] | None:
        """Return the choices, and the least of the limit that is to be made smallest."""
        count = len(self._options)
        highs = highspy.Highs()
        highs.setOptionValue("output_flag", False)
        highs.setOptionValue("mip_rel_gap", _GAP)
        highs.setOptionValue("time_limit", _SECONDS)
        highs.setOptionValue("threads", 1)
        every = np.arange(count + 1, dtype=np.int32)
        highest = np.ones(count + 1)
        highest[-1] = highspy.kHighsInf if smallest is not None else 0.0
        highs.addVars(count + 1, np.zeros(count + 1), highest)
        kinds = np.full(count + 1, int(HighsVarType.kInteger), dtype=np.uint8)
        kinds[-1] = int(HighsVarType.kContinuous)
        highs.changeColsIntegrality(count + 1, every, kinds)
        cost = np.array([option.seconds for option in self._options] + [0.0])
        if smallest is not None:
            cost = np.zeros(count + 1)
            cost[-1] = 1.0
        elif cost.max(initial=0.0) > 0:
            cost = cost / cost.max()
        highs.changeColsCost(count + 1, every, cost)
        self._add_exclusions(highs)
        self._add_tiers(highs, limits)
        curves = self._curves(limits)
        known: set[tuple[int, int]] = set()
        chosen = np.zeros(count, dtype=bool)
        value = 0.0
        while True:
            new = self._missed(curves, chosen, known, smallest, value)
            if not new:
                return value, chosen
            for which, place in new:
                known.add((which, place))
                self._add_row(highs, curves[which], place, smallest)
            highs.run()
            info = highs.getInfo()
            if highs.getModelStatus() == HighsModelStatus.kInfeasible or (
                info.primal_solution_status != highspy.SolutionStatus.kSolutionStatusFeasible
            ):
                return None
            solution = np.array(highs.getSolution().col_value)
            chosen, value = solution[:count] > 0.5, float(solution[-1]) * _UNIT

    def _curves(self, limits: MemoryLimits) -> list[_Curve]:
        """Return what is limited over time, as it is if all is kept and as every option changes
        it."""
        events = self._events
        base = np.array(self._profile.base, dtype=float)
        held = self._kept.held[: events + 1] + base
        resident = self._kept.resident[:events]
        return [
            _Curve("device", held, [x.held[: events + 1] for x in self._loads], limits.device),
            _Curve("saved", resident, [x.resident[:events] for x in self._loads], limits.saved),
        ]

    def _missed(
        self,
        curves: Sequence[_Curve],
        chosen: NDArray[np.bool_],
        known: set[tuple[int, int]],
        smallest: str | None,
        value: float,
    ) -> list[tuple[int, int]]:
        """Return the worst moments at which limits are missed: which curve, and where."""
        found: list[tuple[float, int, int]] = []
        for which, curve in enumerate(curves):
            limit = value if curve.what == smallest else curve.limit
            load = curve.kept.copy()
            for index in np.flatnonzero(chosen).tolist():
                load += curve.options[index]
            for place in np.flatnonzero(load > limit + max(1.0, 1e-7 * value)).tolist():
                if (which, place) not in known:
                    found.append((limit - load[place], which, place))
        return [(which, place) for _, which, place in sorted(found)[:_MOST_NEW_ROWS]]

    def _add_row(
        self, highs: highspy.Highs, curve: _Curve, place: int, smallest: str | None
    ) -> None:
        values = np.array([option[place] for option in curve.options] + [0.0]) / _UNIT
        limit = curve.limit
        if curve.what == smallest:
            values[-1], limit = -1.0, 0.0
        used = np.flatnonzero(values).astype(np.int32)
        highest = (limit - curve.kept[place]) / _UNIT
        highs.addRow(-highspy.kHighsInf, highest, len(used), used, values[used])

    def _add_exclusions(self, highs: highspy.Highs) -> None:
        """One choice for a saved_storage; a region that runs again decides about all of its own, and what
        runs inside of it reuses nothing."""
        of: dict[int, list[int]] = {}
        for index, option in enumerate(self._options):
            data = (
                [option.saved_storage] if option.saved_storage is not None else self._inside(option)
            )
            for number in data:
                of.setdefault(number, []).append(index)
        groups = {tuple(found) for found in of.values() if len(found) > 1}
        groups |= set(self._pairs())
        for indices in groups:
            highs.addRow(
                -highspy.kHighsInf,
                1.0,
                len(indices),
                np.array(indices, dtype=np.int32),
                np.ones(len(indices)),
            )

    def _pairs(self) -> Iterator[tuple[int, int]]:
        """Yield a region and a reuse inside of it."""
        for one, option in enumerate(self._options):
            for other, within in enumerate(self._options):
                if option.region is not None and within.reuse is not None:
                    region = self._profile.regions[option.region]
                    if is_inside(region, self._profile.reuses[within.reuse]):
                        yield one, other

    def _inside(self, option: _Option) -> tuple[int, ...]:
        if option.reuse is not None:
            reuse = self._profile.reuses[option.reuse]
            return (reuse.saved_storage,) if reuse.at is None else ()
        assert option.region is not None
        return self._profile.regions[option.region].data

    def _add_tiers(self, highs: highspy.Highs, limits: MemoryLimits) -> None:
        for tier in {link.tier for link in self._profile.links}:
            if limits.of(tier) == inf:
                continue
            rows: dict[tuple[int, ...], tuple[list[int], list[float]]] = {}
            moments = sorted({saved_storage.saved for saved_storage in self._profile.data})
            for moment in moments:
                used, sizes = [], []
                for index, option in enumerate(self._options):
                    if option.saved_storage is None or option.choice.tier != tier:
                        continue
                    saved_storage = self._profile.data[option.saved_storage]
                    if saved_storage.saved <= moment <= saved_storage.end:
                        used.append(index)
                        sizes.append(room_for(saved_storage, option.choice) / _UNIT)
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


# HiGHS likes numbers near 1.
_UNIT = float(1 << 20)


@dataclass(frozen=True)
class _Curve:
    """What is limited, at every moment: if all is kept, and how every option changes it."""

    what: str
    kept: Curve
    options: Sequence[Curve]
    limit: float


class _Load:
    """Bytes on the device: `held` in every interval, `resident` at every event."""

    def __init__(
        self,
        profile: StepProfile,
        there: Sequence[tuple[SavedStorageProfile, StorageChoice]],
        instead_of: Sequence[tuple[SavedStorageProfile, StorageChoice]] = (),
    ) -> None:
        places = len(profile.seconds) + 1
        self.held, self.resident = np.zeros(places), np.zeros(places)
        for sign, data in ((1, there), (-1, instead_of)):
            for saved_storage, choice in data:
                for first, last, nbytes in holding(saved_storage, choice):
                    self.add(first, last, sign * nbytes)

    def add(self, first: int, last: int, nbytes: int) -> None:
        """Note so many bytes in intervals `first` to `last`."""
        self.held[first : last + 1] += nbytes
        # At the event before an interval they are there, at the one after it no more.
        self.resident[first - 1 : last] += nbytes
