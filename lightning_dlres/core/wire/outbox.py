"""Queue of a server's replies that limits the bytes waiting for each client and drops slow clients.

A reply occupies memory until the client's host has received it. A server therefore reserves bytes
before it makes a reply. A client that does not read costs limited memory for a limited time.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import zmq

from lightning_dlres.core.checks import finite, whole_number
from lightning_dlres.core.errors import PeerError, PeerLostError
from lightning_dlres.core.units import format_seconds
from lightning_dlres.core.wire.message import Buffer, Message
from lightning_dlres.core.wire.server import Server


@dataclass(frozen=True, kw_only=True)
class ReplyLimits:
    """Limits of the unsent replies, and the lowest rate of reading that a server accepts.

    Attributes:
        client_bytes: Unsent bytes of one client; a single reply may be larger.
        total_bytes: Unsent bytes of all clients.
        seconds: Length of a span, in seconds. In each span a client with unsent replies must take
            `least_bytes`, or all of them.
        least_bytes: Bytes that a client must take in each span.
    """

    client_bytes: int = 256 << 20
    total_bytes: int = 1 << 30
    seconds: float = 10.0
    least_bytes: int = 160 << 10

    def __post_init__(self) -> None:
        whole_number("client_bytes", self.client_bytes, f"client_bytes={256 << 20}")
        whole_number("total_bytes", self.total_bytes, f"total_bytes={1 << 30}")
        finite("seconds", self.seconds, "seconds=10.0", above=True)
        whole_number("least_bytes", self.least_bytes, f"least_bytes={160 << 10}", least=0)


@dataclass
class _ClientQueue:
    """Replies of one client that are being made (`pending`) or wait to be sent (`unsent`)."""

    # Id of the connection of the newest request, and its number, which no later connection has.
    connection: int
    connection_number: int | None
    pending: int = 0
    # Bytes reserved for the pending replies.
    reserved_bytes: int = 0
    unsent: deque[tuple[zmq.MessageTracker, int]] = field(default_factory=deque)
    unsent_bytes: int = 0
    # Clock and acknowledged bytes at the start of the current span, and bytes sent in it.
    span_start: float = 0.0
    span_acknowledged: int | None = None
    span_sent: int = 0

    @property
    def nbytes(self) -> int:
        return self.reserved_bytes + self.unsent_bytes


class Outbox:
    """Sender of replies through a server; only for the server's thread.

    Args:
        server: Server of the clients.
        limits: Limits of the unsent replies; None for the default.
        clock: Function that returns seconds.
    """

    def __init__(
        self,
        server: Server,
        limits: ReplyLimits | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._server, self._limits, self._clock = server, limits or ReplyLimits(), clock
        self._queues: dict[str, _ClientQueue] = {}
        self._total_bytes = 0

    @property
    def nbytes(self) -> int:
        """Reserved and unsent bytes of all clients."""
        return self._total_bytes

    def reserve(self, request: Message, nbytes: int) -> bool:
        """Reserve bytes for the reply to a request; return False if a limit forbids it now."""
        queue = self._queues.get(request.peer)
        client_bytes, limits = queue.nbytes if queue else 0, self._limits
        # A client, or the server, without any bytes may always reserve: one reply may be larger
        # than a limit.
        if client_bytes and client_bytes + nbytes > limits.client_bytes:
            return False
        if self._total_bytes and self._total_bytes + nbytes > limits.total_bytes:
            return False
        number = self._server.connection_number(request.connection)
        if queue is None:
            queue = self._queues[request.peer] = _ClientQueue(request.connection, number)
        elif (queue.connection, queue.connection_number) != (request.connection, number):
            # The client has reconnected, and what it took before says nothing.
            queue.connection, queue.connection_number = request.connection, number
            self._start_span(queue)
        queue.pending += 1
        queue.reserved_bytes += nbytes
        self._total_bytes += nbytes
        return True

    def reply(self, request: Message, reserved: int, kind: str, payload: Buffer) -> bool:
        """Send a reply for which `reserved` bytes were reserved; return False if the client left.

        The reply is discarded if the client left or its queue is full.
        """
        queue = self._queues[request.peer]
        queue.pending -= 1
        queue.reserved_bytes -= reserved
        self._total_bytes -= reserved
        try:
            tracker = self._server.send_tracked(
                request.peer, kind, payload, sequence=request.sequence
            )
        except PeerError as error:
            self._server.refusals.note(error)
            return not isinstance(error, PeerLostError)
        nbytes = memoryview(payload).nbytes
        if not queue.unsent:
            self._start_span(queue)
        queue.unsent.append((tracker, nbytes))
        queue.unsent_bytes += nbytes
        self._total_bytes += nbytes
        return True

    def release_sent_and_drop_slow(self) -> None:
        """Release the bytes of replies that were sent, and drop clients that read too slowly."""
        for peer, queue in list(self._queues.items()):
            while queue.unsent and queue.unsent[0][0].done:
                nbytes = queue.unsent.popleft()[1]
                queue.unsent_bytes -= nbytes
                queue.span_sent += nbytes
                self._total_bytes -= nbytes
            if queue.unsent:
                self._drop_if_slow(peer, queue)
            elif not queue.pending:
                del self._queues[peer]

    def _drop_if_slow(self, peer: str, queue: _ClientQueue) -> None:
        limits = self._limits
        if self._clock() < queue.span_start + limits.seconds:
            return
        acknowledged = self._server.acknowledged_bytes(queue.connection)
        taken = queue.span_sent
        if acknowledged is not None and queue.span_acknowledged is not None:
            taken = max(taken, acknowledged - queue.span_acknowledged)
        if taken >= limits.least_bytes:
            self._start_span(queue)
            return
        number = queue.connection_number
        if number is None or number == self._server.connection_number(queue.connection):
            self._server.drop(
                queue.connection,
                f"{peer} read {taken} bytes of its replies in {format_seconds(limits.seconds)}",
            )
        # If the connection cannot be closed, ZeroMQ still holds the replies: check again later.
        self._start_span(queue)

    def _start_span(self, queue: _ClientQueue) -> None:
        queue.span_start, queue.span_sent = self._clock(), 0
        queue.span_acknowledged = self._server.acknowledged_bytes(queue.connection)
