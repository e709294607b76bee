"""Naive simulator of gradient synchronisation without a coordinator, to test the fast one.

It has no event queue and no counters. At each time it looks through the tasks for those that are
ready, and through all messages for their shares of the links. The executor's own `WaitingSends`
decides how long payloads wait for others.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from lightning_dlres.gradsync.execute.transmitters import ReadySend, WaitingSends
from lightning_dlres.gradsync.plan.graph import SyncTask, TaskKind, topology
from lightning_dlres.gradsync.plan.simulation.simulator import SimulatedStep

# Time that is left of a task or a message counts as a rounding error up to these parts of the time
# since the last event, and of the current time.
_EVENT_ROUNDING, _CLOCK_ROUNDING = 1e-9, 1e-14

# Rank, unit, and position of a task.
Position = tuple[int, int, int]


@dataclass(eq=False)
class _Message:
    source: int
    destination: int
    # Unit and number of the `Part` of each payload.
    payloads: list[tuple[int, int]]
    # Seconds of work left on the sending and on the receiving link, and then on the way.
    sending: float
    receiving: float
    latency: float

    @property
    def has_left_links(self) -> bool:
        return not self.sending and not self.receiving


@dataclass
class _Rank:
    """Compute queue of a rank.

    Attributes:
        entries: Tasks that became ready together, for each entry of the queue.
        tasks: Tasks of the entry that was taken, and those that they made ready.
        running: Task that runs; None if there is none.
        left: Seconds that are left of it.
    """

    entries: list[list[Position]] = field(default_factory=list)
    tasks: list[Position] = field(default_factory=list)
    running: Position | None = None
    left: float = 0.0


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
        # Tasks that have become ready, receive tasks whose payloads have arrived, and the times at
        # which tasks were done.
        self.has_been_ready: set[Position] = set()
        self.received: set[Position] = set()
        self.done: dict[Position, float] = {}
        self.ranks = [_Rank() for _ in range(plan.world_size)]
        self.waiting = [WaitingSends(now=lambda: self.now) for _ in self.ranks]
        self.messages: list[_Message] = []
        # Time at which each unit starts on each rank, with rank and unit; the earliest one first.
        self.starts = sorted(
            (step.ready[rank][unit.gradient], rank, unit.index)
            for rank in range(plan.world_size)
            for unit in plan.units
        )
        self.started: set[tuple[int, int]] = set()

    def run(self) -> list[float]:
        while len(self.done) < len(self.tasks):
            self._advance()
        return [
            max(time for position, time in self.done.items() if position[0] == rank)
            for rank in range(self.step.plan.world_size)
        ]

    def _newly_ready(self, rank: int, units: Sequence[int]) -> list[Position]:
        """Return the tasks of units that are ready and in no queue yet."""
        ready = [
            position
            for unit in units
            for position, task in self.tasks.items()
            if position[:2] == (rank, unit)
            and position not in self.has_been_ready
            and task.kind is not TaskKind.RECEIVE
            and all((rank, unit, other) in self.done for other in task.after)
        ]
        # A message may have two payloads of a unit, which is then named twice.
        ready = list(dict.fromkeys(ready))
        self.has_been_ready.update(ready)
        return ready

    def _queue(self, rank: int, ready: Sequence[Position]) -> None:
        """Queue tasks that did not become ready in the compute thread."""
        sends = [p for p in ready if self.tasks[p].kind is TaskKind.SEND]
        computes = [p for p in ready if p not in sends]
        if computes:
            self.ranks[rank].entries.append(computes)
        self._send(rank, sends)

    def _send(self, rank: int, sends: Sequence[Position]) -> None:
        links = self.step.costs.links
        for peer in dict.fromkeys(self.tasks[position].peer for position in sends):
            assert peer is not None
            chosen = [position for position in sends if self.tasks[position].peer == peer]
            nbytes = sum(self.step.payload_bytes[unit] for _, unit, _ in chosen)
            work = [links.message_seconds + nbytes / links.bandwidths[end] for end in (rank, peer)]
            payloads = [(position[1], int(self.tasks[position].part)) for position in chosen]
            self.messages.append(_Message(rank, peer, payloads, *work, links.latency_seconds))
            self.done.update(dict.fromkeys(chosen, self.now))
            self._queue(rank, self._newly_ready(rank, [position[1] for position in chosen]))

    def _start(self, rank: int, unit: int) -> None:
        self.started.add((rank, unit))
        self._queue(rank, self._newly_ready(rank, [unit]))
        self._take_received(rank, [unit])

    def _take_received(self, rank: int, units: Sequence[int]) -> None:
        for position in self.received - self.done.keys():
            if position[0] == rank and position[1] in units and position[:2] in self.started:
                self.done[position] = self.now
        self._queue(rank, self._newly_ready(rank, [u for u in units if (rank, u) in self.started]))

    def _arrive(self, message: _Message) -> None:
        self.messages.remove(message)
        for position, task in self.tasks.items():
            if position[0] == message.destination and task.kind is TaskKind.RECEIVE:
                payload = position[1], int(task.part)
                if task.peer == message.source and payload in message.payloads:
                    self.received.add(position)
        self._take_received(message.destination, [unit for unit, _ in message.payloads])

    def _complete(self, rank: int) -> None:
        """Complete the running task of a rank."""
        queue, waiting = self.ranks[rank], self.waiting[rank]
        assert queue.running is not None
        self.done[queue.running] = self.now
        for position in self._newly_ready(rank, [queue.running[1]]):
            if self.tasks[position].kind is TaskKind.SEND:
                waiting.add(self._ready_send(position))
            else:
                queue.tasks.append(position)
        queue.running = None
        has_more = queue.entries or any(
            self.tasks[p].kind is not TaskKind.DECODE for p in queue.tasks
        )
        if waiting.is_full() or not has_more:
            self._send_waiting(rank)

    def _send_waiting(self, rank: int) -> None:
        items: list[Any] = self.waiting[rank].take()
        self._send(rank, [item.run.position for item in items])

    def _ready_send(self, position: Position) -> ReadySend:
        nbytes = self.step.payload_bytes[position[1]]
        # In the place of a UnitRun, with what `ReadySend` asks of it. Its graph has only this task.
        run: Any = SimpleNamespace(
            position=position, graph=(self.tasks[position],), payload_bytes=lambda part: nbytes
        )
        return ReadySend(run, 0)

    def _compute_seconds(self, position: Position) -> float:
        rank, index, _ = position
        unit, task = self.step.plan.units[index], self.tasks[position]
        is_own_merge = task.kind is TaskKind.MERGE and task.peer == rank
        codec = self.step.costs.codecs["raw" if is_own_merge else unit.codec]
        cost = {
            TaskKind.ENCODE: codec.encode,
            TaskKind.MERGE: codec.merge,
            TaskKind.DECODE: codec.decode,
        }[task.kind]
        assert self.step.slowdowns is not None
        return cost.seconds(unit.count) * self.step.slowdowns[rank]

    def _advance(self) -> None:
        """Go on to the next time at which something is complete, and complete it."""
        for queue in self.ranks:
            if queue.running is None:
                if not queue.tasks and queue.entries:
                    queue.tasks = queue.entries.pop(0)
                if queue.tasks:
                    queue.running = queue.tasks.pop(0)
                    queue.left = self._compute_seconds(queue.running)
        rates = self._rates()
        waits = [getattr(message, name) / rate for message, name, rate in rates]
        waits += [queue.left for queue in self.ranks if queue.running is not None]
        waits += [time - self.now for time, _, _ in self.starts[:1]]
        waits += [waiting.seconds_left() for waiting in self.waiting]
        passed = min(waits)
        self.now += passed
        rest = passed * _EVENT_ROUNDING + self.now * _CLOCK_ROUNDING
        for message, name, rate in rates:
            left = getattr(message, name) - passed * rate
            setattr(message, name, left if left > rest else 0.0)
        while self.starts and self.starts[0][0] <= self.now + rest:
            self._start(*self.starts.pop(0)[1:])
        for rank, queue in enumerate(self.ranks):
            if queue.running is not None:
                queue.left -= passed
                if queue.left <= rest:
                    self._complete(rank)
        for rank, waiting in enumerate(self.waiting):
            if waiting.seconds_left() <= rest:
                self._send_waiting(rank)
        for message in list(self.messages):
            if message.has_left_links and not message.latency:
                self._arrive(message)

    def _rates(self) -> list[tuple[_Message, str, float]]:
        """Return the work that is under way: message, name of its field with the seconds that are
        left, and seconds of work per second."""
        # Only the first message between two ranks is on the links.
        first: dict[tuple[int, int], _Message] = {}
        for message in self.messages:
            if not message.has_left_links:
                first.setdefault((message.source, message.destination), message)
        rates: list[tuple[_Message, str, float]] = []
        for rank in range(self.step.plan.world_size):
            sending = [m for m in first.values() if m.source == rank and m.sending]
            receiving = [m for m in first.values() if m.destination == rank and m.receiving]
            share = self.step.costs.links.incast_share if len(receiving) > 1 else 1.0
            rates += [(message, "sending", 1 / len(sending)) for message in sending]
            rates += [(message, "receiving", share / len(receiving)) for message in receiving]
        rates += [(message, "latency", 1.0) for message in self.messages if message.has_left_links]
        return rates


def naive_finish(step: SimulatedStep) -> list[float]:
    """Return the time at which each rank has finished, in seconds.

    Messages must be smaller than `MESSAGE_BYTES`, and the times of the gradients and tasks must
    differ: two events at one time have no certain order.
    """
    return _NaiveSimulation(step).run()
