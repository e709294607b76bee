"""Master problem of the integer program: the choice of segments, solved by HiGHS."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf

import highspy
import numpy as np
from highspy import HighsModelStatus, HighsVarType
from numpy.typing import NDArray

from lightning_dlres.core.errors import DlresError
from lightning_dlres.pipeline.plan.cost_model.footprint import Matrix
from lightning_dlres.pipeline.plan.search.segments import Segment

# Relative gap to the optimum at which the search stops.
GAP = 5e-4
# Results of HiGHS that the search handles; any other one is an error.
_EXPECTED_STATUSES = {
    HighsModelStatus.kOptimal,
    HighsModelStatus.kInfeasible,
    HighsModelStatus.kTimeLimit,
}


class SolverError(DlresError):
    """HiGHS failed for a reason other than an infeasible program or the time limit."""


@dataclass(frozen=True)
class Solution:
    """A solution of the program.

    Attributes:
        bound: Lower bound of the step of any solution, in units of the target.
        step: Step of this solution, in units of the target.
        chosen: Part of every segment that is chosen, from 0 to 1.
    """

    bound: float
    step: float
    chosen: Matrix


class MasterProblem:
    """Master problem of the decomposition, in HiGHS: one variable per segment, and the step.

    The step is in units of the target, and at most 1: a longer one would not beat the target. A cut
    requires that the step is no shorter than one path through the events. HiGHS keeps the relaxed
    program, in which segments may be chosen in part. So after a new cut it continues from the
    previous solution.

    Args:
        columns: The segments to choose from, in the order of stages.
        stages: Number of stages.
        layers: Number of layers of the model.
        target: Seconds of the step to beat.

    Attributes:
        in_time: True unless HiGHS has reached a time limit.
    """

    def __init__(self, columns: Sequence[Segment], stages: int, layers: int, target: float) -> None:
        self._num_columns, self._layers = len(columns), layers
        # (stage, first, stop) of every segment.
        self._spans = np.array([(c.stage, c.first, c.stop) for c in columns])
        # Each stage has one segment (row "stage"). Where a stage stops, the next one starts (row
        # "boundary", for every layer between two stages).
        rows: dict[tuple[str, int, int], list[tuple[int, float]]] = {}
        for index, column in enumerate(columns):
            rows.setdefault(("stage", column.stage, 0), []).append((index, 1.0))
            if column.stop < layers:
                rows.setdefault(("boundary", column.stage, column.stop), []).append((index, 1.0))
            if column.first > 0:
                key = ("boundary", column.stage - 1, column.first)
                rows.setdefault(key, []).append((index, -1.0))
        self.in_time = True
        self._highs = highspy.Highs()
        self._highs.setOptionValue("output_flag", False)
        # Indices of all variables in HiGHS: the segments, then the step.
        self._all_variables = np.arange(self._num_columns + 1, dtype=np.int32)
        self._highs.addVars(
            len(self._all_variables),
            np.zeros(len(self._all_variables)),
            np.ones(len(self._all_variables)),
        )
        self._highs.changeColCost(self._num_columns, 1.0)
        for (kind, _, _), terms in rows.items():
            total = 1.0 if kind == "stage" else 0.0
            indices, values = zip(*terms, strict=True)
            self._highs.addRow(total, total, len(terms), np.array(indices), np.array(values))
        # Number of rows before those of the cuts.
        self._num_structure_rows = len(rows)
        # One row per cut: length of its path for each segment, in units of the target.
        self._cuts = np.zeros((0, self._num_columns))
        # Dual value of every cut in the relaxed program; see `bounds`.
        self._weights = np.zeros(0)
        # The lower bounds of the segments are the first cuts.
        for stage in range(stages):
            self.add_cut(np.array([c.bound / target if c.stage == stage else 0.0 for c in columns]))

    def add_cut(self, path: Matrix) -> None:
        """Require that the step is no shorter than a path.

        Args:
            path: Length of the path for each segment, in units of the target.
        """
        self._cuts = np.vstack([self._cuts, path])
        self._highs.addRow(
            0.0, inf, len(self._all_variables), self._all_variables, np.append(-path, 1.0)
        )

    def relax(self, seconds: float) -> Solution | None:
        """Return the shortest step if segments may be chosen in part.

        It is None if there is no solution, or none was found within this time.
        """
        # HiGHS counts the time limit of a linear program from its first run.
        status = self._run(self._highs, self._highs.getRunTime() + seconds)
        if status != HighsModelStatus.kOptimal:
            return None
        duals = np.array(self._highs.getSolution().row_dual)[self._num_structure_rows :]
        self._weights = np.maximum(duals, 0.0)
        return self._solution(self._highs, self._highs.getInfo().objective_function_value)

    def minimise(
        self, allowed: NDArray[np.bool_], step_limit: float, seconds: float
    ) -> Solution | None:
        """Return the shortest step with whole segments, to within the gap.

        It is None if there is no step within the limit, or none was found within this time.

        Args:
            allowed: Mask of the segments that may be chosen.
            step_limit: Largest step, in units of the target.
            seconds: Time limit of HiGHS.
        """
        integer_program = highspy.Highs()
        integer_program.setOptionValue("output_flag", False)
        integer_program.passModel(self._highs.getModel())
        # Smaller than `GAP`, so that a solution's bound can prove that its plan is within `GAP`.
        integer_program.setOptionValue("mip_rel_gap", GAP / 4)
        integrality = np.full(len(self._all_variables), int(HighsVarType.kInteger), dtype=np.uint8)
        integrality[-1] = int(HighsVarType.kContinuous)
        integer_program.changeColsIntegrality(
            len(self._all_variables), self._all_variables, integrality
        )
        upper_bounds = np.append(allowed.astype(float), step_limit)
        integer_program.changeColsBounds(
            len(self._all_variables),
            self._all_variables,
            np.zeros(len(self._all_variables)),
            upper_bounds,
        )
        self._run(integer_program, seconds)
        info = integer_program.getInfo()
        if info.primal_solution_status != highspy.SolutionStatus.kSolutionStatusFeasible:
            return None
        return self._solution(integer_program, info.mip_dual_bound)

    def bounds(self) -> Matrix:
        """Return for every segment a lower bound of the step of all plans that contain it.

        No step is shorter than a weighted mean of the cuts. The dual values of the relaxed program
        are the weights with the largest mean. The mean is a sum over the chosen segments. So its
        minimum with a given segment is the shortest path through this segment, from the first layer
        to the last.

        Returns:
            The bounds, in units of the target.
        """
        if not self._weights.sum():
            return np.zeros(self._num_columns)
        stage, first, stop = self._spans.T
        # Length of every segment in the mean.
        length = (self._weights / self._weights.sum()) @ self._cuts
        # Lengths of shortest paths, by (stage, layer). A path of `before` leads to the start of the
        # stage at the layer; a path of `after` leads from there to the end.
        before = np.full((stage[-1] + 2, self._layers + 1), np.inf)
        after = before.copy()
        before[0, 0] = after[-1, -1] = 0.0
        for s in range(len(before) - 1):
            own = stage == s
            np.minimum.at(before[s + 1], stop[own], before[s, first[own]] + length[own])
        for s in reversed(range(len(before) - 1)):
            own = stage == s
            np.minimum.at(after[s], first[own], after[s + 1, stop[own]] + length[own])
        bounds: Matrix = before[stage, first] + length + after[stage + 1, stop]
        return bounds

    def _run(self, highs: highspy.Highs, time_limit: float) -> HighsModelStatus:
        """Run HiGHS, with a time limit in seconds; return its status.

        Raises:
            SolverError: If HiGHS fails.
        """
        highs.setOptionValue("time_limit", time_limit)
        highs.run()
        status = highs.getModelStatus()
        self.in_time &= status != HighsModelStatus.kTimeLimit
        if status not in _EXPECTED_STATUSES:
            raise SolverError(
                "HiGHS must find a split, prove that there is none, or reach its time limit, got "
                f"status {highs.modelStatusToString(status)!r}. Give HeteroPipeStrategy a plan of "
                "your own with plan=..."
            )
        return status

    def _solution(self, highs: highspy.Highs, bound: float) -> Solution:
        """Return the solution of the last run, with a lower bound of the step."""
        chosen = np.array(highs.getSolution().col_value)[: self._num_columns]
        return Solution(bound, highs.getInfo().objective_function_value, chosen)
