"""Bounds of a server's connections that ZeroMQ does not keep by itself: how many there are, and how
much each may send that never becomes a message.

ZeroMQ bounds a frame, but not the number of frames of a message, and it hands out whole messages
only. So the kernel's count of received bytes is compared with what has come out as messages.
"""

from __future__ import annotations

import contextlib
import os
import resource
import socket
import struct
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from lightning_dlres.core.units import format_bytes

# Linux, `struct tcp_info`: bytes acknowledged by the peer, and bytes received from it.
_TCP_INFO = getattr(socket, "TCP_INFO", None)
_COUNTS, _COUNTS_AT = struct.Struct("<QQ"), 120
# Bytes around a message: frame headers, encryption; and each second for keep-alives.
_AROUND_MESSAGE, _AROUND_SECOND = 512, 64
# Left to the rest of the process. Each connection takes two descriptors: ZeroMQ's, and a copy.
_OTHER_DESCRIPTORS, _LEAST_CONNECTIONS = 256, 16


@dataclass
class _Open:
    """A connection, through a descriptor of its own: ZeroMQ's number may soon mean another file."""

    socket: socket.socket
    since: float = field(default_factory=time.monotonic)
    messages: int = 0
    message_bytes: int = 0

    def counts(self) -> tuple[int, int] | None:
        """Return how many bytes the peer has acknowledged and sent, where the kernel says so."""
        if _TCP_INFO is None or self.socket.family == socket.AF_UNIX:
            return None
        with contextlib.suppress(OSError, struct.error):
            found = self.socket.getsockopt(socket.IPPROTO_TCP, _TCP_INFO, 256)
            acknowledged, received = _COUNTS.unpack_from(found, _COUNTS_AT)
            return acknowledged, received
        return None

    def unread(self) -> int:
        """Return how many received bytes have not come out as messages."""
        found = self.counts()
        age = time.monotonic() - self.since
        around = _AROUND_MESSAGE * (self.messages + 1) + _AROUND_SECOND * age
        return 0 if found is None else int(found[1] - self.message_bytes - around)


class Connections:
    """The connections of one server, by the number that ZeroMQ gives them.

    Args:
        most: how many there may be; fewer where the process may open few files.
        unread_bytes: what each may send beyond its messages.
        refuse: called with the reason when a connection is closed.
    """

    def __init__(self, most: int, unread_bytes: int, refuse: Callable[[str], None]) -> None:
        soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        if soft != resource.RLIM_INFINITY:
            most = min(most, max(_LEAST_CONNECTIONS, (soft - _OTHER_DESCRIPTORS) // 2))
        self._most, self._unread_bytes, self._refuse = most, unread_bytes, refuse
        self._open: dict[int, _Open] = {}
        # The server's own address: another one shows that the number was used again.
        self.address: object = None

    def __len__(self) -> int:
        return len(self._open)

    def opened(self, number: int) -> None:
        """Note a new connection; close one if there are too many."""
        self.closed(number)
        try:
            copy = socket.socket(fileno=os.dup(number))
        except OSError:
            # Closed again already.
            return
        if not self._is_own(copy):
            copy.close()
            return
        self._open[number] = _Open(copy)
        if len(self._open) > self._most:
            # Whoever has sent a message stays: a flood of silent ones must not push it out.
            silent = (other for other, found in self._open.items() if not found.messages)
            self.drop(next(silent, number), f"more than {self._most} connections")

    def closed(self, number: int) -> None:
        """Note that ZeroMQ has closed a connection."""
        known = self._open.pop(number, None)
        if known is not None:
            known.socket.close()

    def delivered(self, number: int, nbytes: int) -> None:
        """Note a whole message."""
        known = self._open.get(number)
        if known is not None:
            known.messages += 1
            known.message_bytes += nbytes

    def acknowledged(self, number: int) -> int | None:
        """Return how many bytes the peer has taken in; None where the kernel does not say."""
        known = self._open.get(number)
        counts = known.counts() if known is not None else None
        return counts[0] if counts is not None else None

    def drop(self, number: int, reason: str) -> None:
        """Close a connection; ZeroMQ then forgets what waits for it."""
        known = self._open.get(number)
        if known is not None:
            self._refuse(f"closed the connection of {_peer(known.socket)}: {reason}.")
            with contextlib.suppress(OSError):
                known.socket.shutdown(socket.SHUT_RDWR)
            self.closed(number)

    def check(self) -> None:
        """Close the connections that have sent too much that is no message."""
        for number, found in list(self._open.items()):
            unread = found.unread()
            if unread > self._unread_bytes:
                self.drop(number, f"{format_bytes(unread)} without a whole message")

    def close(self) -> None:
        """Give back the descriptors."""
        for number in list(self._open):
            self.closed(number)

    def _is_own(self, connection: socket.socket) -> bool:
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
