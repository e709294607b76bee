"""Integer program: the fastest split over devices in a fixed order, with its recomputed layers.

Its objective is the simulator's step time, which is the longest path through the events of the
schedule. Binary variables choose one segment of layers for every stage, and HiGHS solves the
program. The start of every event could be a variable too. Instead, paths that turn out to be the
longest become constraints one by one. This is the same program with those variables projected out
(Benders' decomposition), and a hundred times smaller.

Segments that cannot be part of a plan faster than the best known one are cut off first (see
`segments`). If none is left, the known plan is proven to be the fastest.
"""

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

# Relative gap to the optimum at which the search stops.
GAP = 5e-4
_EXPECTED = {
    HighsModelStatus.kOptimal,
    HighsModelStatus.kInfeasible,
    HighsModelStatus.kTimeLimit,
}
# Largest number of paths that are added for one slack.
_MAX_CUTS = 1000
# Relative difference up to which the program's step counts as equal to the simulator's.
_TIGHT = 1e-5
# Relative excess over the relaxed program's step that segments may reach: in the first attempt, in
# the second, and so on.
_SLACKS = (0.003, 0.006, 0.01, 0.015, 0.02, 0.03, 0.05, 0.1, 0.3)
# Relative rounding error of sums in another order.
_ROUNDING = 1e-9


class SolverError(DlresError):
    """HiGHS failed for a reason other than an infeasible program or the time limit."""


@dataclass(frozen=True)
class SplitChoice:
    """A split with its recomputed layers and the seconds of its simulated step."""

    split: tuple[int, ...]
    recompute: tuple[int, ...]
    seconds: float


class SplitProgram:
    """Search for the fastest split of one workload.

    Args:
        workload: The model, with its devices in a fixed order.
        seconds: Time limit of HiGHS for one call of `solve`, which then returns its best plan.

    Attributes:
        in_time: Whether no call of HiGHS has reached the time limit so far.
    """

    def __init__(self, workload: Workload, seconds: float = 15.0) -> None:
        self.workload, self.segments, self._seconds = workload, Segments(workload), seconds
        self.in_time = True
        self._events = event_graph(
            workload.schedule, workload.stages, _needed_shares(workload), workload.extra_in_flight
        )
        # Events of one key take the same time, so a key has one index.
        self._keys = {key: i for i, key in enumerate(sorted({e.key for e in self._events}))}
        self._steps = [(event.after, self._keys[event.key]) for event in self._events]
        self._keys_of: list[list[tuple[int, Work, int]]] = [[] for _ in range(workload.stages)]
        for (work, replica, stage), index in self._keys.items():
            self._keys_of[stage].append((index, work, replica))
        # Last computation of every (replica, stage): its end plus the tail ends the stage's step.
        self._last = {
            (event.replica, event.stage): index
            for index, event in enumerate(self._events)
            if event.work in COMPUTING
        }

    def evaluate(self, stops: Sequence[int]) -> SplitChoice | None:
        """Return the plan whose stages stop before these layers, with its cheapest recomputation.

        It is None if it does not fit into memory.
        """
        chosen = []
        for stage, (first, stop) in enumerate(zip([0, *stops[:-1]], stops, strict=True)):
            segment = self.segments.segment(stage, first, stop)
            if segment is None:
                return None
            chosen.append(segment)
        return self._choice(chosen)

    def improve(self, stops: Sequence[int], start: SplitChoice) -> SplitChoice:
        """Return the plan after moving the cuts between stages as long as the step gets shorter."""
        best, current = start, list(stops)
        improved = True
        while improved:
            improved = False
            for moved in _neighbours(current, self.segments.num_layers):
                if self._bound(moved) >= best.seconds:
                    continue
                choice = self.evaluate(moved)
                if choice is not None and choice.seconds < best.seconds * (1 - 1e-12):
                    best, current, improved = choice, moved, True
        return best

    def solve(self, below: float) -> SplitChoice | None:
        """Return the fastest plan whose step takes less than `below` seconds, to within the gap;
        None if there is none.

        Raises:
            SolverError: If HiGHS fails.
        """
        segments = self.segments.below(below)
        if below <= 0 or not all(segments):
            return None
        columns = [segment for stage in segments for segment in stage]
        if len(columns) == len(segments):
            choice = self._choice(columns)
            return choice if choice.seconds < below else None
        return self._solve(columns, below)

    def _bound(self, stops: Sequence[int]) -> float:
        """Return a lower bound of the step of a split."""
        firsts = [0, *stops[:-1]]
        bounds = self.segments.bounds
        return max(
            float(bounds[s][i, j]) for s, (i, j) in enumerate(zip(firsts, stops, strict=True))
        )

    def _choice(self, segments: Sequence[Segment]) -> SplitChoice:
        """Return the plan of one segment per stage, with its simulated step."""
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
        """Return the length of the longest path through the events, and a function that finds that
        path."""
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
        """Add paths through the events until the program's step equals the simulator's.

        At first segments may be chosen in part. This relaxed program is fast, and its step is a
        lower bound. Then whole segments are chosen, at first only among those that allow a step
        slightly longer than the bound.
        """
        master = _Master(columns, self.workload.stages, self.segments.num_layers, target)
        costs, tails = self._matrix(columns) / target, self._tails(columns) / target
        deadline = monotonic() + self._seconds

        def time_left() -> float:
            return max(deadline - monotonic(), 0.0)

        def falls_short(step: float, chosen: Matrix) -> bool:
            """Return whether the simulated step is longer, after adding its longest path."""
            length, path = self._longest((costs @ chosen).tolist(), (tails @ chosen).tolist())
            if length <= step * (1 + _TIGHT):
                return False
            longest = path()
            master.add(np.asarray(longest.counts) @ costs + tails[longest.last])
            return True

        relaxed = master.relax(time_left())
        while relaxed is not None and falls_short(relaxed.step, relaxed.chosen):
            relaxed = master.relax(time_left())
        self.in_time &= master.in_time
        if relaxed is None:
            return None
        bounds = master.bounds()
        best: SplitChoice | None = None
        for slack in (*_SLACKS, inf):
            below = min(1.0, relaxed.step * (1 + slack))
            for _ in range(_MAX_CUTS):
                solution = master.minimise(bounds <= below + _ROUNDING, below, time_left())
                self.in_time &= master.in_time
                if solution is None:
                    break
                choice = self._choice(
                    [c for c, on in zip(columns, solution.chosen, strict=True) if on > 0.5]
                )
                if choice.seconds < (best.seconds if best is not None else target):
                    best = choice
                if best is not None and solution.bound >= best.seconds / target * (1 - GAP):
                    return best
                if not falls_short(solution.step, solution.chosen):
                    return best
            if below >= 1.0:
                break
        return best

    def _matrix(self, columns: Sequence[Segment]) -> Matrix:
        """Return the seconds of every event key (rows) for every segment (columns)."""
        seconds = np.zeros((len(self._keys), len(columns)))
        for column, segment in enumerate(columns):
            for index, work, replica in self._keys_of[segment.stage]:
                seconds[index, column] = segment.seconds[replica][work]
        return seconds

    def _tails(self, columns: Sequence[Segment]) -> Matrix:
        """Return the tail of every (replica, stage) (rows) for every segment (columns)."""
        tails = np.zeros((len(self._last), len(columns)))
        for row, (replica, stage) in enumerate(self._last):
            for column, segment in enumerate(columns):
                if segment.stage == stage:
                    tails[row, column] = segment.tails[replica]
        return tails


@dataclass(frozen=True)
class _Path:
    """A path through the events.

    Attributes:
        counts: Number of events of each key on the path.
        last: Index in `_last` of the event at which the path ends.
    """

    counts: tuple[int, ...]
    last: int


@dataclass(frozen=True)
class _Solution:
    """A solution: lower bound of the step, the step, and the chosen part of every segment."""

    bound: float
    step: float
    chosen: Matrix


class _Master:
    """The program in HiGHS: one binary per segment, and the step in units of the target.

    In these units the step is at most 1. A cut demands that the step is no shorter than one path
    through the events. HiGHS keeps the relaxed program, so it continues from the solution that a
    cut has made infeasible.

    Attributes:
        in_time: Whether HiGHS has never reached its time limit.
    """

    def __init__(self, columns: Sequence[Segment], stages: int, layers: int, target: float) -> None:
        self.count, self._layers = len(columns), layers
        self._places = np.array([(c.stage, c.first, c.stop) for c in columns])
        # Each stage has one segment ("stage"). At each cut between two stages, as many segments
        # stop as start ("cut").
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

    def add(self, path: Matrix) -> None:
        """Demand that the step is no shorter than this path, given its seconds for each segment."""
        self._cuts = np.vstack([self._cuts, path])
        self._highs.addRow(0.0, inf, len(self._all), self._all, np.append(-path, 1.0))

    def relax(self, seconds: float) -> _Solution | None:
        """Return the shortest step if segments may be chosen in part; None without a solution."""
        # HiGHS counts the time limit of a linear program from its first run.
        status = self._run(self._highs, self._highs.getRunTime() + seconds)
        if status != HighsModelStatus.kOptimal:
            return None
        duals = np.array(self._highs.getSolution().row_dual)[self._demands :]
        self._weights = np.maximum(duals, 0.0)
        return self._solution(self._highs, self._highs.getInfo().objective_function_value)

    def minimise(
        self, allowed: NDArray[np.bool_], below: float, seconds: float
    ) -> _Solution | None:
        """Return the shortest step with the allowed segments, to within the gap.

        It is None if there is no step of at most `below`, or if none was found in this time.
        """
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

    def bounds(self) -> Matrix:
        """Return a lower bound of the step of any plan with a given segment, for every segment.

        No step is shorter than a weighted mean of the cuts. The weights of the relaxed program give
        the largest mean. The mean is a sum over segments. So its minimum with a given segment is
        the shortest path from the first layer to the last through this segment.
        """
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
        bounds: Matrix = before[stage, first] + each + after[stage + 1, stop]
        return bounds

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
    """Return the number of micro-batches of every replica, with 0 for replicas that need not be
    simulated: those with the devices and links of another one that has at least as many."""
    seen: set[tuple[object, ...]] = set()
    needed = []
    for replica, share in sorted(enumerate(workload.shares), key=lambda item: -item[1]):
        ranks = workload.replicas[replica]
        links = tuple(
            (link.latency, link.bytes_per_second)
            for link in (workload.cluster.link(a, b) for a, b in itertools.pairwise(ranks))
        )
        properties = (*(workload.cluster.devices[rank].kind for rank in ranks), links)
        needed.append((replica, 0 if properties in seen else share))
        seen.add(properties)
    return tuple(share for _, share in sorted(needed))


def _neighbours(stops: Sequence[int], count: int) -> list[list[int]]:
    """Return the splits in which some consecutive cuts are moved together by one or two layers."""
    neighbours = []
    for cut in range(len(stops) - 1):
        for step in (-1, 1, -2, 2):
            for last in range(cut, len(stops) - 1):
                moved = list(stops)
                for index in range(cut, last + 1):
                    moved[index] += step
                ends = [0, *moved]
                if all(a < b for a, b in zip(ends, moved, strict=False)) and moved[-1] == count:
                    neighbours.append(moved)
    return neighbours
