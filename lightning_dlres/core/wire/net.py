"""The one place that opens ZeroMQ sockets: addresses, keys, deadlines and checksums live here.

A `Server` talks to many named `Client`s, in messages of two frames (see `frames`). No wait is
without a deadline. What a server sends in error is an error at its client. What a client sends in
error is refused: counted, logged now and then, and without effect on the other clients. A server
never waits for a client, and bounds what each may send.

Threads: a server or client belongs to one thread at a time, as ZeroMQ sockets do. It may be made
in one thread and handed to another; only `interrupt` may be called from anywhere.
"""

from __future__ import annotations

import contextlib
import ipaddress
import math
import socket
import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import zmq
import zmq.auth
from zmq.auth.thread import ThreadAuthenticator
from zmq.utils.monitor import recv_monitor_message

from lightning_dlres.core.errors import (
    ConfigError,
    PeerLostError,
    PeerTimeoutError,
    ProtocolError,
    got_expected,
)
from lightning_dlres.core.units import format_seconds
from lightning_dlres.core.wire.connections import Connections
from lightning_dlres.core.wire.frames import Buffer, Message, broken, pack, unpack
from lightning_dlres.core.wire.keys import CurveKeys, check_key
from lightning_dlres.core.wire.refused_messages import Refusals

_ZAP_DOMAIN = "dlres"
_PORTS = range(1 << 16)
# A connection that does not get through ZeroMQ's greeting is closed.
_HANDSHAKE_MS = 10_000
# A peer whose machine or network is gone is noticed by the kernel, after idle + interval * count.
_KEEPALIVE = {
    zmq.TCP_KEEPALIVE: 1,
    zmq.TCP_KEEPALIVE_IDLE: 60,
    zmq.TCP_KEEPALIVE_INTVL: 15,
    zmq.TCP_KEEPALIVE_CNT: 4,
}
# Frames of a message: the sender's name, header and payload. Of more only the number is noted.
_MOST_FRAMES = 3
# How often the connections of a server are checked.
_CHECK_SECONDS = 0.1
_TRACKED = MappingProxyType({"copy": False, "track": True})


@dataclass(frozen=True)
class SocketLimits:
    """What a server bears from its clients.

    Attributes:
        message_bytes: largest frame of a message; a larger one closes its connection.
        unread_bytes: what a connection may send beyond whole messages that were read.
        connections: how many clients there may be at one time.
        queued: messages that wait for the server, and for each client, at most.
    """

    message_bytes: int = 64 << 20
    unread_bytes: int = 256 << 20
    connections: int = 1024
    queued: int = 1000


@dataclass(frozen=True)
class ConnectionEvent:
    """A TCP connection came up or went down; `connection` as in `Message` (0 at a client)."""

    opened: bool
    connection: int


class _Endpoint:
    """What both sides share: a socket in a context of its own, and waiting with a deadline."""

    _opened_event: zmq.Event

    def __init__(self, kind: zmq.SocketType, send_timeout: float) -> None:
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket = self._context.socket(kind)
        self._socket.setsockopt(zmq.LINGER, 0)
        # With a domain ZeroMQ refuses peers of its protocol before 3.0, which anything that opens
        # a connection can be taken for. No handler is asked unless one was started.
        self._socket.setsockopt_string(zmq.ZAP_DOMAIN, _ZAP_DOMAIN)
        self._socket.setsockopt(zmq.HANDSHAKE_IVL, _HANDSHAKE_MS)
        for option, value in _KEEPALIVE.items():
            self._socket.setsockopt(option, value)
        self._socket.setsockopt(zmq.SNDTIMEO, round(send_timeout * 1000))
        self._send_timeout = send_timeout
        self._sequence = 0
        self._peers = "a peer"
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

        None comes early after `interrupt`, or when `connection_events` has something new.

        Raises:
            ProtocolError: a peer sent something that is not a message; it is dropped.
        """
        ready = self._poll(timeout)
        if self._monitor in ready:
            self._read_monitor()
        if self._wake_reader.fileno() in ready:
            self._wake_reader.recv(4096)
        elif self._socket in ready:
            return self._take_in()
        return None

    def expect(self, timeout: float, what: str) -> Message:
        """Return the next message; `what` says in the error what was waited for.

        Raises:
            PeerTimeoutError: nothing came within `timeout` seconds; the message names the peer.
            ProtocolError: see `receive`.
        """
        deadline = time.monotonic() + timeout
        while True:
            left = deadline - time.monotonic()
            if message := self.receive(left):
                return message
            if left <= 0:
                raise PeerTimeoutError(
                    f"waited {format_seconds(timeout)} for {what} from {self._peers}, but nothing "
                    "came. Check that it runs and can be reached, and that its keys match."
                )

    def interrupt(self) -> None:
        """Make the current or next `receive` return None at once; for any thread."""
        # Full: the owner has yet to see an earlier call. Closed: nobody waits any more.
        with contextlib.suppress(OSError):
            self._wake_writer.send(b"\0")

    def connection_events(self) -> list[ConnectionEvent]:
        """Return what happened to TCP connections since the last call (with `monitor=True`)."""
        self._read_monitor()
        events, self._events = self._events, []
        return events

    def close(self) -> None:
        """Close everything at once; unsent messages are lost. May be called again."""
        if self._context.closed:
            return
        if self._monitor is not None:
            self._socket.disable_monitor()
        self._context.destroy(linger=0)
        self._wake_reader.close()
        self._wake_writer.close()

    def _poll(self, timeout: float) -> dict[Any, int]:
        return dict(self._poller.poll(max(0, math.ceil(timeout * 1000))))

    def _take_in(self) -> Message:
        """Return the message that has come, whatever it is made of.

        Raises:
            ProtocolError: it is none.
        """
        frame = self._socket.recv(copy=False)
        frames, count, nbytes = [frame], 1, len(frame)
        while frame.more:
            frame = self._socket.recv(copy=False)
            count, nbytes = count + 1, nbytes + len(frame)
            if count <= _MOST_FRAMES:
                frames.append(frame)
        try:
            connection = int(frames[-1].get(zmq.SRCFD))
        except zmq.ZMQError:
            # ZeroMQ knows nothing about peers of its old protocols.
            raise broken(self._peers, "a message of an old ZeroMQ", "ZMTP 3") from None
        self._note_message(connection, nbytes)
        if count > _MOST_FRAMES:
            raise broken(self._peers, f"{count} frames", "a header and a payload")
        return self._read([frame.bytes for frame in frames], connection)

    def _note_message(self, connection: int, nbytes: int) -> None:
        pass

    def _read(self, frames: list[bytes], connection: int) -> Message:
        return unpack(frames, self._peers, connection)

    def _watch(self) -> None:
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
        to: list[bytes],
        peer: str,
        kind: str,
        payload: Buffer,
        number: int | None,
        options: Mapping[str, bool] = MappingProxyType({}),
    ) -> tuple[int, zmq.MessageTracker | None]:
        if number is None:
            number, self._sequence = self._sequence, self._sequence + 1
        try:
            frames = [*to, *pack(kind, number, payload)]
            tracker = self._socket.send_multipart(frames, **options)
        except zmq.Again as error:
            raise PeerTimeoutError(
                f"sending {kind!r} to {peer}: it took nothing in for "
                f"{format_seconds(self._send_timeout)}. Check that it runs and can be reached."
            ) from error
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:
                raise
            raise PeerLostError(
                f"sending {kind!r} to {peer}: it is not connected. Check that it still runs."
            ) from error
        return number, tracker


class Server(_Endpoint):
    """The side that others connect to (ROUTER); a client that comes back keeps its name.

    `bind` is a numeric address or interface of this machine, `port` 0 lets the system choose; with
    `path`, a Unix socket is bound there instead, for processes of this machine that may reach it.
    `curve` encrypts and authenticates; then either `allowed` lists the clients' public keys, or
    `allow_any=True` lets in whoever knows the server's public key. Without `curve` only loopback
    addresses are bound, unless `insecure=True`.

    `limits` bound what clients may send. With `monitor` connections are reported. `refusals` counts
    what was refused.

    Raises:
        ConfigError: the address cannot be bound, CURVE is asked for without saying for whom, or
            strangers could reach the address.
    """

    _opened_event = zmq.Event.ACCEPTED

    def __init__(
        self,
        *,
        bind: str = "127.0.0.1",
        port: int = 0,
        path: Path | None = None,
        curve: CurveKeys | None = None,
        allowed: Collection[bytes] = (),
        allow_any: bool = False,
        insecure: bool = False,
        limits: SocketLimits | None = None,
        monitor: bool = False,
    ) -> None:
        if curve is None and path is None and not (insecure or is_loopback(bind)):
            raise ConfigError(
                f"bind must be a loopback address where no keys are given, got {bind!r}. Give keys "
                "(`dlres store keys` writes them), or insecure=True (--insecure) where everyone "
                "who can reach this address may use it."
            )
        if curve is None and (allowed or allow_any):
            raise ConfigError(
                got_expected("curve", None, "keys of the server", "curve=CurveKeys.generate()")
            )
        if curve is not None and bool(allowed) == allow_any:
            raise ConfigError(
                "CURVE without saying who may enter: got "
                f"{len(allowed)} allowed keys and allow_any={allow_any}, expected exactly one of "
                "them. List the clients' public keys in `allowed`, or pass allow_any=True."
            )
        for key in allowed:
            check_key("allowed", key)
        if port not in _PORTS:
            # ZeroMQ would take the lowest 16 bits for another port.
            raise ConfigError(got_expected("port", port, f"0 to {_PORTS[-1]}", "port=5570"))
        # Whoever does not read must not keep the others waiting.
        super().__init__(zmq.ROUTER, send_timeout=0.0)
        self.refusals = Refusals()
        self._reports_events = monitor
        limits = limits or SocketLimits()
        self._connections = Connections(
            limits.connections, limits.unread_bytes, lambda reason: self.refusals.note(reason)
        )
        self._next_check = 0.0
        self._socket.setsockopt(zmq.MAXMSGSIZE, limits.message_bytes)
        self._socket.setsockopt(zmq.SNDHWM, limits.queued)
        self._socket.setsockopt(zmq.RCVHWM, limits.queued)
        self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self._socket.setsockopt(zmq.ROUTER_HANDOVER, 1)
        self._authenticator: ThreadAuthenticator | None = None
        if curve is not None:
            self._authenticate(curve, frozenset(allowed))
        self._watch()
        if path is None:
            host = f"[{bind}]" if ":" in bind else bind
            self._socket.setsockopt(zmq.IPV6, int(":" in bind))
            self._bind(
                f"tcp://{host}:{port or '*'}",
                f"{bind} port {port or 'any'}",
                "a free port and a numeric address or interface of this machine; see `ip address`",
            )
        else:
            expected = "a directory that can be written to, and a path of about 100 bytes at most"
            self._bind(f"ipc://{path}", str(path), expected)
        self._endpoint = self._socket.getsockopt_string(zmq.LAST_ENDPOINT).rstrip("\0")
        own_port = int(self._endpoint.rpartition(":")[2]) if path is None else 0
        self._connections.address = own_port or str(path)
        self._peers = f"a client of {self._endpoint}"

    @property
    def endpoint(self) -> str:
        """Where clients connect to, such as "tcp://127.0.0.1:40123"."""
        return self._endpoint

    def receive(self, timeout: float) -> Message | None:
        """Return the next message, or None after `timeout` seconds; what is no message is refused.

        None comes early after `interrupt`, after a refusal, or when `connection_events` has
        something new.
        """
        try:
            return super().receive(timeout)
        except ProtocolError as error:
            self.refusals.note(error)
            return None

    def send(
        self, peer: str, kind: str, payload: Buffer = b"", *, sequence: int | None = None
    ) -> int:
        """Send to a client by name; return the sequence number (given, or the next of this socket).

        Raises:
            PeerLostError: no such client is connected.
            PeerTimeoutError: so many messages wait for this client that no more may.
        """
        return self._send([peer.encode()], peer, kind, payload, sequence)[0]

    def send_tracked(
        self, peer: str, kind: str, payload: Buffer, *, sequence: int
    ) -> zmq.MessageTracker:
        """Send without copying the payload; the tracker is done when ZeroMQ has let go of it.

        Raises:
            PeerLostError: no such client is connected.
            PeerTimeoutError: so many messages wait for this client that no more may.
        """
        tracker = self._send([peer.encode()], peer, kind, payload, sequence, _TRACKED)[1]
        assert tracker is not None
        return tracker

    def acknowledged(self, connection: int) -> int | None:
        """Return how many bytes a client has taken in; None where the kernel does not say."""
        return self._connections.acknowledged(connection)

    def drop(self, connection: int, reason: str) -> None:
        """Close a client's connection, and forget what waits for it."""
        self._connections.drop(connection, reason)

    def close(self) -> None:
        """Close everything at once; unsent messages are lost. May be called again."""
        if self._authenticator is not None:
            self._authenticator.stop()
        self._connections.close()
        super().close()

    def _poll(self, timeout: float) -> dict[Any, int]:
        until = time.monotonic() + timeout
        while True:
            now = time.monotonic()
            if now >= self._next_check:
                self._next_check = now + _CHECK_SECONDS
                self._connections.check()
            ready = super()._poll(min(until - now, _CHECK_SECONDS))
            if ready or until - now <= _CHECK_SECONDS:
                return ready

    def _note_message(self, connection: int, nbytes: int) -> None:
        self._connections.delivered(connection, nbytes)

    def _note_event(self, event: ConnectionEvent) -> None:
        if event.opened:
            self._connections.opened(event.connection)
        else:
            self._connections.closed(event.connection)
        if self._reports_events:
            super()._note_event(event)

    def _bind(self, endpoint: str, where: str, expected: str) -> None:
        try:
            self._socket.bind(endpoint)
        except (zmq.ZMQError, ValueError) as error:
            self.close()
            raise ConfigError(f"listening on {where}: {error}. Expected {expected}.") from error

    def _read(self, frames: list[bytes], connection: int) -> Message:
        try:
            peer = frames[0].decode()
        except UnicodeDecodeError as error:
            raise broken(self._peers, f"the name {frames[0]!r}", "a name in UTF-8") from error
        return unpack(frames[1:], peer, connection)

    def _authenticate(self, curve: CurveKeys, allowed: frozenset[bytes]) -> None:
        self._authenticator = ThreadAuthenticator(self._context)
        self._authenticator.start()
        if allowed:
            self._authenticator.configure_curve_callback(_ZAP_DOMAIN, _Whitelist(allowed))
        else:
            self._authenticator.configure_curve(_ZAP_DOMAIN, zmq.auth.CURVE_ALLOW_ANY)
        self._socket.setsockopt(zmq.CURVE_SERVER, 1)
        self._socket.setsockopt(zmq.CURVE_SECRETKEY, curve.secret)


class Client(_Endpoint):
    """The side that connects (DEALER), under a name; it reconnects by itself.

    `identity` names this client at the server; `server` names the server in errors here. With
    `curve`, `server_key` is the server's public key. `largest` bounds the bytes of a message from
    the server; None: nothing does. `send_timeout` in seconds bounds a send to a server that does
    not read.

    Raises:
        ConfigError: the endpoint is no address, or only one of `curve` and `server_key` is there.
    """

    _opened_event = zmq.Event.HANDSHAKE_SUCCEEDED

    def __init__(
        self,
        identity: str,
        endpoint: str,
        *,
        server: str = "the server",
        curve: CurveKeys | None = None,
        server_key: bytes | None = None,
        largest: int | None = None,
        send_timeout: float = 30.0,
        monitor: bool = False,
    ) -> None:
        if (curve is None) != (server_key is None):
            raise ConfigError("CURVE needs both `curve` and `server_key`; got one. Pass the other.")
        if server_key is not None:
            check_key("server_key", server_key)
        if not 0 < len(identity.encode()) < 256:
            raise ConfigError(got_expected("identity", identity, "1 to 255 bytes", '"rank 1"'))
        super().__init__(zmq.DEALER, send_timeout)
        self._peers = f"{server} ({endpoint})"
        self._socket.setsockopt(zmq.IDENTITY, identity.encode())
        self._socket.setsockopt(zmq.MAXMSGSIZE, -1 if largest is None else largest)
        self._socket.setsockopt(zmq.IPV6, int("[" in endpoint))
        if curve is not None and server_key is not None:
            self._socket.setsockopt(zmq.CURVE_SERVERKEY, server_key)
            self._socket.setsockopt(zmq.CURVE_PUBLICKEY, curve.public)
            self._socket.setsockopt(zmq.CURVE_SECRETKEY, curve.secret)
        if monitor:
            self._watch()
        try:
            if endpoint.startswith("tcp:") and not _has_port(endpoint):
                raise ValueError("no port from 1 to 65535")
            self._socket.connect(endpoint)
        except (zmq.ZMQError, ValueError) as error:
            self.close()
            raise ConfigError(
                got_expected("endpoint", endpoint, f"an address ({error})", '"tcp://10.0.0.1:5555"')
            ) from error

    def send(self, kind: str, payload: Buffer = b"", *, sequence: int | None = None) -> int:
        """Send to the server; return the sequence number (given, or the next of this socket).

        Raises:
            PeerTimeoutError: the server takes nothing in and the queue is full.
        """
        return self._send([], self._peers, kind, payload, sequence)[0]


def is_loopback(address: str) -> bool:
    """Return whether only processes of this machine can reach a numeric address."""
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:
        return False


def _has_port(endpoint: str) -> bool:
    port = endpoint.rpartition(":")[2]
    return port.isdecimal() and int(port) in _PORTS[1:]


class _Whitelist:
    """Says to ZeroMQ's authenticator whose public key may enter."""

    def __init__(self, allowed: frozenset[bytes]) -> None:
        self._allowed = allowed

    def callback(self, domain: str, key: bytes) -> bool:
        return key in self._allowed
