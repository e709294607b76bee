"""Rules by which ready payloads become messages: at once, or as a coordinator plans."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from lightning_dlres.gradsync.execute.coordination import CoordinatorLink
from lightning_dlres.gradsync.execute.unit_run import UnitRun
from lightning_dlres.gradsync.plan.graph import Part
from lightning_dlres.gradsync.plan.transmissions import (
    MESSAGE_BYTES,
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


# Destination and payloads of a message.
Message = tuple[int, list[ReadySend]]


class Transmitter(ABC):
    """Rule that turns ready payloads into messages. Only the thread of transfers calls `take`."""

    @abstractmethod
    def take(self, items: Sequence[ReadySend | Transmission]) -> list[Message]:
        """Take payloads that are ready and plans that have arrived; return messages to send now."""

    @abstractmethod
    def arrived(self, source: int) -> None:
        """Report that a message has arrived from a rank; any thread may call it."""


class DirectTransmitter(Transmitter):
    """Sends every payload at once, in one message with those that are ready for the same rank."""

    def take(self, items: Sequence[ReadySend | Transmission]) -> list[Message]:
        by_destination: dict[int, list[ReadySend]] = defaultdict(list)
        for item in items:
            assert isinstance(item, ReadySend)
            by_destination[item.destination].append(item)
        return [
            (destination, message)
            for destination, sends in by_destination.items()
            for message in _messages(sends, MESSAGE_BYTES)
        ]

    def arrived(self, source: int) -> None:
        """Do nothing: no coordinator waits for the report."""


class CoordinatedTransmitter(Transmitter):
    """Reports what is ready to the coordinator, and sends what its plans say.

    Args:
        rank: This rank.
        coordinator: Link to the coordinator.
    """

    def __init__(self, rank: int, coordinator: CoordinatorLink) -> None:
        self._rank, self._coordinator = rank, coordinator
        self._ready: dict[tuple[int, tuple[int, int, int]], ReadySend] = {}

    def take(self, items: Sequence[ReadySend | Transmission]) -> list[Message]:
        transfers, messages = [], []
        for item in items:
            if isinstance(item, Transmission):
                if item.source == self._rank:
                    sends = [self._ready.pop((item.destination, e)) for e in item.entries]
                    messages.append((item.destination, sends))
                continue
            entry = item.run.options.step, item.run.unit.index, int(item.part)
            self._ready[item.destination, entry] = item
            transfers.append(
                Transfer(self._rank, item.destination, entry, item.run.payload_bytes())
            )
        if transfers:
            self._coordinator.report_ready(transfers)
        return messages

    def arrived(self, source: int) -> None:
        self._coordinator.report_arrival(source, self._rank)


def _messages(sends: Sequence[ReadySend], message_bytes: int) -> list[list[ReadySend]]:
    """Return sends to one rank in messages of about `message_bytes`, each of one step."""
    messages: list[list[ReadySend]] = []
    nbytes = 0
    for send in sends:
        is_full = not messages or nbytes >= message_bytes
        if is_full or messages[-1][0].run.options.step != send.run.options.step:
            messages.append([])
            nbytes = 0
        messages[-1].append(send)
        nbytes += send.run.payload_bytes()
    return messages
