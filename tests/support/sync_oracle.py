"""Naive simulator of gradient synchronisation without a coordinator, to test the fast one.

It has no event queue and no counters. At each time it looks through all tasks for those that are
ready, and through all messages for their shares of the links.
"""

from __future__ import annotations

from dataclasses import dataclass

from lightning_dlres.gradsync.plan.graph import SyncTask, TaskKind, topology
from lightning_dlres.gradsync.plan.simulation.simulator import SimulatedStep

# Differences of times below this are rounding.
_ROUNDING = 1e-9

# Rank, unit, and position of a task.
Position = tuple[int, int, int]


@dataclass(eq=False)
class _Message:
    source: int
    destination: int
    unit: int
    part: int
    # Seconds of work left on the sending and on the receiving link, and then on the way.
    sending: float
    receiving: float
    latency: float

    @property
    def pair(self) -> tuple[int, int]:
        return self.source, self.destination

    @property
    def is_carried(self) -> bool:
        return self.sending <= _ROUNDING and self.receiving <= _ROUNDING


class _NaiveSimulation:
    def __init__(self, step: SimulatedStep) -> None:
        self.step, self.now = step, 0.0
        plan, graph_of = step.plan, topology(step.plan.topology)
        self.tasks: dict[Position, SyncTask] = {
            (rank, unit.index, position): task
            for rank in range(plan.world_size)
            for unit in plan.units
            for position, task in enumerate(graph_of(rank, plan.world_size, unit.owner))
        }
        self.started: set[Position] = set()
        self.done: dict[Position, float] = {}
        # Tasks of each rank with the seconds left; the first one runs.
        self.queues: list[list[tuple[Position, float]]] = [[] for _ in range(plan.world_size)]
        self.messages: list[_Message] = []

    def finish(self) -> list[float]:
        while len(self.done) < len(self.tasks):
            while self._change():
                pass
            if len(self.done) < len(self.tasks):
                self._advance()
        return [
            max(time for position, time in self.done.items() if position[0] == rank)
            for rank in range(self.step.plan.world_size)
        ]

    def _change(self) -> bool:
        """Do all that takes no time; return True if anything has changed."""
        before = len(self.started), len(self.done)
        for queue in self.queues:
            while queue and queue[0][1] <= _ROUNDING:
                self.done[queue.pop(0)[0]] = self.now
        for message in list(self.messages):
            if message.is_carried and message.latency <= _ROUNDING:
                self.messages.remove(message)
                self._deliver(message)
        for position, task in self.tasks.items():
            rank, unit, _ = position
            ready = self.step.ready[rank][self.step.plan.units[unit].gradient]
            is_ready = all((rank, unit, other) in self.done for other in task.after)
            # A payload that was early counts from the start of its unit.
            if task.kind is TaskKind.RECEIVE:
                if position in self.started and ready <= self.now + _ROUNDING:
                    self.done.setdefault(position, self.now)
            elif position not in self.started and is_ready and ready <= self.now + _ROUNDING:
                self._begin(position, task)
        return (len(self.started), len(self.done)) != before

    def _begin(self, position: Position, task: SyncTask) -> None:
        rank, unit, _ = position
        self.started.add(position)
        if task.kind is not TaskKind.SEND:
            self.queues[rank].append((position, self._compute_seconds(position, task)))
            return
        assert task.peer is not None
        self.done[position] = self.now
        links, nbytes = self.step.costs.links, self.step.payload_bytes[unit]
        sending, receiving = (
            links.message_seconds + nbytes / links.bandwidths[end] for end in (rank, task.peer)
        )
        self.messages.append(
            _Message(
                rank, task.peer, unit, int(task.part), sending, receiving, links.latency_seconds
            )
        )

    def _compute_seconds(self, position: Position, task: SyncTask) -> float:
        rank, index, _ = position
        unit = self.step.plan.units[index]
        is_own_merge = task.kind is TaskKind.MERGE and task.peer == rank
        codec = self.step.costs.codecs["raw" if is_own_merge else unit.codec]
        cost = {
            TaskKind.ENCODE: codec.encode,
            TaskKind.MERGE: codec.merge,
            TaskKind.DECODE: codec.decode,
        }[task.kind]
        assert self.step.slowdowns is not None
        return cost.seconds(unit.count) * self.step.slowdowns[rank]

    def _deliver(self, message: _Message) -> None:
        for position, task in self.tasks.items():
            if position[:2] == (message.destination, message.unit):
                expected = (TaskKind.RECEIVE, message.source, message.part)
                if (task.kind, task.peer, int(task.part)) == expected:
                    self.started.add(position)

    def _advance(self) -> None:
        """Go on to the next time at which something is complete."""
        rates: list[tuple[_Message, str, float]] = []
        # Only the first message between two ranks is on the links.
        first: dict[tuple[int, int], _Message] = {}
        for message in self.messages:
            if not message.is_carried:
                first.setdefault(message.pair, message)
        for name, end in (("sending", "source"), ("receiving", "destination")):
            for rank in range(self.step.plan.world_size):
                shared = [
                    message
                    for message in first.values()
                    if getattr(message, end) == rank and getattr(message, name) > _ROUNDING
                ]
                rates += [(message, name, 1 / len(shared)) for message in shared]
        rates += [
            (message, "latency", 1.0)
            for message in self.messages
            if message.is_carried and message.latency > _ROUNDING
        ]
        waits = [getattr(message, name) / rate for message, name, rate in rates]
        waits += [queue[0][1] for queue in self.queues if queue]
        waits += [
            time - self.now
            for row in self.step.ready
            for time in row.values()
            if time > self.now + _ROUNDING
        ]
        passed = min(waits)
        for message, name, rate in rates:
            setattr(message, name, getattr(message, name) - passed * rate)
        for queue in self.queues:
            if queue:
                queue[0] = (queue[0][0], queue[0][1] - passed)
        self.now += passed


def naive_finish(step: SimulatedStep) -> list[float]:
    """Return the time at which each rank has finished, in seconds.

    Payloads that are ready at one time are messages of their own here, so the times of the
    gradients and tasks must differ.
    """
    return _NaiveSimulation(step).finish()
