"""Integer program: the fastest split over devices in a fixed order, with its recomputed layers.

Its objective is the simulator's step time, which is the longest path through the events of the
schedule. Binary variables choose one segment of layers for every stage. The solver HiGHS solves the
program. The start of every event could be a variable too. Instead, paths that turn out to be the
longest become constraints ("cuts") one by one. This is the same program with those variables
projected out (Benders' decomposition), and a hundred times smaller.

Segments that cannot be part of a plan faster than the best known one are left out (see `segments`).
If none is left, the known plan is proven to be the fastest.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import inf
from time import monotonic

import numpy as np

from lightning_dlres.pipeline.plan.cost_model.costs import Workload
from lightning_dlres.pipeline.plan.cost_model.events import COMPUTING, Work, event_graph
from lightning_dlres.pipeline.plan.cost_model.footprint import Matrix
from lightning_dlres.pipeline.plan.search.master_problem import GAP, MasterProblem, Solution
from lightning_dlres.pipeline.plan.search.segments import Segment, Segments

# Largest number of solutions that are tried for one entry of `_SLACKS`; each adds a cut.
_MAX_CUTS = 1000
# Relative difference up to which the program's step counts as equal to the simulator's.
_STEP_TOLERANCE = 1e-5
# Limits of the step in successive attempts, as the relative excess over the relaxed program's step.
# A low limit leaves few segments, so the attempt is fast. The next limit is tried if no plan within
# this one is proven to be the fastest.
_SLACKS = (0.003, 0.006, 0.01, 0.015, 0.02, 0.03, 0.05, 0.1, 0.3)
# Rounding error of a step in units of the target, since sums are added in another order.
_ROUNDING = 1e-9


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
        seconds: Time limit of HiGHS for one call of `solve`. After it, `solve` returns the best
            plan so far.

    Attributes:
        segments: The segments of the workload.
        in_time: True unless a call of HiGHS has reached the time limit.
    """

    def __init__(self, workload: Workload, seconds: float = 15.0) -> None:
        self.workload, self.segments, self._seconds = workload, Segments(workload), seconds
        self.in_time = True
        self._events = event_graph(
            workload.schedule, workload.stages, _needed_shares(workload), workload.extra_in_flight
        )
        # Events of one key take the same time, so vectors of event times have one entry per key:
        # the entry at the key's index.
        self._keys = {key: i for i, key in enumerate(sorted({e.key for e in self._events}))}
        # (predecessors, key index) of every event.
        self._graph = [(event.after, self._keys[event.key]) for event in self._events]
        # (key index, kind of work, replica) of every key, by stage.
        self._keys_of: list[list[tuple[int, Work, int]]] = [[] for _ in range(workload.stages)]
        for (work, replica, stage), index in self._keys.items():
            self._keys_of[stage].append((index, work, replica))
        # Event index of the last computation, by (replica, stage). A stage's step ends when the
        # stage's tail after this computation has passed.
        self._last = {
            (event.replica, event.stage): index
            for index, event in enumerate(self._events)
            if event.work in COMPUTING
        }

    def evaluate(self, stops: Sequence[int]) -> SplitChoice | None:
        """Return the plan whose stages stop before these layers, with its cheapest recomputation;
        None if it does not fit into memory."""
        chosen = []
        for stage, (first, stop) in enumerate(zip([0, *stops[:-1]], stops, strict=True)):
            segment = self.segments.segment(stage, first, stop)
            if segment is None:
                return None
            chosen.append(segment)
        return self._choice(chosen)

    def improve(self, stops: Sequence[int], start: SplitChoice) -> SplitChoice:
        """Return the plan after moving the boundaries of stages as long as the step gets shorter.

        Args:
            stops: `Segment.stop` of every stage of `start`.
            start: Plan to begin with.
        """
        best, current = start, list(stops)
        improved = True
        while improved:
            improved = False
            for moved in _neighbours(current, self.segments.num_layers):
                if self._bound(moved) >= best.seconds:
                    continue
                choice = self.evaluate(moved)
                # A smaller gain is only rounding.
                if choice is not None and choice.seconds < best.seconds * (1 - 1e-12):
                    best, current, improved = choice, moved, True
        return best

    def solve(self, target: float) -> SplitChoice | None:
        """Return the fastest plan whose step takes less than `target` seconds, to within the gap.

        It is None if no such plan was found, either because there is none or because of the time
        limit.

        Raises:
            SolverError: If HiGHS fails.
        """
        segments = self.segments.faster_than(target)
        if target <= 0 or not all(segments):
            return None
        columns = [segment for of_stage in segments for segment in of_stage]
        # With a single segment per stage there is nothing to choose.
        if len(columns) == len(segments):
            choice = self._choice(columns)
            return choice if choice.seconds < target else None
        return self._solve(columns, target)

    def _bound(self, stops: Sequence[int]) -> float:
        """Return a lower bound, in seconds, of the step of a split."""
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
        """Return the length of the longest path through the events, in seconds or in the unit of
        the arguments, and a function that finds this path.

        Args:
            seconds: Duration of the events of each key.
            tails: Tail of every (replica, stage), in the order of `_last`.
        """
        ends: list[float] = []
        for after, key in self._graph:
            end = seconds[key]
            if after:
                end += max([ends[index] for index in after])
            ends.append(end)
        total, last = max(
            (ends[index] + tail, position)
            for position, (index, tail) in enumerate(zip(self._last.values(), tails, strict=True))
        )

        def path() -> _Path:
            """Follow the predecessors that end last, back to the start of the step."""
            index = list(self._last.values())[last]
            counts = [0] * len(self._keys)
            while True:
                after, key = self._graph[index]
                counts[key] += 1
                if not after:
                    return _Path(tuple(counts), last)
                index = max(after, key=ends.__getitem__)

        return total, path

    def _solve(self, columns: list[Segment], target: float) -> SplitChoice | None:
        """Return the fastest plan with these segments, adding cuts until the program's step equals
        the simulator's.

        At first, segments may be chosen in part. This relaxed program is fast, and its step is a
        lower bound. Then whole segments are chosen, at first only among those that allow a step
        slightly longer than the bound. All steps are in units of the target.
        """
        master = MasterProblem(columns, self.workload.stages, self.segments.num_layers, target)
        costs, tails = self._matrix(columns) / target, self._tails(columns) / target
        deadline = monotonic() + self._seconds

        def time_left() -> float:
            return max(deadline - monotonic(), 0.0)

        def add_violated_cut(solution: Solution) -> bool:
            """Add the longest path as a cut, if the simulated step is longer than the solution's.

            Returns:
                Whether a cut was added.
            """
            chosen = solution.chosen
            length, path = self._longest((costs @ chosen).tolist(), (tails @ chosen).tolist())
            if length <= solution.step * (1 + _STEP_TOLERANCE):
                return False
            longest = path()
            master.add_cut(np.asarray(longest.counts) @ costs + tails[longest.last])
            return True

        relaxed = master.relax(time_left())
        while relaxed is not None and add_violated_cut(relaxed):
            relaxed = master.relax(time_left())
        self.in_time &= master.in_time
        if relaxed is None:
            return None
        bounds = master.bounds()
        best: SplitChoice | None = None
        for slack in (*_SLACKS, inf):
            step_limit = min(1.0, relaxed.step * (1 + slack))
            for _ in range(_MAX_CUTS):
                solution = master.minimise(
                    bounds <= step_limit + _ROUNDING, step_limit, time_left()
                )
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
                if not add_violated_cut(solution):
                    return best
            # A plan with a step above 1 is slower than the target.
            if step_limit >= 1.0:
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


def _needed_shares(workload: Workload) -> tuple[int, ...]:
    """Return the number of micro-batches of every replica, or 0 if it need not be simulated.

    That is the case if another replica has equal devices and links, and at least as many
    micro-batches.
    """
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


def _neighbours(stops: Sequence[int], num_layers: int) -> list[list[int]]:
    """Return the splits in which consecutive boundaries of stages are moved together by one or two
    layers, each as `Segment.stop` of every stage."""
    neighbours = []
    for boundary in range(len(stops) - 1):
        for shift in (-1, 1, -2, 2):
            for last in range(boundary, len(stops) - 1):
                moved = list(stops)
                for index in range(boundary, last + 1):
                    moved[index] += shift
                firsts = [0, *moved[:-1]]
                if (
                    all(a < b for a, b in zip(firsts, moved, strict=True))
                    and moved[-1] == num_layers
                ):
                    neighbours.append(moved)
    return neighbours
