"""A ZeroMQ socket with deadlines: the base class of `Server` and `Client`.

Messages have two frames (see `frames`). No wait is without a deadline.

Threads: an endpoint belongs to one thread at a time, as ZeroMQ sockets do. One thread may create it
and hand it to another. Only `interrupt` may be called from any thread.
"""

from __future__ import annotations

import contextlib
import math
import socket
import time
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import zmq
from zmq.utils.monitor import recv_monitor_message

from lightning_dlres.core.errors import PeerLostError, PeerTimeoutError
from lightning_dlres.core.units import format_seconds
from lightning_dlres.core.wire.frames import Buffer, Message, broken, pack, unpack

# Domain of ZeroMQ's authentication protocol (ZAP).
ZAP_DOMAIN = "dlres"
PORTS = range(1 << 16)
# Milliseconds. A connection that does not finish ZeroMQ's greeting in this time is closed.
_HANDSHAKE_MS = 10_000
# The kernel closes connections to hosts that are unreachable for idle + interval * count seconds.
_KEEPALIVE = {
    zmq.TCP_KEEPALIVE: 1,
    zmq.TCP_KEEPALIVE_IDLE: 60,
    zmq.TCP_KEEPALIVE_INTVL: 15,
    zmq.TCP_KEEPALIVE_CNT: 4,
}
# A message has at most 3 frames: sender name, header and payload. Further frames are counted, but
# not stored.
_MAX_FRAMES = 3


@dataclass(frozen=True)
class ConnectionEvent:
    """A TCP connection that was opened or closed.

    Attributes:
        opened: True when it was opened, False when it was closed.
        connection: The connection's id, as in `Message`; 0 at a client.
    """

    opened: bool
    connection: int


class Endpoint:
    """A socket in a ZeroMQ context of its own, with deadlines, interrupts and connection events."""

    _opened_event: zmq.Event

    def __init__(self, kind: zmq.SocketType, send_timeout: float) -> None:
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket = self._context.socket(kind)
        self._socket.setsockopt(zmq.LINGER, 0)
        # ZeroMQ takes any program that opens a connection for a peer of its protocol before 3.0.
        # With a ZAP domain it refuses such peers. It asks a handler only where one was started.
        self._socket.setsockopt_string(zmq.ZAP_DOMAIN, ZAP_DOMAIN)
        self._socket.setsockopt(zmq.HANDSHAKE_IVL, _HANDSHAKE_MS)
        for option, value in _KEEPALIVE.items():
            self._socket.setsockopt(option, value)
        self._socket.setsockopt(zmq.SNDTIMEO, round(send_timeout * 1000))
        self._send_timeout = send_timeout
        self._next_sequence = 0
        self._peer_label = "a peer"
        self._wake_reader, self._wake_writer = socket.socketpair()
        self._wake_reader.setblocking(False)
        self._wake_writer.setblocking(False)
        self._monitor: zmq.Socket[bytes] | None = None
        self._events: list[ConnectionEvent] = []
        self._poller = zmq.Poller()
        self._poller.register(self._socket, zmq.POLLIN)
        self._poller.register(self._wake_reader.fileno(), zmq.POLLIN)

    def receive(self, timeout: float) -> Message | None:
        """Return the next message, or None after `timeout` seconds.

        It returns None early after `interrupt`, or when `connection_events` has new events.

        Raises:
            ProtocolError: If a peer sent bytes that are not a message. They are discarded.
        """
        ready = self._poll(timeout)
        if self._monitor in ready:
            self._read_monitor()
        if self._wake_reader.fileno() in ready:
            self._wake_reader.recv(4096)
        elif self._socket in ready:
            return self._receive_message()
        return None

    def expect(self, timeout: float, what: str) -> Message:
        """Return the next message, waiting at most `timeout` seconds.

        Args:
            timeout: Seconds.
            what: Description of the awaited message, for the error.

        Raises:
            PeerTimeoutError: If no message came in time. The error names the peer.
            ProtocolError: See `receive`.
        """
        deadline = time.monotonic() + timeout
        while True:
            remaining = deadline - time.monotonic()
            if message := self.receive(remaining):
                return message
            if remaining <= 0:
                raise PeerTimeoutError(
                    f"waited {format_seconds(timeout)} for {what} from {self._peer_label}, but "
                    "nothing came. Check that it runs and can be reached, and that its keys match."
                )

    def interrupt(self) -> None:
        """Make the current or next `receive` return None at once; safe from any thread."""
        # A full buffer means that an earlier interrupt is still pending. A closed socket means that
        # no thread waits any more.
        with contextlib.suppress(OSError):
            self._wake_writer.send(b"\0")

    def connection_events(self) -> list[ConnectionEvent]:
        """Return the TCP connection events since the last call; needs `monitor=True`."""
        self._read_monitor()
        events, self._events = self._events, []
        return events

    def close(self) -> None:
        """Close all sockets at once; unsent messages are lost. A second call does nothing."""
        if self._context.closed:
            return
        if self._monitor is not None:
            self._socket.disable_monitor()
        self._context.destroy(linger=0)
        self._wake_reader.close()
        self._wake_writer.close()

    def _poll(self, timeout: float) -> dict[Any, int]:
        return dict(self._poller.poll(max(0, math.ceil(timeout * 1000))))

    def _receive_message(self) -> Message:
        """Return the message that is ready to be read.

        Raises:
            ProtocolError: If its frames do not form a message.
        """
        frame = self._socket.recv(copy=False)
        frames, count, nbytes = [frame], 1, len(frame)
        while frame.more:
            frame = self._socket.recv(copy=False)
            count, nbytes = count + 1, nbytes + len(frame)
            if count <= _MAX_FRAMES:
                frames.append(frame)
        try:
            connection = int(frames[-1].get(zmq.SRCFD))
        except zmq.ZMQError:
            # ZeroMQ gives no connection for peers of its old protocols.
            raise broken(self._peer_label, "a message of an old ZeroMQ", "ZMTP 3") from None
        self._note_message(connection, nbytes)
        if count > _MAX_FRAMES:
            raise broken(self._peer_label, f"{count} frames", "a header and a payload")
        return self._unpack([frame.bytes for frame in frames], connection)

    def _note_message(self, connection: int, nbytes: int) -> None:
        pass

    def _unpack(self, frames: list[bytes], connection: int) -> Message:
        return unpack(frames, self._peer_label, connection)

    def _start_monitor(self) -> None:
        self._monitor = self._socket.get_monitor_socket(self._opened_event | zmq.Event.DISCONNECTED)
        self._poller.register(self._monitor, zmq.POLLIN)

    def _read_monitor(self) -> None:
        while self._monitor is not None and self._monitor.poll(0):
            event = recv_monitor_message(self._monitor)
            if event["event"] in (self._opened_event, zmq.Event.DISCONNECTED):
                opened = event["event"] == self._opened_event
                self._note_event(ConnectionEvent(opened, int(event["value"])))

    def _note_event(self, event: ConnectionEvent) -> None:
        self._events.append(event)

    def _send(
        self,
        routing: list[bytes],
        peer: str,
        kind: str,
        payload: Buffer,
        *,
        sequence: int | None,
        options: Mapping[str, bool] = MappingProxyType({}),
    ) -> tuple[int, zmq.MessageTracker | None]:
        """Send a message; return its sequence number and, with `track`, its tracker.

        `routing` holds the frames before the message (a ROUTER's client name). `peer` names the
        receiver in errors.
        """
        if sequence is None:
            sequence, self._next_sequence = self._next_sequence, self._next_sequence + 1
        try:
            frames = [*routing, *pack(kind, sequence, payload)]
            tracker = self._socket.send_multipart(frames, **options)
        except zmq.Again as error:
            raise PeerTimeoutError(
                f"sending {kind!r} to {peer}: it read nothing for "
                f"{format_seconds(self._send_timeout)}. Check that it runs and can be reached."
            ) from error
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:
                raise
            raise PeerLostError(
                f"sending {kind!r} to {peer}: it is not connected. Check that it still runs."
            ) from error
        return sequence, tracker
