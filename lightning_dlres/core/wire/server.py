"""The server side of a connection: a ZeroMQ ROUTER socket for many named clients.

A server refuses invalid messages: it counts them, logs some of them, and sends no reply. They do
not affect other clients. A server never waits for a client, and limits how much each may send.
"""

from __future__ import annotations

import ipaddress
import math
import socket
import time
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import zmq
import zmq.auth
from zmq.auth.thread import ThreadAuthenticator

from lightning_dlres.core.checks import whole_number
from lightning_dlres.core.errors import ConfigError, ProtocolError, got_expected
from lightning_dlres.core.wire.addresses import PORTS
from lightning_dlres.core.wire.connections import Connections, connection_limit, needed_files
from lightning_dlres.core.wire.endpoint import (
    ENCRYPTION_BYTES,
    ZAP_DOMAIN,
    ConnectionEvent,
    Endpoint,
)
from lightning_dlres.core.wire.keys import CurveKeys, check_key
from lightning_dlres.core.wire.message import Buffer, Message, protocol_error, unpack
from lightning_dlres.core.wire.refused_messages import Refusals

# Seconds between two checks of the connections' limits.
_CHECK_SECONDS = 0.1
# Begins the names that ZeroMQ makes: that of a connection whose client, by the same name, has
# connected again, and that of a client without a name. No client of ours has such a name.
_GENERATED_NAME = b"\0"


@dataclass(frozen=True, kw_only=True)
class SocketLimits:
    """Limits of the traffic and the number of a server's clients.

    Attributes:
        frame_bytes: Largest frame of a message, in bytes; a larger one closes its connection.
        unread_bytes: Bytes that the server may have received from a connection, but not yet read as
            whole messages.
        connections: Number of connections at one time.
        queued: Largest number of messages in the queue from each client, and in the queue to it.
    """

    frame_bytes: int = 64 << 20
    unread_bytes: int = 256 << 20
    connections: int = 1024
    queued: int = 1000

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            whole_number(name, value, f"{name}=1000")

    def for_clients(self, count: int, name: str, *, connections_each: int = 1) -> SocketLimits:
        """Return these limits, if a server of this process can hold so many clients at one time.

        Otherwise it would close the connections of some, which would wait for their timeout.

        Args:
            count: Number of clients.
            name: Name of the number in the error, such as "workers".
            connections_each: Number of connections of each client.

        Raises:
            ConfigError: If it cannot.
        """
        limit, needed = connection_limit(self.connections), count * connections_each
        if needed <= limit:
            return self
        fix = f"Use at most {self.connections // connections_each}"
        if needed <= self.connections:
            fix = (
                f"Run `ulimit -n {needed_files(needed)}` on the server's host before the process "
                "starts: it may open too few files"
            )
        most = limit // connections_each
        raise ConfigError(f"{name} must be at most {most} for this server, got {count}. {fix}.")


class Server(Endpoint):
    """End of a connection that clients connect to. A client that reconnects keeps its name.

    Args:
        bind: Numeric address of this machine, or name of its interface.
        port: TCP port; 0 lets the system choose one.
        path: Path of a Unix socket, for local processes, in the place of `bind` and `port`.
        curve: Keys of the server, which encrypt and authenticate all traffic. Without keys, only
            loopback addresses are bound, unless `insecure=True`.
        allowed: Public keys of the clients that may connect; needs `curve`.
        allow_any: Admit every client that knows the server's public key; needs `curve`.
        insecure: Bind any address without keys.
        limits: Limits of the clients' traffic.
        monitor: Report connections in `connection_events`.
        copies: See `Endpoint`.

    Attributes:
        refusals: Counter of refused messages and connections.

    Raises:
        ConfigError: If `port` is out of range, or the address cannot be bound; if other hosts could
            reach the address without keys; if a key in `allowed` is invalid; or unless exactly one
            of `allowed` and `allow_any` is given with `curve`, and none of them without it.
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
        copies: bool = True,
    ) -> None:
        if curve is None and path is None and not (insecure or is_loopback(bind)):
            raise ConfigError(
                f"bind must be a loopback address where no keys are given, got {bind!r}. Give keys "
                "(`dlres store keys` and `dlres ps keygen` write them), or insecure=True "
                "(--insecure) to accept every process that can reach this address."
            )
        if curve is None and (allowed or allow_any):
            raise ConfigError(
                got_expected("curve", None, "keys of the server", "curve=CurveKeys.generate()")
            )
        if curve is not None and bool(allowed) == allow_any:
            raise ConfigError(
                "With curve, exactly one of allowed and allow_any must be given, got "
                f"{len(allowed)} allowed keys and allow_any={allow_any}. List the clients' public "
                "keys in `allowed`, or pass allow_any=True."
            )
        for key in allowed:
            check_key("allowed", key)
        if port not in PORTS:
            # ZeroMQ would bind the port of the number's lowest 16 bits.
            raise ConfigError(got_expected("port", port, f"0 to {PORTS[-1]}", "port=5570"))
        # A timeout of 0: a client that does not read must not delay the replies to other clients.
        super().__init__(zmq.ROUTER, send_timeout=0.0, copies=copies)
        self.refusals = Refusals()
        self._reports_events = monitor
        limits = limits or SocketLimits()
        self._connections = Connections(limits.connections, limits.unread_bytes, self.refusals.note)
        self._next_check = 0.0
        more = 0 if curve is None else ENCRYPTION_BYTES
        self._socket.setsockopt(zmq.MAXMSGSIZE, limits.frame_bytes + more)
        self._socket.setsockopt(zmq.SNDHWM, limits.queued)
        self._socket.setsockopt(zmq.RCVHWM, limits.queued)
        self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self._socket.setsockopt(zmq.ROUTER_HANDOVER, 1)
        self._authenticator: ThreadAuthenticator | None = None
        if curve is not None:
            self._authenticate(curve, frozenset(allowed))
        self._start_monitor()
        if path is None:
            host = f"[{bind}]" if ":" in bind else bind
            self._socket.setsockopt(zmq.IPV6, int(":" in bind))
            self._bind(
                f"tcp://{host}:{port or '*'}",
                f"{bind} port {port or 'any'}",
                "a free port and a numeric address or interface of this machine; see `ip address`",
            )
        else:
            fix = "a path of about 100 bytes at most in a writable directory"
            self._bind(f"ipc://{path}", str(path), fix)
        self._address = self._socket.getsockopt_string(zmq.LAST_ENDPOINT).rstrip("\0")
        own_port = int(self._address.rpartition(":")[2]) if path is None else 0
        self._connections.address = own_port or str(path)
        self._peer_label = f"a client of {self._address}"

    @property
    def address(self) -> str:
        """Address that clients connect to, such as "tcp://127.0.0.1:40123"."""
        return self._address

    def receive(self, timeout: float) -> Message | None:
        """Return the next message, or None if none comes within `timeout` seconds.

        An invalid message is refused. One that had come over a connection before its client made
        a new one is dropped. Both end the wait earlier, as do `interrupt`, and a connection that
        is opened or closed; the result is then None.
        """
        try:
            return super().receive(timeout)
        except _ReplacedConnectionError:
            return None
        except ProtocolError as error:
            self.refusals.note(error)
            return None

    def send(
        self,
        peer: str,
        kind: str,
        payload: Buffer = b"",
        *,
        sequence: int | None = None,
        details: bytes = b"",
    ) -> int:
        """Send to a client by name; return the sequence number: the given one, or the next one.

        Raises:
            PeerLostError: If no such client is connected.
            PeerTimeoutError: If the client's queue is full.
        """
        return self._send([peer.encode()], peer, kind, payload, sequence=sequence, details=details)[
            0
        ]

    def send_tracked(
        self,
        peer: str,
        kind: str,
        payload: Buffer,
        *,
        sequence: int,
        details: bytes = b"",
        payload_checksum: int | None = None,
    ) -> zmq.MessageTracker:
        """Send without copying the payload; return a tracker of ZeroMQ's use of it.

        The tracker is done when ZeroMQ no longer holds the payload. `payload_checksum` is its
        checksum, if it is known.

        Raises:
            PeerLostError: If no such client is connected.
            PeerTimeoutError: If the client's queue is full.
        """
        tracker = self._send(
            [peer.encode()],
            peer,
            kind,
            payload,
            sequence=sequence,
            details=details,
            payload_checksum=payload_checksum,
            is_tracked=True,
        )[1]
        assert tracker is not None
        return tracker

    def acknowledged_bytes(self, connection: int) -> int | None:
        """Return the number of bytes that a client's host acknowledged; None if it is not known.

        Args:
            connection: Id of the connection, as in `Message`.
        """
        return self._connections.acknowledged_bytes(connection)

    def connection_number(self, connection: int) -> int | None:
        """Return the number of the connection with this id; None if it is closed.

        A later connection may reuse the id, but never the number.
        """
        return self._connections.number(connection)

    def trust(self, connection: int) -> None:
        """Lift the limit of unread bytes for a client that has proved its identity."""
        self._connections.trust(connection)

    def drop(self, connection: int, reason: str) -> None:
        """Close a client's connection and discard the messages queued for it.

        A later connection may have reused the id: compare `connection_number` first.
        """
        self._connections.drop(connection, reason)

    def close(self) -> None:
        """Close all sockets at once; unsent messages are lost. A second call does nothing."""
        if self._authenticator is not None:
            self._authenticator.stop()
        self._connections.close()
        super().close()

    def _poll(self, timeout: float) -> dict[Any, int]:
        deadline = time.monotonic() + timeout
        while True:
            now = time.monotonic()
            if now >= self._next_check:
                self._next_check = now + _CHECK_SECONDS
                self._connections.check()
            # A new connection is an event, which ends the wait.
            longest = _CHECK_SECONDS if self._connections.has_limited else math.inf
            ready = super()._poll(min(deadline - now, longest))
            if ready or deadline - now <= longest:
                return ready

    def _note_message(self, connection: int, nbytes: int) -> None:
        self._connections.count_message(connection, nbytes)

    def _note_event(self, event: ConnectionEvent) -> None:
        if event.opened:
            self._connections.add(event.connection)
        else:
            self._connections.remove(event.connection)
        if self._reports_events:
            super()._note_event(event)

    def _bind(self, address: str, location: str, fix: str) -> None:
        """Listen at an address of ZeroMQ; `location` and `fix` are for the error."""
        try:
            self._socket.bind(address)
        except (zmq.ZMQError, ValueError) as error:
            self.close()
            raise ConfigError(f"cannot listen on {location}: {error}. Use {fix}.") from error

    def _unpack(self, frames: list[bytes | memoryview], connection: int) -> Message:
        name = bytes(frames[0])
        if name.startswith(_GENERATED_NAME):
            raise _ReplacedConnectionError
        try:
            peer = name.decode()
        except UnicodeDecodeError as error:
            raise protocol_error(
                self._peer_label, f"the name {name!r}", "a name in UTF-8"
            ) from error
        return unpack(frames[1:], peer, connection)

    def _authenticate(self, curve: CurveKeys, allowed: frozenset[bytes]) -> None:
        self._authenticator = ThreadAuthenticator(self._context)
        self._authenticator.start()
        if allowed:
            self._authenticator.configure_curve_callback(ZAP_DOMAIN, _AllowedKeys(allowed))
        else:
            self._authenticator.configure_curve(ZAP_DOMAIN, zmq.auth.CURVE_ALLOW_ANY)
        self._socket.setsockopt(zmq.CURVE_SERVER, 1)
        self._socket.setsockopt(zmq.CURVE_SECRETKEY, curve.secret)


def is_loopback(address: str) -> bool:
    """Return True if only processes of this machine can reach a numeric address."""
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:
        return False


def public_address(address: str) -> str:
    """Return an address for other hosts: this host's name replaces a wildcard address."""
    return address.replace("0.0.0.0", socket.gethostname()).replace("[::]", socket.gethostname())


class _ReplacedConnectionError(ProtocolError):
    """Signal that a message came over a connection that its client has replaced."""


class _AllowedKeys:
    """Callback of ZeroMQ's authenticator that admits clients by their public keys."""

    def __init__(self, allowed: frozenset[bytes]) -> None:
        self._allowed = allowed

    def callback(self, domain: str, key: bytes) -> bool:
        return key in self._allowed
