"""Rules of the simulation by which ready payloads become messages, as in the executor."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from lightning_dlres.gradsync.plan.simulation.clock import VirtualClock
from lightning_dlres.gradsync.plan.simulation.links import MessageInFlight
from lightning_dlres.gradsync.plan.transmissions import (
    COALESCE_SECONDS,
    MESSAGE_BYTES,
    Entry,
    Transfer,
    Transmission,
    TransmissionPlanner,
)

# Gives a message to its rank's link.
HandOver = Callable[[Transmission], None]


@dataclass(frozen=True, kw_only=True)
class CoordinatorCosts:
    """Times of the coordinator, in seconds.

    Attributes:
        report_seconds: Time of a report from another rank to the coordinator.
        plan_seconds: Time of a plan from the coordinator to another rank.
        handling_seconds: Time in which the coordinator handles one report, and sends its plans.
            Reports wait for each other.
        rank: Rank of the coordinator. Its own reports and plans take no time on the way.
    """

    report_seconds: float = 0.0
    plan_seconds: float = 0.0
    handling_seconds: float = 0.0
    rank: int = 0


class HeldTransfers:
    """Ready payloads of a rank that wait for others, to share their messages.

    While there are tasks that may lead to others, a payload waits up to `COALESCE_SECONDS`, until
    those for one rank fill a message. All leave together then.

    Args:
        message_bytes: Bytes that fill a message.

    Attributes:
        items: The payloads.
        due_time: Time up to which the oldest payload waits, in seconds.
    """

    __slots__ = ("_bytes", "_message_bytes", "due_time", "items")

    def __init__(self, message_bytes: int = MESSAGE_BYTES) -> None:
        self._message_bytes = message_bytes
        self.items: list[Transfer] = []
        self._bytes: dict[int, int] = {}
        self.due_time = math.inf

    def add(self, transfer: Transfer, now: float) -> bool:
        """Add a payload; return True if it is the only one."""
        if not self.items:
            self.due_time = now + COALESCE_SECONDS
        self.items.append(transfer)
        self._bytes[transfer.destination] = (
            self._bytes.get(transfer.destination, 0) + transfer.nbytes
        )
        return len(self.items) == 1

    def is_full(self) -> bool:
        """Return True if the payloads to some rank fill a message."""
        return max(self._bytes.values(), default=0) >= self._message_bytes

    def take(self) -> list[Transfer]:
        """Remove and return all payloads."""
        items, self.items = self.items, []
        self._bytes.clear()
        self.due_time = math.inf
        return items


class SendingRule(ABC):
    """Rule that turns ready payloads into messages."""

    @abstractmethod
    def take(self, rank: int, transfers: Sequence[Transfer]) -> None:
        """Take the payloads of a rank that have become ready at one time."""

    def arrived(self, message: MessageInFlight) -> None:  # noqa: B027
        """Report that a message has arrived."""


class DirectSending(SendingRule):
    """Sends every payload at once; see `direct_messages`."""

    def __init__(self, hand_over: HandOver, message_bytes: int = MESSAGE_BYTES) -> None:
        self._hand_over, self._message_bytes = hand_over, message_bytes

    def take(self, rank: int, transfers: Sequence[Transfer]) -> None:
        for message in direct_messages(transfers, self._message_bytes):
            self._hand_over(message)


class CoordinatedSending(SendingRule):
    """Reports ready payloads to the coordinator, and sends what it plans.

    Attributes:
        log: All planned messages, in order.
        reports: Number of reports to the coordinator.
    """

    def __init__(
        self,
        clock: VirtualClock,
        costs: CoordinatorCosts,
        hand_over: HandOver,
        message_bytes: int = MESSAGE_BYTES,
    ) -> None:
        self._clock, self._costs, self._hand_over = clock, costs, hand_over
        self._planner = TransmissionPlanner(message_bytes)
        # Time at which the coordinator has handled all reports.
        self._idle_from = 0.0
        self.log: list[Transmission] = []
        self.reports = 0

    def take(self, rank: int, transfers: Sequence[Transfer]) -> None:
        self._report(rank, transfers)

    def arrived(self, message: MessageInFlight) -> None:
        self._report(message.destination, message)

    def _report(self, rank: int, report: Sequence[Transfer] | MessageInFlight) -> None:
        self.reports += 1
        delay = 0.0 if rank == self._costs.rank else self._costs.report_seconds
        self._clock.at(self._clock.now + delay, self._queue, report)

    def _queue(self, report: Sequence[Transfer] | MessageInFlight) -> None:
        self._idle_from = max(self._clock.now, self._idle_from) + self._costs.handling_seconds
        self._clock.at(self._idle_from, self._handle, report)

    def _handle(self, report: Sequence[Transfer] | MessageInFlight) -> None:
        if isinstance(report, MessageInFlight):
            self._planner.finish(report.source, report.destination)
        else:
            self._planner.add(report)
        for message in self._planner.next_transmissions():
            self.log.append(message)
            delay = 0.0 if message.source == self._costs.rank else self._costs.plan_seconds
            self._clock.at(self._clock.now + delay, self._hand_over, message)


class ReplayedSending(SendingRule):
    """Repeats the messages of an earlier step: each rank sends its own in their order.

    Args:
        messages: Messages of all ranks, in the order in which they were planned.
        hand_over: Gives a message to its rank's link.
    """

    def __init__(self, messages: Iterable[Transmission], hand_over: HandOver) -> None:
        self._hand_over = hand_over
        self._messages: dict[int, list[Transmission]] = defaultdict(list)
        for message in messages:
            self._messages[message.source].append(message)
        # Position of the next message, and ready payloads that are not sent yet, by rank.
        self._next: dict[int, int] = defaultdict(int)
        self._ready: dict[int, set[tuple[int, Entry]]] = defaultdict(set)

    def take(self, rank: int, transfers: Sequence[Transfer]) -> None:
        ready, messages = self._ready[rank], self._messages[rank]
        ready.update((transfer.destination, transfer.entry) for transfer in transfers)
        while self._next[rank] < len(messages):
            message = messages[self._next[rank]]
            payloads = {(message.destination, entry) for entry in message.entries}
            if not payloads <= ready:
                return
            ready -= payloads
            self._next[rank] += 1
            self._hand_over(message)


def direct_messages(
    transfers: Sequence[Transfer], message_bytes: int = MESSAGE_BYTES
) -> list[Transmission]:
    """Return messages without a coordinator, one or more for each destination.

    Args:
        transfers: Payloads of one rank and one step that are ready at the same time.
        message_bytes: Bytes from which a message takes no more payloads.
    """
    if len(transfers) == 1:
        # The usual case, and the fast one.
        (only,) = transfers
        return [Transmission(only.source, only.destination, (only.entry,))]
    by_destination: dict[int, list[Transfer]] = defaultdict(list)
    for transfer in transfers:
        by_destination[transfer.destination].append(transfer)
    messages = []
    for destination, waiting in by_destination.items():
        groups: list[list[Entry]] = []
        nbytes = message_bytes
        for transfer in waiting:
            if nbytes >= message_bytes:
                groups.append([])
                nbytes = 0
            groups[-1].append(transfer.entry)
            nbytes += transfer.nbytes
        source = waiting[0].source
        messages += [Transmission(source, destination, tuple(group)) for group in groups]
    return messages
