"""Indices of a unit's task graph that an engine or a simulation needs in every step."""

from __future__ import annotations

from lightning_dlres.gradsync.plan.graph import Graph, TaskKind


class TaskTable:
    """A unit's graph on one rank, with its tasks by their role.

    Attributes:
        graph: The tasks.
        first: Positions of the compute tasks without predecessors.
        pending: Number of predecessors of each task.
        successors: Positions of the tasks that wait for each task.
        sends: Position of each `SEND` by destination and part.
        receives: Position of each `RECEIVE` by source and part.
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

    def release(self, position: int, pending: list[int]) -> list[int]:
        """Count a finished task off; return the positions of the tasks that it makes ready.

        Args:
            position: Position of the finished task.
            pending: Number of predecessors that are not done, for each task; updated in place.
        """
        ready = []
        for successor in self.successors[position]:
            pending[successor] -= 1
            if not pending[successor]:
                ready.append(successor)
        return ready


def _positions(graph: Graph, kind: TaskKind) -> dict[tuple[int, int], int]:
    return {
        (task.peer, int(task.part)): position
        for position, task in enumerate(graph)
        if task.kind is kind and task.peer is not None
    }
