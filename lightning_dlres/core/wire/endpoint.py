"""ZeroMQ sockets with deadlines, which carry messages.

`Endpoint` is one end of a connection: the base class of `Client` here, and of `Server`. Errors
about a received message name its sender. Every wait has a deadline.

Threads: only one thread at a time may use an endpoint, as ZeroMQ requires. One thread may create it
and hand it to another. Only `interrupt` may be called from any thread.
"""

from __future__ import annotations

import contextlib
import math
import socket
import time
from dataclasses import dataclass
from typing import Any

import zmq
from zmq.utils.monitor import recv_monitor_message

from lightning_dlres.core.errors import (
    ConfigError,
    PeerLostError,
    PeerTimeoutError,
    got_expected,
)
from lightning_dlres.core.units import format_seconds
from lightning_dlres.core.wire.addresses import has_port
from lightning_dlres.core.wire.keys import CurveKeys, check_key, use_keys
from lightning_dlres.core.wire.message import Buffer, Message, pack, protocol_error, unpack

# Domain of ZeroMQ's authentication protocol (ZAP).
ZAP_DOMAIN = "dlres"
# Bytes by which encryption makes a frame longer, at most.
ENCRYPTION_BYTES = 64
# Flag of all frames of a message but the last; an int, since flags of an enum are slow.
_MORE = int(zmq.SNDMORE)
# Time limit of ZeroMQ's handshake in milliseconds; a slower connection is closed.
_HANDSHAKE_MS = 10_000
# The kernel closes a connection if the other host is unreachable for 60 + 4 * 15 seconds.
_KEEPALIVE = {
    zmq.TCP_KEEPALIVE: 1,
    zmq.TCP_KEEPALIVE_IDLE: 60,
    zmq.TCP_KEEPALIVE_INTVL: 15,
    zmq.TCP_KEEPALIVE_CNT: 4,
}
# Frames of a message at a server, where ZeroMQ puts the client's name before header and payload. A
# client receives one frame less. Further frames are counted, but not stored.
_MAX_FRAMES = 3


@dataclass(frozen=True)
class ConnectionEvent:
    """A connection that was opened or closed.

    Attributes:
        opened: True if it was opened, False if it was closed.
        connection: The connection's id, as in `Message`. At a client it is 0 if `opened`, because
            ZeroMQ's event of a finished handshake has no id.
    """

    opened: bool
    connection: int


class Endpoint:
    """A socket of ZeroMQ with deadlines, interrupts and connection events.

    Args:
        kind: Type of the socket.
        send_timeout: Seconds that a send waits while the queue to the peer is full.
        copies: True if received payloads are copied; False: they are views of ZeroMQ's memory.
        beside: Endpoint whose ZeroMQ context this one shares, and whose `receive` also returns None
            when a message comes here, see `is_readable`; the same thread must use both. None: a
            context of its own.

    Attributes:
        is_readable: True if the last `receive` of the endpoint `beside` has seen a message here;
            False without one.
    """

    # Monitor event that announces a connection: for a server when TCP has connected, so that its
    # limits hold before the handshake; for a client only when messages can pass.
    _opened_event: zmq.Event

    def __init__(
        self,
        kind: zmq.SocketType,
        send_timeout: float,
        copies: bool = True,
        beside: Endpoint | None = None,
    ) -> None:
        self._copies, self._owns_context = copies, beside is None
        self._context: zmq.Context[zmq.Socket[bytes]]
        self._context = zmq.Context() if beside is None else beside._context
        self._socket = self._new_socket(kind)
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
        self._is_interrupted = self.is_readable = False
        self._neighbours: list[Endpoint] = []
        if beside is not None:
            beside._poller.register(self._socket, zmq.POLLIN)
            beside._neighbours.append(self)

    def _new_socket(self, kind: zmq.SocketType) -> zmq.Socket[bytes]:
        """Return a socket with the options that all endpoints need."""
        created = self._context.socket(kind)
        created.setsockopt(zmq.LINGER, 0)
        # Without a ZAP domain, ZeroMQ accepts any connecting program as a peer of its protocol
        # before 3.0. With a domain it refuses such peers. It calls a ZAP handler only if one was
        # started.
        created.setsockopt_string(zmq.ZAP_DOMAIN, ZAP_DOMAIN)
        created.setsockopt(zmq.HANDSHAKE_IVL, _HANDSHAKE_MS)
        for option, value in _KEEPALIVE.items():
            created.setsockopt(option, value)
        return created

    def receive(self, timeout: float) -> Message | None:
        """Return the next message, or None if none comes within `timeout` seconds.

        `interrupt` ends the wait earlier, as does a new connection event; the result is then None.

        Raises:
            ProtocolError: If a peer sent bytes that are not a message. They are discarded.
        """
        ready = self._poll(timeout)
        for neighbour in self._neighbours:
            neighbour.is_readable = neighbour._socket in ready
        if self._monitor in ready:
            self._read_monitor()
        if self._wake_reader.fileno() in ready:
            self._end_interrupt()
        elif self._socket in ready:
            return self._receive_message()
        return None

    def expect(self, timeout: float, description: str) -> Message:
        """Return the next message, waiting at most `timeout` seconds.

        Args:
            timeout: Longest wait, in seconds.
            description: Awaited message in the error, such as "the weights".

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
                    f"waited {format_seconds(timeout)} for {description} from "
                    f"{self._peer_label}, but no message came. Check that it runs and can be "
                    "reached, and that its keys match."
                )

    def interrupt(self) -> None:
        """Make the current or next `receive` return None at once; safe from any thread."""
        if self._is_interrupted:
            return
        self._is_interrupted = True
        # A full buffer means that an earlier interrupt is still pending. A closed socket means that
        # no thread waits any more.
        with contextlib.suppress(OSError):
            self._wake_writer.send(b"\0")

    def _end_interrupt(self) -> None:
        self._wake_reader.recv(4096)
        # An interrupt before this line needs no other byte: its reason is there already.
        self._is_interrupted = False

    def connection_events(self) -> list[ConnectionEvent]:
        """Return the connection events since the last call; empty without `monitor=True`."""
        self._read_monitor()
        events, self._events = self._events, []
        return events

    def close(self) -> None:
        """Close all sockets at once; unsent messages are lost. A second call does nothing."""
        if self._socket.closed:
            return
        if self._monitor is not None:
            self._socket.disable_monitor()
        if self._owns_context:
            self._context.destroy(linger=0)
        else:
            self._socket.close(linger=0)
        self._wake_reader.close()
        self._wake_writer.close()

    def _poll(self, timeout: float) -> dict[Any, int]:
        ready = dict(self._poller.poll(max(0, math.ceil(timeout * 1000))))
        if not ready:
            # An exception, as of a signal, may have ended `interrupt` before its byte was sent.
            self._is_interrupted = False
        return ready

    def _receive_message(self) -> Message:
        """Return the message that is ready to be read.

        Raises:
            ProtocolError: If its frames do not form a message.
        """
        frames, connection = self._receive_frames()
        parts: list[bytes | memoryview] = [frame.bytes for frame in frames[:-1]]
        parts.append(frames[-1].bytes if self._copies else frames[-1].buffer)
        return self._unpack(parts, connection)

    def _receive_frames(self) -> tuple[list[zmq.Frame], int]:
        """Return the frames that are ready to be read, and the id of their connection.

        Raises:
            ProtocolError: If there are too many frames, or the peer's protocol is too old.
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
            # ZeroMQ has no connection id for peers of its old protocols.
            raise protocol_error(
                self._peer_label, "a message of an old ZeroMQ protocol", "ZMTP 3"
            ) from None
        self._note_message(connection, nbytes)
        if count > _MAX_FRAMES:
            raise protocol_error(
                self._peer_label,
                f"more than {_MAX_FRAMES - 1} frames",
                "2 frames: a header and a payload",
            )
        return frames, connection

    def _note_message(self, connection: int, nbytes: int) -> None:
        """Count a received message, valid or not; only the server does so."""

    def _unpack(self, frames: list[bytes | memoryview], connection: int) -> Message:
        """Return the message of all frames; at a server the first one is the client's name."""
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
        details: bytes = b"",
        payload_checksum: int | None = None,
        is_tracked: bool = False,
    ) -> tuple[int, zmq.MessageTracker | None]:
        """Send a message; return its sequence number, and its tracker or None.

        Args:
            routing: Frames before the message: at a server the client's name, else none.
            peer: Name of the receiver, for errors.
            kind, payload, details: See `Message`.
            sequence: Sequence number; None for this socket's next one.
            payload_checksum: Checksum of the payload, if it is known.
            is_tracked: Do not copy the payload, and return a tracker of ZeroMQ's use of it.

        Raises:
            PeerTimeoutError: If the queue to the receiver stays full for the send timeout.
            PeerLostError: If the receiver is not connected to this server.
        """
        if sequence is None:
            sequence, self._next_sequence = self._next_sequence, self._next_sequence + 1
        try:
            header, body = pack(
                kind, sequence, payload, details=details, payload_checksum=payload_checksum
            )
            # `send_multipart` would make trackers of all frames.
            for frame in (*routing, header):
                self._socket.send(frame, _MORE)
            tracker = self._socket.send(body, 0, copy=not is_tracked, track=is_tracked)
        except zmq.Again as error:
            raise PeerTimeoutError(
                f"cannot send {kind!r} to {peer}: it read nothing for "
                f"{format_seconds(self._send_timeout)}. Check that it runs and can be reached."
            ) from error
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:
                raise
            raise PeerLostError(
                f"cannot send {kind!r} to {peer}: it is not connected. Check that it still runs."
            ) from error
        return sequence, tracker


class Client(Endpoint):
    """End of a connection that connects to a server, under a name. It reconnects automatically.

    It is a ZeroMQ DEALER socket. Unlike a server, it raises an error for an invalid message.

    Args:
        identity: Name of this client at the server, 1 to 255 bytes.
        address: Address of the server, such as "tcp://10.0.0.1:5555".
        server: Name of the server in error messages.
        curve: Keys of this client; needs `server_key`.
        server_key: Public key of the server; needs `curve`.
        max_frame_bytes: Largest frame of a message from the server, in bytes; None: no limit.
        send_timeout: Seconds that a send waits while the queue to the server is full.
        monitor: Report connections in `connection_events`.
        copies, beside: See `Endpoint`.

    Raises:
        ConfigError: If `identity` has a wrong length, if ZeroMQ cannot connect to `address`, if
            `server_key` is not a key, or if only one of `curve` and `server_key` is given.
    """

    _opened_event = zmq.Event.HANDSHAKE_SUCCEEDED

    def __init__(
        self,
        identity: str,
        address: str,
        *,
        server: str = "the server",
        curve: CurveKeys | None = None,
        server_key: bytes | None = None,
        max_frame_bytes: int | None = None,
        send_timeout: float = 30.0,
        monitor: bool = False,
        copies: bool = True,
        beside: Client | None = None,
    ) -> None:
        if (curve is None) != (server_key is None):
            raise ConfigError(
                "curve and server_key must be given together, got only one. Pass both."
            )
        if server_key is not None:
            check_key("server_key", server_key)
        if not 0 < len(identity.encode()) < 256:
            raise ConfigError(got_expected("identity", identity, "1 to 255 bytes", '"rank 1"'))
        super().__init__(zmq.DEALER, send_timeout, copies, beside)
        self._peer_label, self._server_address = f"{server} ({address})", address
        self._socket.setsockopt(zmq.IDENTITY, identity.encode())
        if max_frame_bytes is not None:
            more = 0 if curve is None else ENCRYPTION_BYTES
            self._socket.setsockopt(zmq.MAXMSGSIZE, max_frame_bytes + more)
        self._socket.setsockopt(zmq.IPV6, int("[" in address))
        if curve is not None and server_key is not None:
            use_keys(self._socket, curve, server_key)
        if monitor:
            self._start_monitor()
        try:
            if address.startswith("tcp:") and not has_port(address):
                raise ValueError("no port from 1 to 65535")
            self._socket.connect(address)
        except (zmq.ZMQError, ValueError) as error:
            self.close()
            raise ConfigError(
                got_expected(
                    "address", address, f"that of a server ({error})", '"tcp://10.0.0.1:5555"'
                )
            ) from error

    def send(
        self,
        kind: str,
        payload: Buffer = b"",
        *,
        sequence: int | None = None,
        details: bytes = b"",
    ) -> int:
        """Send to the server; return the sequence number: the given one, or the next one.

        Raises:
            PeerTimeoutError: If the server does not read and the queue is full.
        """
        peer = self._peer_label
        return self._send([], peer, kind, payload, sequence=sequence, details=details)[0]

    def reconnect(self) -> None:
        """Replace the connection by a new one; messages on their way may be lost.

        ZeroMQ keeps a connection whose name another client has taken at the server, although
        nothing passes it any more. It also takes minutes to notice that a host is gone.
        """
        self._socket.disconnect(self._server_address)
        self._socket.connect(self._server_address)

    @property
    def is_writable(self) -> bool:
        """True if a send would not wait, since the queue to the server is not full."""
        return bool(int(self._socket.getsockopt(zmq.EVENTS)) & zmq.POLLOUT)

    def send_tracked(
        self,
        kind: str,
        payload: Buffer,
        *,
        sequence: int | None = None,
        details: bytes,
        payload_checksum: int | None = None,
    ) -> zmq.MessageTracker:
        """Send without copying the payload; return a tracker of ZeroMQ's use of it.

        `sequence` is the sequence number, or None for the next one. `payload_checksum` is the
        checksum of the payload, if it is known.

        Raises:
            PeerTimeoutError: If the server does not read and the queue is full.
        """
        tracker = self._send(
            [],
            self._peer_label,
            kind,
            payload,
            sequence=sequence,
            details=details,
            payload_checksum=payload_checksum,
            is_tracked=True,
        )[1]
        assert tracker is not None
        return tracker
