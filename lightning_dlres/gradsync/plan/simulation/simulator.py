"""Simulator of one step of gradient synchronisation: the executor's own graphs in virtual time.

A rank has a queue of compute tasks with one thread, and a link with two directions. Tasks become
ready by the rules of the executor: a task enters its queue when its predecessors are done, a send
is done when its message is handed to the link, and a receive when the message has arrived. Tasks
that become ready together are one entry of the queue, and the thread does those that they make
ready before the next entry. The simulation is deterministic.

It leaves out time that a thread waits for a processor, and the coordinator's bytes on the links.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Literal

from lightning_dlres.core.checks import one_of
from lightning_dlres.core.errors import ConfigError, got_expected
from lightning_dlres.gradsync.plan.costs import SyncCosts
from lightning_dlres.gradsync.plan.graph import Graph, TaskKind, topology
from lightning_dlres.gradsync.plan.lone_unit import UnitCosts
from lightning_dlres.gradsync.plan.plan import RAW, SyncPlan
from lightning_dlres.gradsync.plan.simulation.clock import VirtualClock
from lightning_dlres.gradsync.plan.simulation.links import MessageInFlight, SharedLinks
from lightning_dlres.gradsync.plan.simulation.result import SimulatedSpan, SimulatedSync
from lightning_dlres.gradsync.plan.simulation.sending import (
    CoordinatedSending,
    CoordinatorCosts,
    DirectSending,
    HeldTransfers,
    ReplayedSending,
    SendingRule,
)
from lightning_dlres.gradsync.plan.simulation.simulated_unit import SimulatedUnit, UnitTask
from lightning_dlres.gradsync.plan.task_table import TaskTable
from lightning_dlres.gradsync.plan.transmissions import Transfer, Transmission

Coordinator = Literal["always", "replay", "none"]
# Only one step is simulated.
_STEP = 0


@dataclass(frozen=True, kw_only=True)
class SimulatedStep:
    """Inputs of a simulated step.

    Attributes:
        plan: Plan of the synchronisation.
        costs: Measured costs.
        payload_bytes: Bytes of a payload of each unit.
        ready: For each rank, the time in seconds at which each gradient is ready, by name.
            Gradients of one time are started together, in the order of the mapping.
        slowdowns: For each rank, the factor of its compute tasks' times; None: 1 for all.
        coordinator_costs: Times of the coordinator, if it is asked.
    """

    plan: SyncPlan
    costs: SyncCosts
    payload_bytes: Sequence[int]
    ready: Sequence[Mapping[str, float]]
    slowdowns: Sequence[float] | None = None
    coordinator_costs: CoordinatorCosts = field(default_factory=CoordinatorCosts)

    def __post_init__(self) -> None:
        """Check the inputs.

        Raises:
            ConfigError: If an input does not fit the plan.
        """
        plan, size = self.plan, self.plan.world_size
        if plan.hosts:
            rule = "one in which each rank synchronises by itself"
            raise ConfigError(f"plan must be {rule}, got {plan.hosts}. Simulate the leaders' plan.")
        topology(plan.topology)
        if len(self.payload_bytes) != len(plan.units):
            rule = f"one size for each of the plan's {len(plan.units)} units"
            raise ConfigError(
                got_expected("payload_bytes", list(self.payload_bytes), rule, "[65536] for one")
            )
        gradients = {unit.gradient for unit in plan.units}
        if len(self.ready) != size or any(times.keys() != gradients for times in self.ready):
            rule = f"the times of the plan's {len(gradients)} gradients for each of {size} ranks"
            raise ConfigError(got_expected("ready", list(self.ready), rule, "[{'w': 0.0}] * 2"))
        bandwidths = self.costs.links.bandwidths
        if len(bandwidths) != size or min(bandwidths) <= 0:
            rule = f"a positive number for each of {size} ranks"
            raise ConfigError(got_expected("bandwidths", bandwidths, rule, "(25e6, 25e6)"))
        slowdowns = self.slowdowns
        if slowdowns is not None and (len(slowdowns) != size or min(slowdowns) <= 0):
            rule = f"a positive factor for each of {size} ranks"
            raise ConfigError(got_expected("slowdowns", slowdowns, rule, "(1.0, 2.0)"))
        missing = {unit.codec for unit in plan.units} - self.costs.codecs.keys()
        if missing:
            rule = f"costs of all codecs of the plan, {sorted(missing)} included"
            raise ConfigError(got_expected("codecs", sorted(self.costs.codecs), rule, "'raw' too"))


def simulate(
    step: SimulatedStep, *, coordinator: Coordinator = "none", is_traced: bool = False
) -> SimulatedSync:
    """Return the times of a step.

    Args:
        step: Plan, costs, and times of the gradients.
        coordinator: "always" asks the coordinator when to send each payload; "replay" repeats the
            order that it planned in an equal step before; "none" asks none.
        is_traced: True keeps the spans of all tasks and messages.

    Raises:
        ConfigError: If `coordinator` is another word.
    """
    one_of("coordinator", coordinator, ("always", "replay", "none"), "coordinator='none'")
    order = simulate(step, coordinator="always").order if coordinator == "replay" else None
    return _Simulation(step, is_traced).run(coordinator, order)


class _ComputeThread:
    """Queue of a rank's compute tasks, and the thread's own tasks and payloads.

    Attributes:
        entries: Tasks that became ready together, for each entry of the queue.
        tasks: Tasks of the entry that the thread has taken, and those that they made ready.
        sends: Payloads that the thread has not given to the thread of transfers.
        is_busy: True while a task runs.
    """

    __slots__ = ("entries", "is_busy", "sends", "tasks")

    def __init__(self, message_bytes: int) -> None:
        self.entries: deque[list[UnitTask]] = deque()
        self.tasks: deque[UnitTask] = deque()
        self.sends = HeldTransfers(message_bytes)
        self.is_busy = False


class _Simulation:
    """State of one simulation."""

    def __init__(self, step: SimulatedStep, is_traced: bool) -> None:
        plan = step.plan
        self._step, self._graph_of = step, topology(plan.topology)
        self._clock = VirtualClock()
        self._spans: list[SimulatedSpan] | None = [] if is_traced else None
        self._links = SharedLinks(
            self._clock,
            step.costs.links,
            self._arrive,
            self._trace_message if is_traced else None,
        )
        self._rule: SendingRule
        self._order: list[Transmission] = []
        # Tasks by graph, and by rank and owner.
        self._tables: dict[Graph, TaskTable] = {}
        self._table_of: dict[tuple[int, int], TaskTable] = {}
        self._units: list[dict[int, SimulatedUnit]] = [{} for _ in range(plan.world_size)]
        self._unfinished = [len(plan.units)] * plan.world_size
        self._slowdowns = step.slowdowns or [1.0] * plan.world_size
        self._unit_costs = [
            _unit_costs(step.costs, unit.codec, unit.count, nbytes)
            for unit, nbytes in zip(plan.units, step.payload_bytes, strict=True)
        ]
        self._threads = [_ComputeThread(plan.message_bytes) for _ in range(plan.world_size)]
        self._compute_busy = [0.0] * plan.world_size
        self._finish = [max(times.values(), default=0.0) for times in step.ready]
        # Payloads that have become ready at this time, by rank.
        self._ready: dict[int, list[Transfer]] = defaultdict(list)

    def run(self, coordinator: Coordinator, order: Sequence[Transmission] | None) -> SimulatedSync:
        """Run the step; `order` has the messages to repeat."""
        coordinated = None
        if order is not None:
            self._rule = ReplayedSending(order, self._hand_over)
        elif coordinator == "always":
            coordinated = CoordinatedSending(
                self._clock,
                self._step.coordinator_costs,
                self._hand_over,
                self._step.plan.message_bytes,
            )
            self._rule = coordinated
        else:
            self._rule = DirectSending(self._hand_over, self._step.plan.message_bytes)
        backward_ends = list(self._finish)
        self._schedule_starts()
        while self._clock.run_instant():
            while self._ready:
                ready, self._ready = self._ready, defaultdict(list)
                for rank, transfers in ready.items():
                    self._rule.take(rank, transfers)
            self._links.plan_completions()
        waiting = [rank for rank, count in enumerate(self._unfinished) if count]
        if waiting:
            raise RuntimeError(f"The simulated step deadlocks: ranks {waiting} have open units.")
        return SimulatedSync(
            finish=tuple(self._finish),
            exposed=tuple(
                finish - end for finish, end in zip(self._finish, backward_ends, strict=True)
            ),
            compute_busy=tuple(self._compute_busy),
            sending_busy=self._links.sending_seconds,
            receiving_busy=self._links.receiving_seconds,
            messages=self._links.messages,
            reports=coordinated.reports if coordinated is not None else 0,
            order=tuple(self._order if coordinated is None else coordinated.log),
            spans=tuple(sorted(self._spans or (), key=lambda span: (span.end, span.start))),
        )

    def _schedule_starts(self) -> None:
        units = defaultdict(list)
        for unit in self._step.plan.units:
            units[unit.gradient].append(unit.index)
        for rank, times in enumerate(self._step.ready):
            in_order = sorted(times, key=times.__getitem__)
            for time, names in groupby(in_order, key=times.__getitem__):
                indices = [index for name in names for index in units[name]]
                self._clock.at(time, self._start, (rank, indices))

    def _start(self, started: tuple[int, list[int]]) -> None:
        """Start units whose gradients are ready, then deliver what has arrived before."""
        rank, indices = started
        units = [self._unit(rank, index) for index in indices]
        for unit in units:
            unit.has_started = True
        self._enqueue(rank, [(unit, position) for unit in units for position in unit.table.first])
        early = [(unit, position) for unit in units for position in unit.early]
        self._enqueue(rank, self._finish_tasks(rank, early))

    def _unit(self, rank: int, index: int) -> SimulatedUnit:
        """Return a unit of a rank, which is made at its start or with its first payload."""
        unit = self._units[rank].get(index)
        if unit is None:
            table = self._table(rank, self._step.plan.units[index].owner)
            unit = self._units[rank][index] = SimulatedUnit(rank, index, table)
        return unit

    def _table(self, rank: int, owner: int) -> TaskTable:
        """Return the tasks of a rank. Ranks with equal graphs share one table."""
        table = self._table_of.get((rank, owner))
        if table is None:
            graph = self._graph_of(rank, self._step.plan.world_size, owner)
            table = self._tables.get(graph)
            if table is None:
                table = self._tables[graph] = TaskTable(graph)
            self._table_of[rank, owner] = table
        return table

    def _enqueue(self, rank: int, ready: Sequence[UnitTask]) -> None:
        """Add tasks to the queues of their kinds."""
        computes = []
        for task in ready:
            if _is_send(task):
                self._ready[rank].append(self._transfer(task))
            else:
                computes.append(task)
        if computes:
            thread = self._threads[rank]
            thread.entries.append(computes)
            if not thread.is_busy:
                self._run_next(rank)

    def _transfer(self, task: UnitTask) -> Transfer:
        unit, position = task
        send = unit.table.graph[position]
        assert send.peer is not None
        nbytes = self._step.payload_bytes[unit.unit]
        return Transfer(unit.rank, send.peer, (_STEP, unit.unit, int(send.part)), nbytes)

    def _run_next(self, rank: int) -> None:
        """Start the next task of a rank's compute thread, if there is one."""
        thread = self._threads[rank]
        if not thread.tasks and thread.entries:
            thread.tasks.extend(thread.entries.popleft())
        thread.is_busy = bool(thread.tasks)
        if not thread.is_busy:
            return
        unit, position = thread.tasks.popleft()
        task, now = unit.table.graph[position], self._clock.now
        seconds = self._unit_costs[unit.unit].seconds_of(task, rank) * self._slowdowns[rank]
        self._compute_busy[rank] += seconds
        if self._spans is not None:
            payload = unit.unit, int(task.part)
            self._spans.append(
                SimulatedSpan(rank, task.kind.value, now, now + seconds, (payload,), task.peer)
            )
        self._clock.at(now + seconds, self._compute_done, (unit, position))

    def _compute_done(self, task: UnitTask) -> None:
        """Keep the tasks that a task makes ready for this thread, and its sends while they wait."""
        rank = task[0].rank
        thread = self._threads[rank]
        for ready in self._finish_tasks(rank, [task]):
            if _is_send(ready):
                if thread.sends.add(self._transfer(ready), self._clock.now):
                    self._clock.at(thread.sends.due_time, self._send_due, rank)
            else:
                thread.tasks.append(ready)
        has_more = thread.entries or any(map(_leads_to_sends, thread.tasks))
        if thread.sends.is_full() or not has_more:
            self._send_waiting(rank)
        self._run_next(rank)

    def _send_due(self, rank: int) -> None:
        """Send the waiting payloads of a rank, unless they have left and others wait now."""
        if self._clock.now >= self._threads[rank].sends.due_time:
            self._send_waiting(rank)

    def _send_waiting(self, rank: int) -> None:
        if sends := self._threads[rank].sends.take():
            self._ready[rank] += sends

    def _finish_tasks(self, rank: int, tasks: Iterable[UnitTask]) -> list[UnitTask]:
        """Mark tasks of a rank as done; return those that they make ready."""
        ready: list[UnitTask] = []
        for unit, position in tasks:
            ready += [(unit, successor) for successor in unit.finish(position)]
            if not unit.unfinished:
                del self._units[rank][unit.unit]
                self._unfinished[rank] -= 1
                if not self._unfinished[rank]:
                    self._finish[rank] = self._clock.now
        return ready

    def _hand_over(self, message: Transmission) -> None:
        """Send a message; its send tasks are done."""
        self._order.append(message)
        source, destination = message.source, message.destination
        nbytes = sum(self._step.payload_bytes[index] for _, index, _ in message.entries)
        self._links.send(MessageInFlight(source, destination, message.entries, nbytes))
        units = self._units[source]
        tasks = [
            (units[index], units[index].table.sends[destination, part])
            for _, index, part in message.entries
        ]
        self._enqueue(source, self._finish_tasks(source, tasks))

    def _arrive(self, message: MessageInFlight) -> None:
        """Deliver a message; payloads of units that have not started wait for their start."""
        rank, tasks = message.destination, []
        for _, index, part in message.entries:
            unit = self._unit(rank, index)
            position = unit.table.receives[message.source, part]
            if unit.has_started:
                tasks.append((unit, position))
            else:
                unit.early.append(position)
        self._enqueue(rank, self._finish_tasks(rank, tasks))
        self._rule.arrived(message)

    def _trace_message(self, message: MessageInFlight, is_sending: bool) -> None:
        assert self._spans is not None
        rank, peer = message.source, message.destination
        if not is_sending:
            rank, peer = peer, rank
        self._spans.append(
            SimulatedSpan(
                rank,
                "send" if is_sending else "receive",
                message.started,
                self._clock.now,
                tuple((index, part) for _, index, part in message.entries),
                peer,
            )
        )


def _leads_to_sends(task: UnitTask) -> bool:
    unit, position = task
    return unit.table.graph[position].kind.leads_to_sends


def _is_send(task: UnitTask) -> bool:
    unit, position = task
    return unit.table.graph[position].kind is TaskKind.SEND


def _unit_costs(costs: SyncCosts, codec: str, count: int, nbytes: int) -> UnitCosts:
    """Return the costs of a unit's tasks. A rank's own gradient is merged without decoding."""
    codec_costs = costs.codecs[codec]
    own = costs.codecs.get(RAW, codec_costs)
    return UnitCosts(
        encode=codec_costs.encode.seconds(count),
        merge=codec_costs.merge.seconds(count),
        own_merge=own.merge.seconds(count),
        decode=codec_costs.decode.seconds(count),
        nbytes=nbytes,
    )
