"""Replies that clients have yet to take in: how many bytes wait for each, and which client is so
slow that it is given up.

A reply occupies memory until the client's machine has received it. So a server asks for room before
it makes a reply, and one that does not read costs a bounded amount, for a bounded time.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import zmq

from lightning_dlres.core.errors import PeerError, PeerLostError
from lightning_dlres.core.units import format_seconds
from lightning_dlres.core.wire.frames import Buffer, Message
from lightning_dlres.core.wire.net import Server


@dataclass(frozen=True)
class SendPatience:
    """What clients may hold, in bytes, and how fast they must take it in.

    Attributes:
        client_bytes: of one client; a single reply may be larger.
        total_bytes: of all clients.
        seconds: in each such span a client with unsent replies takes in `least_bytes`, or all.
        least_bytes: see `seconds`.
    """

    client_bytes: int = 256 << 20
    total_bytes: int = 1 << 30
    seconds: float = 10.0
    least_bytes: int = 160 << 10


@dataclass
class _Held:
    """What one client holds; `making` replies are on their way, with room for `reserved` bytes."""

    connection: int
    making: int = 0
    reserved: int = 0
    unsent: deque[tuple[zmq.MessageTracker, int]] = field(default_factory=deque)
    unsent_bytes: int = 0
    # At the start of the present span.
    since: float = 0.0
    acknowledged: int | None = None
    sent: int = 0

    @property
    def nbytes(self) -> int:
        return self.reserved + self.unsent_bytes


class Outbox:
    """Sends replies through a server; for the server's thread alone.

    Args:
        server: of the clients.
        patience: with them.
        clock: returns seconds.
    """

    def __init__(
        self,
        server: Server,
        patience: SendPatience | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._server, self._patience, self._clock = server, patience or SendPatience(), clock
        self._held: dict[str, _Held] = {}
        self._total = 0

    @property
    def nbytes(self) -> int:
        """Bytes that are reserved or unsent, of all clients."""
        return self._total

    def reserve(self, request: Message, nbytes: int) -> bool:
        """Take room for the reply to a request; return False if there is none now."""
        held = self._held.get(request.peer)
        own, patience = held.nbytes if held else 0, self._patience
        if own and own + nbytes > patience.client_bytes:
            return False
        if self._total and self._total + nbytes > patience.total_bytes:
            return False
        if held is None:
            held = self._held[request.peer] = _Held(request.connection)
        held.connection = request.connection
        held.making += 1
        held.reserved += nbytes
        self._total += nbytes
        return True

    def reply(self, request: Message, reserved: int, kind: str, payload: Buffer) -> bool:
        """Send a reply for which so many bytes were reserved; return whether the client is there.

        A client that is gone, or for which too many replies wait, does not get it.
        """
        held = self._held[request.peer]
        held.making -= 1
        held.reserved -= reserved
        self._total -= reserved
        try:
            tracker = self._server.send_tracked(
                request.peer, kind, payload, sequence=request.sequence
            )
        except PeerError as error:
            self._server.refusals.note(error)
            return not isinstance(error, PeerLostError)
        nbytes = memoryview(payload).nbytes
        if not held.unsent:
            self._start_span(held)
        held.unsent.append((tracker, nbytes))
        held.unsent_bytes += nbytes
        self._total += nbytes
        return True

    def settle(self) -> None:
        """Note what was taken in since the last call, and give up clients that are too slow."""
        for peer, held in list(self._held.items()):
            while held.unsent and held.unsent[0][0].done:
                nbytes = held.unsent.popleft()[1]
                held.unsent_bytes -= nbytes
                held.sent += nbytes
                self._total -= nbytes
            if held.unsent:
                self._judge(peer, held)
            elif not held.making:
                del self._held[peer]

    def _judge(self, peer: str, held: _Held) -> None:
        patience = self._patience
        if self._clock() < held.since + patience.seconds:
            return
        now = self._server.acknowledged(held.connection)
        moved = held.sent
        if now is not None and held.acknowledged is not None:
            moved = max(moved, now - held.acknowledged)
        if moved >= patience.least_bytes:
            self._start_span(held)
            return
        self._server.drop(
            held.connection,
            f"{peer} took in {moved} bytes of its replies in {format_seconds(patience.seconds)}",
        )
        # Where the connection is none that can be closed, ZeroMQ still holds these.
        self._start_span(held)

    def _start_span(self, held: _Held) -> None:
        held.since, held.sent = self._clock(), 0
        held.acknowledged = self._server.acknowledged(held.connection)
