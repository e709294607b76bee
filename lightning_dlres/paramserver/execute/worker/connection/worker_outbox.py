"""Messages of a worker that wait to be sent to one server: pushes, requests, and notes.

A message is handed to ZeroMQ only when it can leave at once. ZeroMQ's queue is full when a server
has been away for long; a send would then hold up the training thread, and fail before the deadline
of its wait.
"""

from __future__ import annotations

import itertools
import time
from collections import deque

import msgspec

from lightning_dlres.core.wire.endpoint import Client
from lightning_dlres.core.wire.message import Buffer
from lightning_dlres.paramserver import protocol
from lightning_dlres.paramserver.execute.riders import push_details
from lightning_dlres.paramserver.execute.sending_waits import SendingWait
from lightning_dlres.paramserver.execute.worker.connection.pending_request import (
    PendingRequest,
    PendingRequests,
)
from lightning_dlres.paramserver.execute.worker.connection.push_window import PushQueue, PushWindow
from lightning_dlres.paramserver.execute.worker.state.exchange import Exchange
from lightning_dlres.paramserver.execute.worker.state.push_log import LogEntry

# Requests have larger sequence numbers than pushes, whose numbers ZeroMQ's client gives.
FIRST_SEQUENCE = 1 << 32


class WorkerOutbox:
    """Messages for one server; the caller holds the exchange's lock.

    Args:
        client: Connection to the server.
        exchange: State of the exchange.
        window: How far pushes may be ahead of the other workers.
        retry_seconds: Time without an answer after which a request is sent again.

    Attributes:
        requests: Requests without an answer.
    """

    def __init__(
        self, client: Client, exchange: Exchange, window: PushWindow, retry_seconds: float
    ) -> None:
        self._client, self._exchange, self._window = client, exchange, window
        self._retry_seconds = retry_seconds
        self.requests = PendingRequests()
        self._pushes = PushQueue()
        self._wait = SendingWait()
        self._notes: deque[tuple[str, bytes, bytes]] = deque()
        self._sequences = itertools.count(FIRST_SEQUENCE)

    @property
    def is_open(self) -> bool:
        """True if a message can be sent at once."""
        return self._client.is_writable

    def add_push(self, entry: LogEntry) -> None:
        """Add a push, which leaves when the window lets it."""
        self._pushes.add(entry)

    def add_request(self, kind: str, details: bytes, payload: Buffer = b"") -> PendingRequest:
        """Add a request, which is sent until it is answered."""
        pending = PendingRequest(kind, details, payload)
        self.requests.add(next(self._sequences), pending)
        return pending

    def add_note(self, kind: str, details: bytes, payload: bytes = b"") -> None:
        """Add a message that is sent once, and has no answer of its own."""
        self._notes.append((kind, details, payload))

    def send_now(self, kind: str, details: msgspec.Struct) -> None:
        """Send a message without a payload; the outbox must be open."""
        self._client.send(kind, details=msgspec.msgpack.encode(details))

    def send(self, last_answer: float) -> None:
        """Send all that is due.

        Args:
            last_answer: Clock at the server's last answer to a request.
        """
        # Small messages first: other workers may wait for a commit, or a server for versions.
        while self._notes and self.is_open:
            kind, details, payload = self._notes.popleft()
            self._client.send(kind, payload, details=details)
        if self.requests:
            self._send_requests(time.monotonic(), last_answer)
        self._send_pushes()

    def idle_seconds(self, limit: float) -> float:
        """Return the seconds, at most `limit`, after which a push may leave without any answer."""
        if not self._pushes:
            return limit
        wait = self._window.wait(time.monotonic(), self._pushes.first.position)
        return min(limit, wait or self._wait.seconds)

    def _send_pushes(self) -> None:
        has_moved = self._window.collect()
        while self._pushes and self.is_open:
            if self._window.is_full(time.monotonic(), self._pushes.first.position):
                break
            has_moved = True
            self._send_push(self._pushes.pop(), time.monotonic())
        self._wait.note(has_moved=has_moved)

    def _send_push(self, entries: list[LogEntry], now: float) -> None:
        """Send pushes in one message: the payload of the largest one has a frame of its own."""
        keys = self._exchange.keys
        awaited = [
            e for e in entries if keys[e.key].is_awaited and keys[e.key].expected == e.number
        ]
        for entry in awaited:
            keys[entry.key].is_queued, keys[entry.key].touched = False, now
        entries = [entry for entry in entries if not entry.is_durable]
        if not entries:
            return
        largest = max(entries, key=lambda entry: len(entry.payload))
        riders = [(one.details, one.payload) for one in entries if one is not largest]
        tracker = self._client.send_tracked(
            protocol.PUSH,
            largest.payload,
            details=push_details(largest.details, riders, self._exchange.incarnation),
            payload_checksum=largest.payload_checksum(),
        )
        largest.trackers = [one for one in largest.trackers if not one.done]
        largest.trackers.append(tracker)
        for entry in entries:
            self._window.sent(entry, tracker, now, is_awaited=entry in awaited)
            self._exchange.pushed_bytes += len(entry.payload)

    def _send_requests(self, now: float, last_answer: float) -> None:
        for sequence, pending in self.requests:
            if pending.is_due(now, self._retry_seconds, last_answer) and self.is_open:
                pending.sent, pending.tries = now, pending.tries + 1
                # The payload may change once the request is answered.
                copy = bytes(pending.payload)
                pending.tracker = self._client.send_tracked(
                    pending.kind, copy, sequence=sequence, details=pending.details
                )
