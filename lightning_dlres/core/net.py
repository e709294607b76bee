"""The one place that opens ZeroMQ sockets: addresses, keys, deadlines and checksums live here.

A `Server` talks to many named `Client`s, in messages of two frames (see `frames`). What does not
fit raises an error that names the peer, and no wait is without a deadline.

Threads: a server or client belongs to one thread at a time, as ZeroMQ sockets do. It may be made
in one thread and handed to another; only `interrupt` may be called from anywhere.
"""

from __future__ import annotations

import contextlib
import math
import socket
import time
from collections.abc import Collection
from dataclasses import dataclass, field
from pathlib import Path

import zmq
import zmq.auth
from zmq.auth.thread import ThreadAuthenticator
from zmq.utils.monitor import recv_monitor_message

from lightning_dlres.core.errors import ConfigError, PeerLostError, PeerTimeoutError, got_expected
from lightning_dlres.core.frames import Buffer, Message, broken, pack, unpack
from lightning_dlres.core.units import format_seconds

_ZAP_DOMAIN = "dlres"


@dataclass(frozen=True)
class CurveKeys:
    """A CURVE key pair, Z85 text of 40 bytes each; the secret is kept out of logs."""

    public: bytes
    secret: bytes = field(repr=False)

    @classmethod
    def generate(cls) -> CurveKeys:
        """Return a fresh pair."""
        return cls(*zmq.curve_keypair())


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
        ready = dict(self._poller.poll(max(0, math.ceil(timeout * 1000))))
        if self._monitor in ready:
            self._read_monitor()
        if self._wake_reader.fileno() in ready:
            self._wake_reader.recv(4096)
        elif self._socket in ready:
            frames = self._socket.recv_multipart(copy=False)
            return self._read([frame.bytes for frame in frames], int(frames[-1].get(zmq.SRCFD)))
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
                self._events.append(ConnectionEvent(opened, int(event["value"])))

    def _send(
        self, to: list[bytes], peer: str, kind: str, payload: Buffer, number: int | None
    ) -> int:
        if number is None:
            number, self._sequence = self._sequence, self._sequence + 1
        try:
            self._socket.send_multipart([*to, *pack(kind, number, payload)])
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
        return number


class Server(_Endpoint):
    """The side that others connect to (ROUTER); a client that comes back keeps its name.

    `bind` is a numeric address or interface of this machine, `port` 0 lets the system choose; with
    `path`, a Unix socket is bound there instead, for processes of this machine that may reach it.
    `curve` encrypts and authenticates; then either `allowed` lists the clients' public keys, or
    `allow_any=True` lets in whoever knows the server's public key. `send_timeout` in seconds bounds
    a send to a client that does not read.

    Raises:
        ConfigError: the address cannot be bound, or CURVE is asked for without saying for whom.
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
        send_timeout: float = 30.0,
        monitor: bool = False,
    ) -> None:
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
        super().__init__(zmq.ROUTER, send_timeout)
        self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self._socket.setsockopt(zmq.ROUTER_HANDOVER, 1)
        self._authenticator: ThreadAuthenticator | None = None
        if curve is not None:
            self._authenticate(curve, frozenset(allowed))
        if monitor:
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
        self._peers = f"a client of {self._endpoint}"

    @property
    def endpoint(self) -> str:
        """Where clients connect to, such as "tcp://127.0.0.1:40123"."""
        return self._endpoint

    def send(
        self, peer: str, kind: str, payload: Buffer = b"", *, sequence: int | None = None
    ) -> int:
        """Send to a client by name; return the sequence number (given, or the next of this socket).

        Raises:
            PeerLostError: no such client is connected.
            PeerTimeoutError: the client reads too slowly.
        """
        return self._send([peer.encode()], peer, kind, payload, sequence)

    def close(self) -> None:
        """Close everything at once; unsent messages are lost. May be called again."""
        if self._authenticator is not None:
            self._authenticator.stop()
        super().close()

    def _bind(self, endpoint: str, where: str, expected: str) -> None:
        try:
            self._socket.bind(endpoint)
        except zmq.ZMQError as error:
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
        self._socket.setsockopt_string(zmq.ZAP_DOMAIN, _ZAP_DOMAIN)
        self._socket.setsockopt(zmq.CURVE_SERVER, 1)
        self._socket.setsockopt(zmq.CURVE_SECRETKEY, curve.secret)


class Client(_Endpoint):
    """The side that connects (DEALER), under a name; it reconnects by itself.

    `identity` names this client at the server; `server` names the server in errors here. With
    `curve`, `server_key` is the server's public key. Other arguments are as for `Server`.

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
        send_timeout: float = 30.0,
        monitor: bool = False,
    ) -> None:
        if (curve is None) != (server_key is None):
            raise ConfigError("CURVE needs both `curve` and `server_key`; got one. Pass the other.")
        if not 0 < len(identity.encode()) < 256:
            raise ConfigError(got_expected("identity", identity, "1 to 255 bytes", '"rank 1"'))
        super().__init__(zmq.DEALER, send_timeout)
        self._peers = f"{server} ({endpoint})"
        self._socket.setsockopt(zmq.IDENTITY, identity.encode())
        self._socket.setsockopt(zmq.IPV6, int("[" in endpoint))
        if curve is not None and server_key is not None:
            self._socket.setsockopt(zmq.CURVE_SERVERKEY, server_key)
            self._socket.setsockopt(zmq.CURVE_PUBLICKEY, curve.public)
            self._socket.setsockopt(zmq.CURVE_SECRETKEY, curve.secret)
        if monitor:
            self._watch()
        try:
            self._socket.connect(endpoint)
        except zmq.ZMQError as error:
            self.close()
            raise ConfigError(
                got_expected("endpoint", endpoint, f"an address ({error})", '"tcp://10.0.0.1:5555"')
            ) from error

    def send(self, kind: str, payload: Buffer = b"", *, sequence: int | None = None) -> int:
        """Send to the server; return the sequence number (given, or the next of this socket).

        Raises:
            PeerTimeoutError: the server takes nothing in and the queue is full.
        """
        return self._send([], self._peers, kind, payload, sequence)


class _Whitelist:
    """Says to ZeroMQ's authenticator whose public key may enter."""

    def __init__(self, allowed: frozenset[bytes]) -> None:
        self._allowed = allowed

    def callback(self, domain: str, key: bytes) -> bool:
        return key in self._allowed
