"""The integer program (Method E, E6): the fastest split of a model over devices in a fixed order,
with the layers that are recomputed.

Its objective is the simulator's step time itself: the longest way through the events of the
schedule. Binary variables choose one segment of layers for every stage, and HiGHS solves it. The
start of every event could be a variable, too; instead, the ways that turn out to be the longest
become constraints one by one, which is the same program with those variables projected out
(Benders' decomposition), and a hundred times smaller. What cannot be faster than the best plan
known is cut off before (see `segments`); where nothing is left, the known plan is proven."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import inf
from time import monotonic

import highspy
import numpy as np
from highspy import HighsModelStatus, HighsVarType
from numpy.typing import NDArray

from lightning_dlres.core.errors import DlresError
from lightning_dlres.pipeline.plan.cost_model.costs import Workload
from lightning_dlres.pipeline.plan.cost_model.events import COMPUTING, Work, event_graph
from lightning_dlres.pipeline.plan.cost_model.footprint import Matrix
from lightning_dlres.pipeline.plan.search.segments import Segment, Segments

GAP = 5e-4
_EXPECTED = {
    HighsModelStatus.kOptimal,
    HighsModelStatus.kInfeasible,
    HighsModelStatus.kTimeLimit,
}
_MOST_CUTS = 1000
_TIGHT = 1e-5
# How much longer than the relaxed program's a step may be at first, then at second, ...
_SLACKS = (0.003, 0.006, 0.01, 0.015, 0.02, 0.03, 0.05, 0.1, 0.3)
_ROUNDING = 1e-9


class SolverError(DlresError):
    """HiGHS gave up for another reason than that there is no solution."""


@dataclass(frozen=True)
class SplitChoice:
    """A split, what it recomputes, and the seconds of its step in the simulator."""

    split: tuple[int, ...]
    recompute: tuple[int, ...]
    seconds: float


class SplitProgram:
    """Finds the fastest split of one workload.

    Args:
        workload: the devices in their order.
        seconds: time that HiGHS may take for one call of `solve`; the best plan known counts after
            it.

    Attributes:
        in_time: whether that was enough so far.
    """

    def __init__(self, workload: Workload, seconds: float = 15.0) -> None:
        self.workload, self.segments, self._seconds = workload, Segments(workload), seconds
        self.in_time = True
        self._events = event_graph(
            workload.schedule, workload.stages, _needed_shares(workload), workload.extra_in_flight
        )
        self._keys = {key: i for i, key in enumerate(sorted({e.key for e in self._events}))}
        self._steps = [(event.after, self._keys[event.key]) for event in self._events]
        self._keys_of: list[list[tuple[int, Work, int]]] = [[] for _ in range(workload.stages)]
        for (work, replica, stage), index in self._keys.items():
            self._keys_of[stage].append((index, work, replica))
        self._last = {
            (event.replica, event.stage): index
            for index, event in enumerate(self._events)
            if event.work in COMPUTING
        }

    def evaluate(self, stops: Sequence[int]) -> SplitChoice | None:
        """Return the plan whose stages stop at these layers, with its cheapest recomputation; None
        where memory cannot hold it."""
        chosen = []
        for stage, (first, stop) in enumerate(zip([0, *stops[:-1]], stops, strict=True)):
            segment = self.segments.segment(stage, first, stop)
            if segment is None:
                return None
            chosen.append(segment)
        return self._choice(chosen)

    def improve(self, stops: Sequence[int], start: SplitChoice) -> SplitChoice:
        """Move the borders between stages as long as the step gets shorter."""
        best, current = start, list(stops)
        improved = True
        while improved:
            improved = False
            for moved in _neighbours(current, self.segments.count):
                if self._bound(moved) >= best.seconds:
                    continue
                choice = self.evaluate(moved)
                if choice is not None and choice.seconds < best.seconds * (1 - 1e-12):
                    best, current, improved = choice, moved, True
        return best

    def solve(self, below: float) -> SplitChoice | None:
        """Return the fastest plan whose step takes less than `below`, to within the gap; None if
        there is none.

        Raises:
            SolverError: HiGHS failed.
        """
        open_ = self.segments.below(below)
        if below <= 0 or not all(open_):
            return None
        columns = [segment for stage in open_ for segment in stage]
        if len(columns) == len(open_):
            choice = self._choice(columns)
            return choice if choice.seconds < below else None
        return self._solve(columns, below)

    def _bound(self, stops: Sequence[int]) -> float:
        firsts = [0, *stops[:-1]]
        bounds = self.segments.bounds
        return max(
            float(bounds[s][i, j]) for s, (i, j) in enumerate(zip(firsts, stops, strict=True))
        )

    def _choice(self, segments: Sequence[Segment]) -> SplitChoice:
        seconds = [0.0] * len(self._keys)
        for segment in segments:
            for index, work, replica in self._keys_of[segment.stage]:
                seconds[index] = segment.seconds[replica][work]
        tails = [segments[stage].tails[replica] for replica, stage in self._last]
        total, _ = self._longest(seconds, tails)
        recompute = tuple(layer for segment in segments for layer in segment.recomputed)
        return SplitChoice(tuple(s.stop - s.first for s in segments), recompute, total)

    def _longest(
        self, seconds: Sequence[float], tails: Sequence[float]
    ) -> tuple[float, Callable[[], _Path]]:
        """Return the length of the longest way through the events, and what makes that way."""
        ends: list[float] = []
        for after, key in self._steps:
            end = seconds[key]
            if after:
                end += max([ends[index] for index in after])
            ends.append(end)
        total, last = max(
            (ends[index] + tail, place)
            for place, (index, tail) in enumerate(zip(self._last.values(), tails, strict=True))
        )

        def path() -> _Path:
            index = list(self._last.values())[last]
            counts = [0] * len(self._keys)
            while True:
                after, key = self._steps[index]
                counts[key] += 1
                if not after:
                    return _Path(tuple(counts), last)
                index = max(after, key=ends.__getitem__)

        return total, path

    def _solve(self, columns: list[Segment], target: float) -> SplitChoice | None:
        """Add ways through the events until the program's step is the simulator's: first with
        segments chosen in part, which is quick and tells how short a step can be at best; then with
        whole ones, and only with those that allow a step a little longer than that."""
        master = _Master(columns, self.workload.stages, self.segments.count, target)
        costs, tails = self._matrix(columns) / target, self._tails(columns) / target
        deadline = monotonic() + self._seconds

        def time_left() -> float:
            return max(deadline - monotonic(), 0.0)

        def falls_short(step: float, chosen: Matrix) -> bool:
            length, path = self._longest((costs @ chosen).tolist(), (tails @ chosen).tolist())
            if length <= step * (1 + _TIGHT):
                return False
            way = path()
            master.add(np.asarray(way.counts) @ costs + tails[way.last])
            return True

        relaxed = master.relax(time_left())
        while relaxed is not None and falls_short(relaxed.step, relaxed.chosen):
            relaxed = master.relax(time_left())
        self.in_time &= master.in_time
        if relaxed is None:
            return None
        through = master.through()
        best: SplitChoice | None = None
        for slack in (*_SLACKS, inf):
            below = min(1.0, relaxed.step * (1 + slack))
            for _ in range(_MOST_CUTS):
                found = master.minimise(through <= below + _ROUNDING, below, time_left())
                self.in_time &= master.in_time
                if found is None:
                    break
                choice = self._choice(
                    [c for c, on in zip(columns, found.chosen, strict=True) if on > 0.5]
                )
                if choice.seconds < (best.seconds if best is not None else target):
                    best = choice
                if best is not None and found.bound >= best.seconds / target * (1 - GAP):
                    return best
                if not falls_short(found.step, found.chosen):
                    return best
            if below >= 1.0:
                break
        return best

    def _matrix(self, columns: Sequence[Segment]) -> Matrix:
        """Seconds of every kind of work (rows) of every segment (columns)."""
        found = np.zeros((len(self._keys), len(columns)))
        for column, segment in enumerate(columns):
            for index, work, replica in self._keys_of[segment.stage]:
                found[index, column] = segment.seconds[replica][work]
        return found

    def _tails(self, columns: Sequence[Segment]) -> Matrix:
        found = np.zeros((len(self._last), len(columns)))
        for row, (replica, stage) in enumerate(self._last):
            for column, segment in enumerate(columns):
                if segment.stage == stage:
                    found[row, column] = segment.tails[replica]
        return found


@dataclass(frozen=True)
class _Path:
    """A way through the events: how often it passes each kind of work, and at whose last event it
    ends."""

    counts: tuple[int, ...]
    last: int


@dataclass(frozen=True)
class _Solution:
    """A lower bound of the step, the step, and how much of every segment is chosen."""

    bound: float
    step: float
    chosen: Matrix


class _Master:
    """The program in HiGHS: one binary per segment, and the step in units of the target, so that
    it is at most 1. A cut says that the step is no shorter than one way through the events. HiGHS
    keeps the relaxed program, and so goes on from the solution that a cut has made impossible.

    Attributes:
        in_time: whether HiGHS has always come to an end.
    """

    def __init__(self, columns: Sequence[Segment], stages: int, layers: int, target: float) -> None:
        self.count, self._layers = len(columns), layers
        self._places = np.array([(c.stage, c.first, c.stop) for c in columns])
        rows: dict[tuple[str, int, int], list[tuple[int, float]]] = {}
        for index, column in enumerate(columns):
            rows.setdefault(("stage", column.stage, 0), []).append((index, 1.0))
            if column.stop < layers:
                rows.setdefault(("cut", column.stage, column.stop), []).append((index, 1.0))
            if column.first > 0:
                rows.setdefault(("cut", column.stage - 1, column.first), []).append((index, -1.0))
        self.in_time = True
        self._highs = highspy.Highs()
        self._highs.setOptionValue("output_flag", False)
        self._all = np.arange(self.count + 1, dtype=np.int32)
        self._highs.addVars(len(self._all), np.zeros(len(self._all)), np.ones(len(self._all)))
        self._highs.changeColCost(self.count, 1.0)
        for (kind, _, _), terms in rows.items():
            demand = 1.0 if kind == "stage" else 0.0
            indices, values = zip(*terms, strict=True)
            self._highs.addRow(demand, demand, len(terms), np.array(indices), np.array(values))
        self._demands = len(rows)
        self._cuts = np.zeros((0, self.count))
        self._weights = np.zeros(0)
        for stage in range(stages):
            self.add(np.array([c.bound / target if c.stage == stage else 0.0 for c in columns]))

    def add(self, way: Matrix) -> None:
        """Demand that the step is no shorter than this for the segments chosen."""
        self._cuts = np.vstack([self._cuts, way])
        self._highs.addRow(0.0, inf, len(self._all), self._all, np.append(-way, 1.0))

    def relax(self, seconds: float) -> _Solution | None:
        """Return what `minimise` does, if a segment may be chosen in part."""
        # The limit of a linear program counts from its first run.
        status = self._run(self._highs, self._highs.getRunTime() + seconds)
        if status != HighsModelStatus.kOptimal:
            return None
        duals = np.array(self._highs.getSolution().row_dual)[self._demands :]
        self._weights = np.maximum(duals, 0.0)
        return self._solution(self._highs, self._highs.getInfo().objective_function_value)

    def minimise(
        self, allowed: NDArray[np.bool_], below: float, seconds: float
    ) -> _Solution | None:
        """Return the shortest step with these segments, to within the gap; None if there is none
        below this one, or none was found in this time."""
        whole = highspy.Highs()
        whole.setOptionValue("output_flag", False)
        whole.passModel(self._highs.getModel())
        whole.setOptionValue("mip_rel_gap", GAP / 4)
        kinds = np.full(len(self._all), int(HighsVarType.kInteger), dtype=np.uint8)
        kinds[-1] = int(HighsVarType.kContinuous)
        whole.changeColsIntegrality(len(self._all), self._all, kinds)
        highest = np.append(allowed.astype(float), below)
        whole.changeColsBounds(len(self._all), self._all, np.zeros(len(self._all)), highest)
        self._run(whole, seconds)
        info = whole.getInfo()
        if info.primal_solution_status != highspy.SolutionStatus.kSolutionStatusFeasible:
            return None
        return self._solution(whole, info.mip_dual_bound)

    def through(self) -> Matrix:
        """Return for every segment a step that no plan with it falls short of.

        No step is shorter than the cuts' mean, however they are weighted; the relaxed program's
        weights make it the longest. It is a sum over segments, so the least one with a given
        segment is the shortest way from the first layer to the last through it."""
        if not self._weights.sum():
            return np.zeros(self.count)
        stage, first, stop = self._places.T
        each = (self._weights / self._weights.sum()) @ self._cuts
        before = np.full((stage[-1] + 2, self._layers + 1), np.inf)
        after = before.copy()
        before[0, 0] = after[-1, -1] = 0.0
        for s in range(len(before) - 1):
            own = stage == s
            np.minimum.at(before[s + 1], stop[own], before[s, first[own]] + each[own])
        for s in reversed(range(len(before) - 1)):
            own = stage == s
            np.minimum.at(after[s], first[own], after[s + 1, stop[own]] + each[own])
        found: Matrix = before[stage, first] + each + after[stage + 1, stop]
        return found

    def _run(self, highs: highspy.Highs, time_limit: float) -> HighsModelStatus:
        highs.setOptionValue("time_limit", time_limit)
        highs.run()
        status = highs.getModelStatus()
        self.in_time &= status != HighsModelStatus.kTimeLimit
        if status not in _EXPECTED:
            raise SolverError(
                "HiGHS could not solve the split: " + highs.modelStatusToString(status)
            )
        return status

    def _solution(self, highs: highspy.Highs, bound: float) -> _Solution:
        chosen = np.array(highs.getSolution().col_value)[: self.count]
        return _Solution(bound, highs.getInfo().objective_function_value, chosen)


def _needed_shares(workload: Workload) -> tuple[int, ...]:
    """Return the micro-batches of every replica, 0 for those that are like another one with no
    fewer: they end no later."""
    seen: set[tuple[object, ...]] = set()
    needed = []
    for replica, share in sorted(enumerate(workload.shares), key=lambda item: -item[1]):
        ranks = workload.replicas[replica]
        links = tuple(
            (link.latency, link.bytes_per_second)
            for link in (workload.cluster.link(a, b) for a, b in itertools.pairwise(ranks))
        )
        alike = (*(workload.cluster.devices[rank].kind for rank in ranks), links)
        needed.append((replica, 0 if alike in seen else share))
        seen.add(alike)
    return tuple(share for _, share in sorted(needed))


def _neighbours(stops: Sequence[int], count: int) -> list[list[int]]:
    found = []
    for border in range(len(stops) - 1):
        for step in (-1, 1, -2, 2):
            for also in range(border, len(stops) - 1):
                moved = list(stops)
                for index in range(border, also + 1):
                    moved[index] += step
                ends = [0, *moved]
                if all(a < b for a, b in zip(ends, moved, strict=False)) and moved[-1] == count:
                    found.append(moved)
    return found
