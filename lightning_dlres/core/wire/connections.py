"""Limits of a server's connections that ZeroMQ lacks: their number and their unread bytes.

ZeroMQ limits the size of a frame, but not the number of frames of a message, and it returns whole
messages only. A client could fill the memory with a message that never ends. The kernel's count of
received bytes is therefore compared with the bytes of the messages that were read.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import resource
import socket
import struct
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from lightning_dlres.core.units import format_bytes

# Linux's `struct tcp_info` has the bytes acknowledged by the peer, and the bytes received from it,
# at this offset.
_TCP_INFO = getattr(socket, "TCP_INFO", None)
_COUNTS, _COUNTS_OFFSET = struct.Struct("<QQ"), 120
# Allowance in bytes for frame headers and encryption of a message, and for keep-alives per second.
_MESSAGE_OVERHEAD, _SECOND_OVERHEAD = 512, 64
# Descriptors left to the rest of the process, and the connections allowed in any case. Each
# connection takes two descriptors: ZeroMQ's, and a copy.
_OTHER_DESCRIPTORS, _LEAST_CONNECTIONS = 256, 16


def connection_limit(max_connections: int) -> int:
    """Return the largest number of connections: `max_connections`, or fewer if the process may
    open few files."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return max_connections
    return min(max_connections, max(_LEAST_CONNECTIONS, (soft - _OTHER_DESCRIPTORS) // 2))


def needed_files(connections: int) -> int:
    """Return the limit of open files that a server with so many connections needs."""
    return 2 * connections + _OTHER_DESCRIPTORS


@dataclass
class _Connection:
    """An open connection, through a copy of its descriptor.

    ZeroMQ may close its own descriptor at any time, and its number may then mean another file.
    """

    socket: socket.socket
    # Number that no other connection of the server has, unlike the descriptor.
    number: int
    since: float = field(default_factory=time.monotonic)
    messages: int = 0
    message_bytes: int = 0
    is_trusted: bool = False

    def byte_counts(self) -> tuple[int, int] | None:
        """Return the numbers of bytes that the peer acknowledged, and that came from it.

        None if the kernel does not count them.
        """
        if _TCP_INFO is None or self.socket.family == socket.AF_UNIX:
            return None
        with contextlib.suppress(OSError, struct.error):
            info = self.socket.getsockopt(socket.IPPROTO_TCP, _TCP_INFO, 256)
            acknowledged, received = _COUNTS.unpack_from(info, _COUNTS_OFFSET)
            return acknowledged, received
        return None

    def unread_bytes(self) -> int:
        """Return the number of received bytes beyond whole messages and their overhead.

        It may be negative, because the allowance for the overhead is generous.
        """
        counts = self.byte_counts()
        age = time.monotonic() - self.since
        overhead = _MESSAGE_OVERHEAD * (self.messages + 1) + _SECOND_OVERHEAD * age
        return 0 if counts is None else int(counts[1] - self.message_bytes - overhead)


class Connections:
    """The open connections of one server, by ZeroMQ's file descriptor.

    The server reports every connection that opens or closes, and every message.

    Args:
        max_connections: Largest number of connections; reduced if the process may open few files.
        max_unread_bytes: Largest number of bytes that a peer may have sent beyond whole messages.
        note_refusal: Function that gets a text, with the reason, for each connection that this
            object closes.

    Attributes:
        address: Port or path of the server's socket, set by the server. A descriptor with another
            local address was reused for another file.
    """

    def __init__(
        self, max_connections: int, max_unread_bytes: int, note_refusal: Callable[[str], None]
    ) -> None:
        self._max_connections = connection_limit(max_connections)
        self._max_unread_bytes = max_unread_bytes
        self._note_refusal = note_refusal
        self._connections: dict[int, _Connection] = {}
        self._numbers = itertools.count()
        self.address: object = None

    def __len__(self) -> int:
        return len(self._connections)

    def add(self, descriptor: int) -> None:
        """Add a new connection; close one if there are too many."""
        self.remove(descriptor)
        try:
            copy = socket.socket(fileno=os.dup(descriptor))
        except OSError:
            # The connection was closed before this event was read.
            return
        if not self._is_own(copy):
            copy.close()
            return
        self._connections[descriptor] = _Connection(copy, next(self._numbers))
        if len(self._connections) > self._max_connections:
            # Close a connection without messages: a flood of them must not push out a good client.
            silent = (other for other, entry in self._connections.items() if not entry.messages)
            self.drop(next(silent, descriptor), f"more than {self._max_connections} connections")

    def remove(self, descriptor: int) -> None:
        """Remove a connection that ZeroMQ closed."""
        connection = self._connections.pop(descriptor, None)
        if connection is not None:
            connection.socket.close()

    def count_message(self, descriptor: int, nbytes: int) -> None:
        """Count a whole message of `nbytes` bytes."""
        connection = self._connections.get(descriptor)
        if connection is not None:
            connection.messages += 1
            connection.message_bytes += nbytes

    def number(self, descriptor: int) -> int | None:
        """Return a number that tells a connection from later ones with its descriptor."""
        connection = self._connections.get(descriptor)
        return None if connection is None else connection.number

    def trust(self, descriptor: int) -> None:
        """Lift the limit of unread bytes for a peer that has proved its identity."""
        connection = self._connections.get(descriptor)
        if connection is not None:
            connection.is_trusted = True

    def acknowledged_bytes(self, descriptor: int) -> int | None:
        """Return the number of bytes that the peer acknowledged; None if it is not known."""
        connection = self._connections.get(descriptor)
        counts = connection.byte_counts() if connection is not None else None
        return counts[0] if counts is not None else None

    def drop(self, descriptor: int, reason: str) -> None:
        """Close a connection; ZeroMQ then discards the messages queued for it."""
        connection = self._connections.get(descriptor)
        if connection is not None:
            self._note_refusal(f"closed the connection of {_peer(connection.socket)}: {reason}.")
            with contextlib.suppress(OSError):
                connection.socket.shutdown(socket.SHUT_RDWR)
            self.remove(descriptor)

    @property
    def has_limited(self) -> bool:
        """True if a connection is open that `check` may close."""
        return not all(connection.is_trusted for connection in self._connections.values())

    def check(self) -> None:
        """Close the connections with too many unread bytes."""
        for descriptor, connection in list(self._connections.items()):
            unread = 0 if connection.is_trusted else connection.unread_bytes()
            if unread > self._max_unread_bytes:
                self.drop(descriptor, f"{format_bytes(unread)} without a whole message")

    def close(self) -> None:
        """Close the copies of all descriptors."""
        for descriptor in list(self._connections):
            self.remove(descriptor)

    def _is_own(self, connection: socket.socket) -> bool:
        """Return True if a descriptor still belongs to a connection of the server."""
        try:
            name = connection.getsockname()
        except OSError:
            return False
        return bool((name[1] if isinstance(name, tuple) else name) == self.address)


def _peer(connection: socket.socket) -> str:
    with contextlib.suppress(OSError):
        name = connection.getpeername()
        if isinstance(name, tuple):
            return f"{name[0]} port {name[1]}"
    return "a process of this machine"
