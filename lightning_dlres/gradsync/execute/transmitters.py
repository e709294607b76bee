"""Rules by which ready payloads become messages: at once, or as a coordinator plans."""

from __future__ import annotations

import math
import threading
import time
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from lightning_dlres.core.errors import ProtocolError
from lightning_dlres.gradsync.execute.coordination import CoordinatorLink, LearnedPlan
from lightning_dlres.gradsync.execute.unit_run import UnitRun
from lightning_dlres.gradsync.plan.graph import Part
from lightning_dlres.gradsync.plan.transmissions import (
    COALESCE_SECONDS,
    MESSAGE_BYTES,
    Entry,
    Transfer,
    Transmission,
)


@dataclass(frozen=True)
class ReadySend:
    """A payload that can be sent.

    Attributes:
        run: The unit in its step.
        task: Position of the task in the unit's graph.
    """

    run: UnitRun
    task: int

    @property
    def destination(self) -> int:
        """Rank that receives the payload."""
        peer = self.run.graph[self.task].peer
        assert peer is not None
        return peer

    @property
    def part(self) -> Part:
        """Content of the payload."""
        return self.run.graph[self.task].part

    @property
    def nbytes(self) -> int:
        """Bytes of the payload."""
        return self.run.payload_bytes(self.part)


def sizes_of(sends: Sequence[ReadySend]) -> dict[str, int]:
    """Return the figures of a message, for its span: number of units, step, bytes of the payloads,
    and bytes of the gradients in them without compression."""
    return {
        "units": len(sends),
        "step": sends[0].run.options.step,
        "nbytes": sum(send.nbytes for send in sends),
        "raw_nbytes": sum(send.run.gradient_bytes() for send in sends),
    }


class WaitingSends:
    """Ready payloads that wait for others, to share their messages.

    Two threads share it. That of compute tasks adds payloads, and takes them when they fill a
    message, or when it has no tasks that may lead to others. That of transfers takes them when the
    oldest one has waited for `COALESCE_SECONDS`.

    Args:
        message_bytes: Bytes that fill a message.
        now: Function that returns the time in seconds.
    """

    def __init__(
        self, message_bytes: int = MESSAGE_BYTES, now: Callable[[], float] = time.monotonic
    ) -> None:
        self._message_bytes, self._now, self._lock = message_bytes, now, threading.Lock()
        self._items: list[ReadySend] = []
        self._bytes: dict[int, int] = {}
        # Time up to which the oldest payload waits.
        self._due_time = math.inf

    def add(self, send: ReadySend) -> bool:
        """Add a payload; return True if it is the only one."""
        destination = send.destination
        with self._lock:
            if not self._items:
                self._due_time = self._now() + COALESCE_SECONDS
            self._items.append(send)
            self._bytes[destination] = self._bytes.get(destination, 0) + send.nbytes
            return len(self._items) == 1

    def is_full(self) -> bool:
        """Return True if the payloads to some rank fill a message."""
        with self._lock:
            return max(self._bytes.values(), default=0) >= self._message_bytes

    def seconds_left(self) -> float:
        """Return the seconds until the payloads are due; infinite without payloads."""
        return self._due_time - self._now()

    def take(self) -> list[ReadySend]:
        """Remove and return the payloads to all ranks, in the order of `add`."""
        with self._lock:
            items, self._items = self._items, []
            self._bytes.clear()
            self._due_time = math.inf
            return items


@dataclass(frozen=True)
class StepStart:
    """Start of units of a step on this rank, so the step before is done here."""

    step: int


# Item of the queue of transfers.
TransferItem = ReadySend | StepStart | Transmission | LearnedPlan
# Destination and payloads of a message.
Message = tuple[int, list[ReadySend]]


class Transmitter(ABC):
    """Rule that turns ready payloads into messages.

    Only the thread of transfers calls `take`.
    """

    @abstractmethod
    def take(self, items: Sequence[TransferItem]) -> list[Message]:
        """Take payloads that are ready and plans that have arrived; return messages to send now."""

    @abstractmethod
    def arrived(self, source: int, step: int) -> None:
        """Report that a message of a step has arrived from a rank; any thread may call it."""


class DirectTransmitter(Transmitter):
    """Sends every payload at once, in one message with those that are ready for the same rank.

    Args:
        message_bytes: Size in bytes at which a message takes no more payloads.
    """

    def __init__(self, message_bytes: int = MESSAGE_BYTES) -> None:
        self._message_bytes = message_bytes

    def take(self, items: Sequence[TransferItem]) -> list[Message]:
        by_destination: dict[int, list[ReadySend]] = defaultdict(list)
        for item in items:
            if isinstance(item, ReadySend):
                by_destination[item.destination].append(item)
        return [
            (destination, message)
            for destination, sends in by_destination.items()
            for message in _messages(sends, self._message_bytes)
        ]

    def arrived(self, source: int, step: int) -> None:
        """Do nothing: no coordinator waits for the report."""


class CoordinatedTransmitter(Transmitter):
    """Reports ready payloads to the coordinator, and sends them in the messages that it plans.

    From step `replay_from` on, it repeats the messages of the step before in their order, without
    the coordinator. All ranks repeat one sequence in which no message comes before those that it
    depends on, so no rank waits for ever. Every step must have the same units.

    Args:
        rank: This rank.
        coordinator: Link to the coordinator.
        replay_from: First step that repeats a plan; None asks the coordinator in every step.
    """

    def __init__(
        self, rank: int, coordinator: CoordinatorLink, replay_from: int | None = None
    ) -> None:
        self._rank, self._coordinator, self._replay_from = rank, coordinator, replay_from
        # Ready payloads that are not sent yet, by destination and entry.
        self._ready: dict[tuple[int, Entry], ReadySend] = {}
        # True once this rank has asked for the messages to repeat; they come when all ranks have.
        self._has_asked = False
        # This rank's messages to repeat in each step; None until they come.
        self._replayed: list[Transmission] | None = None
        # Step and position in `_replayed` of the next message.
        self._step, self._next = replay_from or 0, 0

    def take(self, items: Sequence[TransferItem]) -> list[Message]:
        transfers, messages = [], []
        for item in items:
            if isinstance(item, LearnedPlan):
                self._replayed = [m for m in item.messages if m.source == self._rank]
            elif isinstance(item, Transmission):
                if item.source == self._rank:
                    messages.append(self._message(item.destination, item.entries))
            elif isinstance(item, StepStart):
                # Ask now, not when a payload is ready. It may depend on payloads of other ranks,
                # which wait until all ranks have asked.
                if self._is_replayed(item.step) and not self._has_asked:
                    # The step before is done here, so all its messages were planned.
                    self._has_asked = True
                    self._coordinator.report_learned(item.step - 1)
            else:
                entry = item.run.options.step, item.run.unit.index, int(item.part)
                self._ready[item.destination, entry] = item
                if not self._is_replayed(entry[0]):
                    transfers.append(Transfer(self._rank, item.destination, entry, item.nbytes))
        if transfers:
            self._coordinator.report_ready(transfers)
        return [*messages, *self._replay()]

    def arrived(self, source: int, step: int) -> None:
        if not self._is_replayed(step):
            self._coordinator.report_arrival(source, self._rank)

    def _is_replayed(self, step: int) -> bool:
        return self._replay_from is not None and step >= self._replay_from

    def _replay(self) -> Iterator[Message]:
        """Yield the next messages of the repeated plan, as far as their payloads are ready."""
        while self._replayed:
            message = self._replayed[self._next]
            entries = tuple((self._step, unit, part) for _, unit, part in message.entries)
            if any((message.destination, entry) not in self._ready for entry in entries):
                return
            yield self._message(message.destination, entries)
            self._next += 1
            if self._next == len(self._replayed):
                self._step, self._next = self._step + 1, 0

    def _message(self, destination: int, entries: Iterable[Entry]) -> Message:
        try:
            return destination, [self._ready.pop((destination, entry)) for entry in entries]
        except KeyError:
            raise ProtocolError(
                f"{self._coordinator.name}, the coordinator, planned a payload that is not ready. "
                "Check that all ranks have the same plan."
            ) from None


def _messages(sends: Sequence[ReadySend], message_bytes: int) -> list[list[ReadySend]]:
    """Return sends to one rank as messages, each of one step.

    A message ends with the send that brings it to `message_bytes` or above.
    """
    messages: list[list[ReadySend]] = []
    nbytes = 0
    for send in sends:
        is_full = not messages or nbytes >= message_bytes
        if is_full or messages[-1][0].run.options.step != send.run.options.step:
            messages.append([])
            nbytes = 0
        messages[-1].append(send)
        nbytes += send.nbytes
    return messages
