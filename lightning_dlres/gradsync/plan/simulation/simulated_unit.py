"""One unit on one rank of a simulation, and the progress of its tasks."""

from __future__ import annotations

from lightning_dlres.gradsync.plan.task_table import TaskTable


class SimulatedUnit:
    """Progress of one unit on one rank.

    Args:
        rank: The rank.
        unit: Index of the unit in the plan.
        table: Its tasks; equal graphs share one table.

    Attributes:
        has_started: True once the gradient is ready; only then do its tasks begin.
        pending: Number of predecessors that are not done, for each task.
        unfinished: Number of tasks that are not done.
        early: Positions of the `RECEIVE` tasks whose payloads arrived before that.
    """

    __slots__ = ("early", "has_started", "pending", "rank", "table", "unfinished", "unit")

    def __init__(self, rank: int, unit: int, table: TaskTable) -> None:
        self.rank, self.unit, self.table = rank, unit, table
        self.has_started = False
        self.pending = list(table.pending)
        self.unfinished = len(table.graph)
        self.early: list[int] = []

    def finish(self, position: int) -> list[int]:
        """Mark a task as done; return the positions of the tasks that it makes ready."""
        self.unfinished -= 1
        return self.table.release(position, self.pending)


# A unit on a rank, and the position of a task in its graph.
UnitTask = tuple[SimulatedUnit, int]
