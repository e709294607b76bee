"""ZeroMQ sockets of a rank: one receives from all other ranks, and one sends to each of them.

The ranks exchange addresses, secret tokens and keys through their process group. A rank's token is
its ZeroMQ identity at the others. They drop the messages of a process with another identity, and
close its connection. If the ranks are on several hosts, CURVE keys made for the run also encrypt
the traffic.
"""

from __future__ import annotations

import logging
import secrets
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict

import msgspec
import torch.distributed as dist
import zmq
from typing_extensions import override

from lightning_dlres.core.comm.collectives import gather_bytes
from lightning_dlres.core.comm.rank_addresses import (
    LOOPBACK,
    RankAddress,
    listening_addresses,
    own_address,
)
from lightning_dlres.core.errors import PeerLostError, ProtocolError
from lightning_dlres.core.host.identity import host_identity
from lightning_dlres.core.wire.decoding import from_msgpack
from lightning_dlres.core.wire.endpoint import ConnectionEvent
from lightning_dlres.core.wire.keys import CurveKeys, use_keys
from lightning_dlres.core.wire.message import Buffer
from lightning_dlres.core.wire.server import Server, SocketLimits

_log = logging.getLogger(__name__)

# A frame may be a whole gradient, and a rank may send many of them before they are read. So the
# limit of unread bytes holds only until a connection has shown the token of a rank.
_LIMITS = SocketLimits(frame_bytes=1 << 34, unread_bytes=1 << 20, connections=4096, queued=1 << 20)
_TOKEN_BYTES = 16


class _Introduction(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Data that a rank gives the others, over the trusted process group.

    Attributes:
        token: Secret token of the rank.
        public_key: Public CURVE key of the rank.
        host_id, own, main: See `RankAddress`.
    """

    token: bytes
    public_key: bytes
    host_id: str
    own: str
    main: str


class RankSockets(Server):
    """Sockets of one rank.

    `send_frames` and `interrupt` may be called from any thread, all other methods from one thread
    at a time.

    Args:
        ranks: The other ranks by their tokens.
        bind: Address at which this rank listens.
        keys: Keys of this rank; None for traffic that stays on this host.
        allowed: Public keys of the other ranks.

    Raises:
        ConfigError: See `Server`; or if there are too many ranks for the process's open files.
    """

    def __init__(
        self,
        ranks: Mapping[bytes, int],
        *,
        bind: str,
        keys: CurveKeys | None,
        allowed: Collection[bytes],
    ) -> None:
        limits = _LIMITS.for_clients(len(ranks), "other ranks")
        super().__init__(bind=bind, curve=keys, allowed=allowed, limits=limits)
        self.refusals.log = _log.warning
        self._ranks, self._keys = ranks, keys
        # Socket that sends to each other rank, with its lock.
        self._outgoing: dict[int, tuple[zmq.Socket[bytes], threading.Lock]] = {}
        # Ids of the TCP connections that are open, and the rank of each that has sent a message.
        self._open: set[int] = set()
        self._rank_by_connection: dict[int, int] = {}
        # Ids that were closed since the queue of messages was last seen empty, and those of them
        # that were opened again. A message with such an id may be of the earlier connection.
        self._recently_closed: set[int] = set()
        self._reopened: set[int] = set()
        # Ranks whose connections have closed since the last call of `closed_ranks`.
        self._closed_ranks: list[int] = []

    def connect(self, rank: int, address: str, token: bytes, server_key: bytes) -> None:
        """Connect to another rank, without waiting.

        Args:
            rank: The rank.
            address: Address at which it listens.
            token: Token of this rank.
            server_key: Public key of the other rank; unused without keys.
        """
        client = self._new_socket(zmq.DEALER)
        # No limit of the messages in the queue, so a send never waits.
        client.setsockopt(zmq.SNDHWM, 0)
        client.setsockopt(zmq.IDENTITY, token)
        client.setsockopt(zmq.IPV6, int("[" in address))
        if self._keys is not None:
            use_keys(client, self._keys, server_key)
        client.connect(address)
        self._outgoing[rank] = client, threading.Lock()

    def send_frames(self, rank: int, frames: Sequence[Buffer]) -> None:
        """Send to another rank, without waiting or copying large frames.

        Raises:
            PeerLostError: If the sockets are closed.
        """
        client, lock = self._outgoing[rank]
        with lock:
            if client.closed:
                raise PeerLostError(f"rank {rank} cannot be reached: the sockets are closed.")
            client.send_multipart(frames, copy=False)

    def next_message(self, timeout: float) -> tuple[int, list[zmq.Frame]] | None:
        """Return the sender's rank and the frames of the next message.

        It returns None after `timeout` seconds. It returns None earlier after `interrupt`, when it
        has refused a message, and when a connection was opened or closed.
        """
        ready = self._poll(timeout)
        if self._socket not in ready:
            # Before the events of now: all messages of the connections that closed were read.
            self._recently_closed.clear()
            self._reopened.clear()
        if self._monitor in ready:
            self._read_monitor()
        if self._wake_reader.fileno() in ready:
            self._end_interrupt()
        if self._socket not in ready:
            return None
        try:
            frames, connection = self._receive_frames()
        except ProtocolError as error:
            self.refusals.note(error)
            return None
        rank = self._ranks.get(frames[0].bytes)
        if rank is None:
            self._refuse(connection, "a message without the token of a rank")
            return None
        if self._rank_by_connection.get(connection) != rank:
            self._introduce(connection, rank)
        return rank, frames[1:]

    def closed_ranks(self) -> list[int]:
        """Return the ranks whose connections have closed since the last call.

        The list is empty while a message is unread: it may be the last one of such a rank.
        """
        if self._socket.poll(0):
            return []
        closed, self._closed_ranks = self._closed_ranks, []
        return closed

    def close_after(self, seconds: float) -> None:
        """Close all sockets; wait at most so many seconds until sent messages have left."""
        for client, lock in self._outgoing.values():
            with lock:
                client.close(linger=round(1000 * seconds))
        self.close()

    def _refuse(self, connection: int, reason: str) -> None:
        """Refuse a message, and close its connection if it is surely still that of the sender."""
        # The sender's connection may have closed, and an innocent one may have its id now.
        self._read_monitor()
        if connection in self._open and connection not in self._reopened:
            self.drop(connection, reason)
        else:
            self.refusals.note(reason)

    def _introduce(self, connection: int, rank: int) -> None:
        """Record the rank of a connection, which its first message has shown."""
        # First read all events so far. They may end an earlier connection with the same id, or
        # this one already.
        self._read_monitor()
        if connection in self._open:
            self._rank_by_connection[connection] = rank
            self._connections.trust(connection)
        else:
            self._closed_ranks.append(rank)

    @override
    def _note_event(self, event: ConnectionEvent) -> None:
        super()._note_event(event)
        if event.opened:
            self._open.add(event.connection)
            self._reopened |= self._recently_closed & {event.connection}
        else:
            self._open.discard(event.connection)
            self._recently_closed.add(event.connection)
        rank = self._rank_by_connection.pop(event.connection, None)
        if rank is not None:
            self._closed_ranks.append(rank)


def open_rank_sockets(
    group: dist.ProcessGroup, timeout: float, check: Callable[[], None]
) -> RankSockets:
    """Return sockets that are connected to all other ranks; called by all ranks together.

    Args:
        group: Gloo group of all ranks.
        timeout: Deadline of each exchange with all ranks, in seconds.
        check: Called while waiting; raises if a rank is known to have failed.

    Raises:
        ConfigError: If other hosts cannot reach a rank, or there are too many ranks for the
            process's open files.
        PeerError: If a rank is late or lost.
    """
    rank, keys = dist.get_rank(group), CurveKeys.generate()
    address = own_address(host_identity())
    token = secrets.token_hex(_TOKEN_BYTES).encode()
    own = _Introduction(token=token, public_key=keys.public, **asdict(address))
    gathered = gather_bytes(msgspec.msgpack.encode(own), timeout, check, group)
    by_rank = [from_msgpack(data, _Introduction) for data in gathered]
    addresses = [RankAddress(each.host_id, each.own, each.main) for each in by_rank]
    bind = listening_addresses(addresses)[rank]
    others = [other for other in range(len(by_rank)) if other != rank]
    # All ranks are on one host, so no traffic leaves it.
    is_local = bind == LOOPBACK
    sockets = RankSockets(
        {by_rank[other].token: other for other in others},
        bind=bind,
        keys=None if is_local else keys,
        allowed=() if is_local else [by_rank[other].public_key for other in others],
    )
    try:
        bound = gather_bytes(sockets.address.encode(), timeout, check, group)
        for other in others:
            sockets.connect(other, bound[other].decode(), token, by_rank[other].public_key)
    except BaseException:
        sockets.close_after(0.0)
        raise
    return sockets
