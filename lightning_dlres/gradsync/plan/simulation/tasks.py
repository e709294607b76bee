"""Task graphs of units in the form that the simulation reads, and the units' progress."""

from __future__ import annotations

from lightning_dlres.gradsync.plan.graph import Graph, TaskKind


class TaskTable:
    """A unit's graph with its tasks' successors; equal graphs share one table.

    Attributes:
        graph: The tasks.
        first: Positions of the compute tasks without predecessors.
        pending: Number of predecessors of each task.
        successors: Positions of the tasks after each task.
        sends: Position of each `SEND` by peer and number of the part.
        receives: Position of each `RECEIVE` by peer and number of the part.
    """

    __slots__ = ("first", "graph", "pending", "receives", "sends", "successors")

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.pending = tuple(len(task.after) for task in graph)
        self.first = tuple(
            position
            for position, task in enumerate(graph)
            if not task.after and not task.kind.is_transfer
        )
        successors: list[list[int]] = [[] for _ in graph]
        for position, task in enumerate(graph):
            for before in task.after:
                successors[before].append(position)
        self.successors = tuple(map(tuple, successors))
        self.sends = _positions(graph, TaskKind.SEND)
        self.receives = _positions(graph, TaskKind.RECEIVE)


class SimulatedUnit:
    """Progress of one unit on one rank.

    Args:
        rank: The rank.
        unit: Number of the unit.
        table: Its tasks.

    Attributes:
        has_started: True if the gradient is ready.
        pending: Number of predecessors that are not done, for each task.
        unfinished: Number of tasks that are not done.
        early: Positions of the `RECEIVE` tasks whose payloads arrived before the start.
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
        ready = []
        for successor in self.table.successors[position]:
            self.pending[successor] -= 1
            if not self.pending[successor]:
                ready.append(successor)
        return ready


# A unit on a rank, and the position of a task in its graph.
UnitTask = tuple[SimulatedUnit, int]


def _positions(graph: Graph, kind: TaskKind) -> dict[tuple[int, int], int]:
    return {
        (task.peer, int(task.part)): position
        for position, task in enumerate(graph)
        if task.kind is kind and task.peer is not None
    }
