"""Executor of one rank: a queue for compute tasks, one for transfer tasks, and a thread for each.

A unit's tasks follow its graph. When a task is done, its successors with no other open predecessor
go to the queue of their kind. So the encoding of one unit overlaps with the transfer of another
one, and no task waits inside another task.
"""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch

from lightning_dlres.core.comm.mailbox import Channel, Item, Mailbox
from lightning_dlres.core.device.stream_beside import DeviceStream, stream_beside
from lightning_dlres.core.errors import PeerError, PeerTimeoutError, ProtocolError, announcement
from lightning_dlres.core.trace import Tracer
from lightning_dlres.core.units import format_seconds
from lightning_dlres.gradsync.execute.coordination import CoordinatorLink
from lightning_dlres.gradsync.execute.messages import (
    FAILURE_KEY,
    Payload,
    content_of,
    message_of,
    payloads_of,
)
from lightning_dlres.gradsync.execute.transmitters import (
    CoordinatedTransmitter,
    DirectTransmitter,
    ReadySend,
    StepStart,
    TransferItem,
    Transmitter,
    WaitingSends,
    sizes_of,
)
from lightning_dlres.gradsync.execute.unit_run import UnitRun
from lightning_dlres.gradsync.plan.graph import Part, TaskKind
from lightning_dlres.gradsync.plan.transmissions import MESSAGE_BYTES

# Seconds between two checks for lost ranks and deadlines.
_POLL_SECONDS = 0.05
_KEY = ("gradients",)
# A unit in its step, and the position of a task in its graph.
Task = tuple[UnitRun, int]


@dataclass
class _Group:
    """Units that are waited for together, such as those of one bucket."""

    unfinished: int
    started: float
    on_done: Callable[[BaseException | None], None]


@dataclass
class _Step:
    """Units of one step, and payloads that arrived before their unit was started."""

    runs: dict[int, UnitRun] = field(default_factory=dict)
    early: dict[int, list[tuple[int, Payload]]] = field(default_factory=lambda: defaultdict(list))


class SyncExecutor:
    """Runs the task graphs of one rank.

    Public methods may be called from any thread.

    Args:
        mailbox: Messages to the other ranks.
        tracer: Gets a span for each task.
        expected: Unit and part of the payloads that each other rank sends to this one in a step.
        destinations: Ranks that this one sends to.
        coordinator: Link to the coordinator, which decides when a payload is sent. None sends
            payloads within milliseconds after they are ready.
        replay_from: First step that repeats the plan of the step before; None for no step.
        message_bytes: Size in bytes at which a message takes no more payloads.

    Attributes:
        failure: Error that ended the work; None while there is none.
    """

    def __init__(
        self,
        mailbox: Mailbox,
        tracer: Tracer,
        *,
        expected: Mapping[int, Collection[tuple[int, Part]]],
        destinations: Collection[int],
        coordinator: CoordinatorLink | None = None,
        replay_from: int | None = None,
        message_bytes: int = MESSAGE_BYTES,
    ) -> None:
        self.failure: BaseException | None = None
        self._mailbox, self._tracer = mailbox, tracer
        self._rank, self._names = mailbox.rank, mailbox.names
        self._expected = {peer: frozenset(payloads) for peer, payloads in expected.items()}
        # Tasks and items that become ready together have one entry, which wakes the thread once.
        self._computes: queue.SimpleQueue[Sequence[Task] | None] = queue.SimpleQueue()
        self._transfers: queue.SimpleQueue[Sequence[TransferItem] | None] = queue.SimpleQueue()
        self._waiting = WaitingSends(message_bytes)
        self._next_check = 0.0
        # Stream of the gradients' device, from the first gradients on.
        self._stream: DeviceStream | None = None
        # Guards the fields below and the counters of all units.
        self._lock = threading.Lock()
        self._steps: dict[int, _Step] = defaultdict(_Step)
        self._groups: dict[UnitRun, _Group] = {}
        # Last step in which each unit was finished.
        self._finished: dict[int, int] = {}
        self._threads = [
            threading.Thread(target=self._guarded, args=(loop,), name=name, daemon=True)
            for loop, name in (
                (self._compute, "dlres-sync-compute"),
                (self._transfer, "dlres-sync-transfer"),
            )
        ]
        # Ranks and channels to which a failure of this rank is announced.
        self._announced = [(peer, Channel.GRADIENT_SYNC) for peer in destinations]
        self._transmitter: Transmitter = DirectTransmitter(message_bytes)
        if coordinator is not None:
            self._transmitter = CoordinatedTransmitter(self._rank, coordinator, replay_from)
            self._announced += coordinator.open(
                lambda plan: self._transfers.put([plan]), self.fail, message_bytes
            )
        for peer in destinations:
            mailbox.connect(peer, Channel.GRADIENT_SYNC)
        for peer in expected:
            mailbox.subscribe(peer, Channel.GRADIENT_SYNC, self._receiver(peer))
        for thread in self._threads:
            thread.start()

    def start(
        self, step: int, runs: Sequence[UnitRun], on_done: Callable[[BaseException | None], None]
    ) -> None:
        """Start units whose gradients are ready.

        Args:
            step: Number of the step, the same on all ranks.
            runs: The units. The calling thread has launched the work that makes their gradients.
            on_done: Called once, from a thread of the executor, when all of them are done: with
                None, or with the error that ended the work. On a GPU, "done" means launched: the
                work that the callback launches, and events that it records, come after the units'.
        """
        group = _Group(len(runs), time.monotonic(), self._in_stream(on_done))
        if runs:
            stream = self._stream_of(runs[0].device)
            mark = stream.mark()
            for run in runs:
                run.ready_mark = mark
                stream.keep(run.gradient)
        arrived: list[tuple[UnitRun, int, Payload]] = []
        with self._lock:
            failure = self.failure
            if failure is None:
                current = self._steps[step]
                for run in runs:
                    current.runs[run.unit.index] = run
                    self._groups[run] = group
                    for peer, payload in current.early.pop(run.unit.index, []):
                        arrived.append((run, peer, payload))
        if failure is not None or not runs:
            on_done(failure)
            return
        # Wakes the thread of transfers, which watches the deadline, also if this rank has nothing
        # to send yet.
        self._transfers.put([StepStart(step)])
        self._computes.put([(run, position) for run in runs for position in run.tasks.first])
        try:
            self._enqueue(self._finish([self._deliver(*entry) for entry in arrived]))
        except ProtocolError as error:
            self.fail(error)

    def _stream_of(self, device: torch.device) -> DeviceStream:
        """Return the stream of all gradients; they are on one device."""
        if self._stream is None:
            self._stream = stream_beside(device)
        return self._stream

    def _in_stream(
        self, on_done: Callable[[BaseException | None], None]
    ) -> Callable[[BaseException | None], None]:
        """Return a function that calls `on_done` in the stream of the gradients' last work."""

        def done(error: BaseException | None) -> None:
            with nullcontext() if self._stream is None else self._stream.working():
                on_done(error)

        return done

    def fail(self, error: BaseException) -> None:
        """End all work with an error, and tell it to other ranks; only the first error counts."""
        with self._lock:
            if self.failure is not None:
                return
            self.failure = error
            groups = {id(group): group for group in self._groups.values()}
            self._groups.clear()
            self._steps.clear()
        # Announce before the callbacks, because a callback may close the mailbox.
        self._announce(error)
        for group in groups.values():
            group.on_done(error)

    def mark(self) -> Any:
        """Return a mark after the work of the units. Call it only in `on_done` of `start`."""
        return None if self._stream is None else self._stream.mark()

    def wait_for(self, mark: Any) -> None:
        """Let the calling thread's later work on the device wait for the work before a mark."""
        if self._stream is not None:
            self._stream.wait(mark)

    def close(self) -> None:
        """End the threads; unfinished units stay unfinished."""
        self._announced.clear()
        self._computes.put(None)
        self._transfers.put(None)
        for thread in self._threads:
            thread.join()

    def _announce(self, error: BaseException) -> None:
        """Tell other ranks why this one sends nothing more; they would wait until the deadline, and
        then name this rank instead of the one at fault."""
        text = announcement(self._names[self._rank], error)
        for peer, channel in self._announced:
            with contextlib.suppress(PeerError):
                self._mailbox.send(peer, channel, FAILURE_KEY, text)

    def _guarded(self, loop: Callable[[], None]) -> None:
        try:
            loop()
        except BaseException as error:
            # Any error, also SystemExit in a codec: the training would wait for a thread that has
            # ended.
            self.fail(error)

    def _compute(self) -> None:
        while (entry := self._computes.get()) is not None:
            tasks = deque(entry)
            while tasks:
                run, position = tasks.popleft()
                task = run.graph[position]
                stream = self._stream_of(run.device)
                with (
                    self._tracer.span(task.kind.value, "compute", unit=run.unit.index),
                    stream.working(),
                ):
                    stream.wait(run.ready_mark)
                    run.compute(task)
                is_first = False
                for ready in self._finish([(run, position)]):
                    if _is_send(ready):
                        is_first |= self._waiting.add(ReadySend(*ready))
                    else:
                        tasks.append(ready)
                has_more = not self._computes.empty() or any(map(_leads_to_sends, tasks))
                if self._waiting.is_full() or not has_more:
                    self._send_waiting()
                elif is_first:
                    # An empty entry: from now on the thread of transfers watches the time.
                    self._transfers.put([])
            # An entry without tasks may come last.
            if self._computes.empty():
                self._send_waiting()

    def _send_waiting(self) -> None:
        """Give the waiting payloads to the thread of transfers."""
        if sends := self._waiting.take():
            self._transfers.put(sends)

    def _transfer(self) -> None:
        while True:
            items: list[TransferItem] = []
            # Take everything that is ready, so that one message carries it.
            for entry in self._next_items():
                if entry is None:
                    return
                items += entry
            for destination, sends in self._transmitter.take(items):
                self._send(destination, sends)

    def _next_items(self) -> Iterator[Sequence[TransferItem] | None]:
        """Yield the entries of the queue of transfers, and payloads that have waited long enough;
        wait for the first one."""
        longest = max(min(_POLL_SECONDS, self._waiting.seconds_left()), 0.0)
        try:
            yield self._transfers.get(timeout=None if self._is_idle() else longest)
            while True:
                yield self._transfers.get_nowait()
        except queue.Empty:
            if self._waiting.seconds_left() <= 0:
                yield self._waiting.take()
            self._check()

    def _is_idle(self) -> bool:
        with self._lock:
            return not self._groups

    def _send(self, destination: int, sends: Sequence[ReadySend]) -> None:
        step = sends[0].run.options.step
        stream = self._stream_of(sends[0].run.device)
        with (
            self._tracer.span("send", "transfer", peer=destination, **sizes_of(sends)),
            stream.working(),
        ):
            message = message_of(step, [send.run.payload(send.part) for send in sends])
            self._mailbox.send(destination, Channel.GRADIENT_SYNC, _KEY, message)
        self._enqueue(self._finish([(send.run, send.task) for send in sends]))

    def _receiver(self, peer: int) -> Callable[[Item], None]:
        def receive(item: Item) -> None:
            try:
                self._receive(peer, item)
            except Exception as error:
                self.fail(error)

        return receive

    def _receive(self, peer: int, item: Item) -> None:
        """Handle a message, or the error that ended the connection to a rank."""
        step, payloads = payloads_of(content_of(item, self._names[peer]), self._names[peer])
        nbytes = sum(payload.content.numel() for payload in payloads)
        counts = {"units": len(payloads), "step": step, "nbytes": nbytes}
        with self._tracer.span("receive", "transfer", peer=peer, **counts):
            started = []
            with self._lock:
                if self.failure is not None:
                    return
                current = self._steps[step]
                for payload in payloads:
                    self._refuse_unexpected(peer, step, payload.unit, payload.part)
                    run = current.runs.get(payload.unit)
                    if run is None:
                        # Its gradient is not ready on this rank.
                        current.early[payload.unit].append((peer, payload))
                    else:
                        started.append((run, peer, payload))
            self._enqueue(self._finish([self._deliver(*entry) for entry in started]))
        self._transmitter.arrived(peer, step)

    def _refuse_unexpected(self, peer: int, step: int, unit: int, part: Part) -> None:
        if (unit, part) not in self._expected[peer] or step <= self._finished.get(unit, -1):
            raise ProtocolError(
                f"{self._names[peer]} sent part {int(part)} of unit {unit} in step {step}, which "
                "this rank does not expect. Check that all ranks have the same plan."
            )

    def _deliver(self, run: UnitRun, peer: int, payload: Payload) -> Task:
        """Give a payload to its unit; return the task that received it."""
        part, nbytes = payload.part, payload.content.numel()
        if nbytes not in run.accepted_bytes(part):
            raise ProtocolError(
                f"{self._names[peer]} sent {nbytes} bytes of unit {run.unit.index}, "
                f"expected {run.accepted_bytes(part)[0]}. Check that all ranks have the same plan."
            )
        if not run.receive(peer, payload):
            raise ProtocolError(
                f"{self._names[peer]} sent part {int(part)} of unit {run.unit.index} twice in step "
                f"{run.options.step}. Check that all ranks have the same plan."
            )
        return run, run.tasks.receives[peer, part]

    def _finish(self, finished: Iterable[Task]) -> list[Task]:
        """Mark tasks as done; return those that they make ready."""
        ready: list[Task] = []
        callbacks = []
        with self._lock:
            if self.failure is not None:
                return []
            for run, position in finished:
                ready += [(run, successor) for successor in run.finish(position)]
                if not run.unfinished:
                    callbacks.append(self._forget(run))
        for on_done in callbacks:
            if on_done is not None:
                on_done(None)
        return ready

    def _forget(self, run: UnitRun) -> Callable[[BaseException | None], None] | None:
        """Remove a finished unit; return the callback of its group if it was the last one."""
        step = self._finished[run.unit.index] = run.options.step
        self._steps[step].runs.pop(run.unit.index, None)
        if not self._steps[step].runs and not self._steps[step].early:
            del self._steps[step]
        group = self._groups.pop(run)
        group.unfinished -= 1
        return None if group.unfinished else group.on_done

    def _enqueue(self, ready: Sequence[Task]) -> None:
        """Add tasks to the queues of their kinds."""
        sends = [ReadySend(*task) for task in ready if _is_send(task)]
        computes = [task for task in ready if not _is_send(task)]
        if sends:
            self._transfers.put(sends)
        if computes:
            self._computes.put(computes)

    def _check(self) -> None:
        """Raise if a rank is known to have failed, or if a unit has waited for too long.

        Raises:
            PeerLostError: If a rank is known to have failed.
            PeerTimeoutError: If a payload did not arrive in time; the message names its sender.
        """
        now = time.monotonic()
        if now < self._next_check:
            return
        self._next_check = now + _POLL_SECONDS
        self._mailbox.check()
        timeout = self._mailbox.timeout
        with self._lock:
            late = [run for run, group in self._groups.items() if now - group.started > timeout]
            missing = sorted({peer for run in late for peer in run.missing_peers()})
        if late:
            peers = " and ".join(self._names[peer] for peer in missing) or "this rank's own tasks"
            raise PeerTimeoutError(
                f"{self._names[self._rank]} waited {format_seconds(timeout)} for gradients from "
                f"{peers}. Check that all ranks run the same model, or raise the timeout."
            )


def _leads_to_sends(task: Task) -> bool:
    run, position = task
    return run.graph[position].kind.leads_to_sends


def _is_send(task: Task) -> bool:
    run, position = task
    return run.graph[position].kind is TaskKind.SEND
