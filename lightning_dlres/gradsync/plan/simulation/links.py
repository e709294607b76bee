"""Links of all ranks in virtual time, joined by a switch without limits.

Each direction of a link divides its time equally among the messages that it carries, as TCP
connections do. Several ranks that send to the same rank at once get less than its bandwidth
together: `LinkCosts.incast_share`. Messages between the same two ranks follow each other. A message
has arrived when both directions have carried it: the source's sending one and the destination's
receiving one. A direction that has carried its part gives its time to other messages.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from heapq import heappop, heappush

from lightning_dlres.gradsync.plan.costs import LinkCosts
from lightning_dlres.gradsync.plan.simulation.clock import VirtualClock
from lightning_dlres.gradsync.plan.transmissions import Entry


@dataclass(slots=True, eq=False)
class MessageInFlight:
    """A message on its way.

    Attributes:
        source: Sending rank.
        destination: Receiving rank.
        entries: Step, unit and part of each payload.
        nbytes: Bytes of all payloads.
        started: Time from which both links carry the message.
        directions_left: Number of links that have not carried it yet.
    """

    source: int
    destination: int
    entries: tuple[Entry, ...]
    nbytes: int
    started: float = 0.0
    directions_left: int = 2


class LinkDirection:
    """One direction of a link: a server that its messages share equally.

    Args:
        rank: Rank of the link.
        seconds_per_byte: Inverse of the bandwidth.
        incast_share: Part of the bandwidth that several messages at once have together.

    Attributes:
        busy: Seconds of work of all messages so far.
    """

    __slots__ = (
        "_changed_at",
        "_completions",
        "_incast_slowdown",
        "_number",
        "_served",
        "busy",
        "rank",
        "seconds_per_byte",
        "version",
    )

    def __init__(self, rank: int, seconds_per_byte: float, incast_share: float = 1.0) -> None:
        self.rank, self.seconds_per_byte = rank, seconds_per_byte
        self._incast_slowdown = 1 / incast_share
        self.busy = 0.0
        # Grows with each planned completion, so that an older plan is recognised.
        self.version = 0
        # Seconds of service that every message has had since the link was idle, at `_changed_at`.
        self._served, self._changed_at = 0.0, 0.0
        # Messages by the service at which they are complete.
        self._completions: list[tuple[float, int, MessageInFlight]] = []
        self._number = 0

    def add(self, now: float, message: MessageInFlight, seconds: float) -> None:
        """Start to carry a message that takes `seconds` alone."""
        if self._completions:
            self._served += (now - self._changed_at) / self._seconds_per_service()
        self._changed_at = now
        self._number += 1
        self.busy += seconds
        heappush(self._completions, (self._served + seconds, self._number, message))

    def next_completion(self) -> float | None:
        """Return the time at which the next message is complete; None if there is none."""
        if not self._completions:
            return None
        left = max(self._completions[0][0] - self._served, 0.0)
        return self._changed_at + left * self._seconds_per_service()

    def _seconds_per_service(self) -> float:
        """Return the time in which every message gets one second of service."""
        count = len(self._completions)
        return count * self._incast_slowdown if count > 1 else 1.0

    def complete(self, now: float) -> list[MessageInFlight]:
        """Remove the messages that are complete at `next_completion`, and return them."""
        completions, complete = self._completions, []
        self._served, self._changed_at = completions[0][0], now
        while completions and completions[0][0] <= self._served:
            complete.append(heappop(completions)[2])
        if not completions:
            # Start from 0 again: large sums would lose digits.
            self._served = 0.0
        return complete


class SharedLinks:
    """Links of all ranks.

    Args:
        clock: Virtual clock.
        costs: Costs of the links.
        on_arrival: Called with each message when it has arrived.
        on_carried: Called with each message and the direction that has carried it, True for the
            sending one; None for no calls.
    """

    def __init__(
        self,
        clock: VirtualClock,
        costs: LinkCosts,
        on_arrival: Callable[[MessageInFlight], None],
        on_carried: Callable[[MessageInFlight, bool], None] | None = None,
    ) -> None:
        self._clock, self._on_arrival, self._on_carried = clock, on_arrival, on_carried
        self._message_seconds, self._latency = costs.message_seconds, costs.latency_seconds
        self._sending = [LinkDirection(r, 1 / b) for r, b in enumerate(costs.bandwidths)]
        self._receiving = [
            LinkDirection(r, 1 / b, costs.incast_share) for r, b in enumerate(costs.bandwidths)
        ]
        # Messages by source and destination; the first one is being carried.
        self._pairs: dict[tuple[int, int], deque[MessageInFlight]] = {}
        # Directions whose messages have changed since `plan_completions`; a dict keeps their order.
        self._changed: dict[LinkDirection, None] = {}
        self.messages = 0

    @property
    def sending_seconds(self) -> tuple[float, ...]:
        """Seconds in which each rank's link was sending."""
        return tuple(direction.busy for direction in self._sending)

    @property
    def receiving_seconds(self) -> tuple[float, ...]:
        """Seconds in which each rank's link was receiving."""
        return tuple(direction.busy for direction in self._receiving)

    def send(self, message: MessageInFlight) -> None:
        """Send a message behind earlier ones to the same rank."""
        self.messages += 1
        pair = self._pairs.setdefault((message.source, message.destination), deque())
        pair.append(message)
        if len(pair) == 1:
            self._begin(message)

    def plan_completions(self) -> None:
        """Plan the next completions; call it after all changes of one time."""
        for direction in self._changed:
            completion = direction.next_completion()
            direction.version += 1
            if completion is not None:
                self._clock.at(completion, self._complete, (direction, direction.version))
        self._changed.clear()

    def _begin(self, message: MessageInFlight) -> None:
        message.started = self._clock.now
        for direction in (self._sending[message.source], self._receiving[message.destination]):
            seconds = self._message_seconds + message.nbytes * direction.seconds_per_byte
            direction.add(message.started, message, seconds)
            self._changed[direction] = None

    def _complete(self, planned: tuple[LinkDirection, int]) -> None:
        direction, version = planned
        if version != direction.version:
            return
        self._changed[direction] = None
        is_sending = direction is self._sending[direction.rank]
        for message in direction.complete(self._clock.now):
            if self._on_carried is not None:
                self._on_carried(message, is_sending)
            message.directions_left -= 1
            if not message.directions_left:
                self._end(message)

    def _end(self, message: MessageInFlight) -> None:
        pair = self._pairs[message.source, message.destination]
        pair.popleft()
        if pair:
            self._begin(pair[0])
        self._clock.at(self._clock.now + self._latency, self._on_arrival, message)
