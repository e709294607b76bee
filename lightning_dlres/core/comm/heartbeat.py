"""Heartbeats between rank 0 and the other ranks, and the rules that turn silence into a failure.

The ranks form a star over ZeroMQ: a `Hub` on rank 0, and a `Member` on each other rank. Neither has
a thread or a clock. A `Watch` (see `liveness`) owns one of them, passes it the current time, and
acts on the failures that it returns. So the rules can be tested with any clock and without sockets.
"""

from __future__ import annotations

import abc
import contextlib
import hashlib
import hmac
import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec

from lightning_dlres.core.errors import PeerError, ProtocolError
from lightning_dlres.core.units import format_seconds
from lightning_dlres.core.wire.endpoint import Client
from lightning_dlres.core.wire.message import Message
from lightning_dlres.core.wire.refused_messages import Refusals
from lightning_dlres.core.wire.server import Server

_log = logging.getLogger(__name__)

# Seconds that a rank may take to join the watch. Ranks start at different speeds, because of
# imports and of the collective that carries the invitation.
JOIN_SECONDS = 60.0

# Kinds of messages. A receiver confirms ABORT and GOODBYE; until then the sender repeats them.
HEARTBEAT, ABORT, GOODBYE, CONFIRM = "heartbeat", "abort", "goodbye", "confirm"
_KINDS = frozenset((HEARTBEAT, ABORT, GOODBYE, CONFIRM))


@dataclass(frozen=True)
class RankFailure:
    """Failure of a rank, which ends the run.

    Attributes:
        origin: The rank at fault.
        message: The rank's name and the reason, for errors and reports.
    """

    origin: int
    message: str


class Invitation(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Data that a rank needs to join the watch. A process that has it is trusted.

    Attributes:
        address: Address of the hub, such as "tcp://10.0.0.1:5555".
        names: Names of all ranks in errors and reports.
        token: Secret of the run, in every message.
        deadline: Seconds of silence after which the hub counts a rank as lost.
        server_key: Public CURVE key of the hub; empty on a loopback address.
        client_public: Public CURVE key of the members; empty on a loopback address.
        client_secret: Secret CURVE key of the members; empty on a loopback address.
    """

    address: str
    names: list[str]
    token: bytes
    deadline: float
    server_key: bytes = b""
    client_public: bytes = b""
    client_secret: bytes = b""


class WatchPayload(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Payload of every message.

    Attributes:
        token: Secret of the run, which proves membership.
        sender: Rank of the sender.
        origin: The rank at fault, in an ABORT from the hub.
        reason: The failure, in an ABORT.
        confirms: Kind of the confirmed message, in a CONFIRM.
        signals: How many times a rank has received each POSIX signal, by signal number: the largest
            number that the sender knows.
        calls: How many collective calls ranks have begun, by rank, as far as the sender knows.
    """

    token: bytes
    sender: int
    origin: int = 0
    reason: str = ""
    confirms: str = ""
    signals: dict[int, int] = {}
    calls: dict[int, int] = {}


class CollectiveCalls:
    """Numbers of collective calls that the ranks have begun, which heartbeats carry.

    They tell who is late: a collective itself does not say which rank it waits for.

    Args:
        rank: This rank.

    Attributes:
        others: Numbers of other ranks. Only the watch's thread replaces the dict.
    """

    def __init__(self, rank: int) -> None:
        self._rank, self._own = rank, 0
        self.others: dict[int, int] = {}

    def begin(self) -> None:
        """Count a call of this rank; only one thread may call it."""
        self._own += 1

    def by_rank(self) -> dict[int, int]:
        """Return all known numbers, by rank."""
        return {**self.others, self._rank: self._own}

    def late_ranks(self) -> list[int]:
        """Return the ranks that had not begun this rank's last call some heartbeats ago."""
        return sorted(rank for rank, number in self.by_rank().items() if number < self._own)


@dataclass
class Peer:
    """State of one other rank, as this rank knows it. Times are `time.monotonic` seconds.

    Attributes:
        rank: Rank of the peer.
        last_heard: Time of its last message; before the first one, start of the watch.
        joined: True after its first message.
        left: True after its goodbye.
        lost: True after its failure was detected here.
        closed_at: Time at which its connection closed; None while it is open, or if it has sent a
            message since then.
        unconfirmed: Payloads by kind that it has not confirmed; sent again with each heartbeat.
    """

    rank: int
    last_heard: float
    joined: bool = False
    left: bool = False
    lost: bool = False
    closed_at: float | None = None
    unconfirmed: dict[str, WatchPayload] = field(default_factory=dict)

    def mark_heard(self, now: float) -> None:
        """Record that the peer has sent a message."""
        self.last_heard, self.joined, self.closed_at = now, True, None

    def discount_pause(self, seconds: float) -> None:
        """Leave out time in which this rank could not listen, such as while it was stopped."""
        self.last_heard += seconds
        self.closed_at = None if self.closed_at is None else self.closed_at + seconds

    @property
    def is_flushed(self) -> bool:
        """True if this rank need not wait for any confirmation of the peer."""
        return self.left or self.lost or not self.unconfirmed


@dataclass(frozen=True)
class HeartbeatTimeouts:
    """Interval of heartbeats, and the deadline by which silence becomes a failure; in seconds.

    Attributes:
        deadline: Silence after which a rank counts as lost.
        interval: Time between two heartbeats.
    """

    deadline: float
    interval: float

    @classmethod
    def of(cls, deadline: float) -> HeartbeatTimeouts:
        """Return the timeouts for a deadline, with an interval of at most a tenth of it."""
        return cls(deadline, min(deadline / 10, 1.0))

    def failure_reason(self, peer: Peer, name: str, now: float, trust_closed: bool) -> str | None:
        """Return the reason why a peer counts as lost; None if it does not.

        Args:
            peer: State of the peer.
            name: Name of the peer in the reason.
            now: Current time, from `time.monotonic`.
            trust_closed: False if a closed connection proves nothing, since the peer may have
                opened another one.
        """
        silent_seconds = now - peer.last_heard
        if peer.left:
            return None
        if not peer.joined:
            wait = max(self.deadline, JOIN_SECONDS)
            if silent_seconds <= wait:
                return None
            missing = f"{name} did not join the watch within {format_seconds(wait)}"
            return f"{missing}: it was killed, hangs or is cut off"
        if silent_seconds > self.deadline:
            waited = format_seconds(self.deadline)
            return f"{name} has not been heard from for {waited}: it was killed or hangs"
        if not trust_closed or peer.closed_at is None:
            return None
        # A live rank loses its connection, too, if the network fails briefly. ZeroMQ then connects
        # again within 0.1 s, and the next heartbeat arrives.
        closed_seconds = now - peer.closed_at
        if closed_seconds > min(1.0, self.deadline / 4) and silent_seconds > 2 * self.interval:
            return f"{name} is gone: its connection closed without a goodbye (killed or crashed)"
        return None


class WatchEndpoint(abc.ABC):
    """One end of the star. All methods except `interrupt` run in the watch's thread.

    Args:
        rank: This rank.
        connection: Socket of this rank.
        peers: State of the ranks at the other ends: all others on the hub, the hub on a member.
        invitation: Invitation of the run.
    """

    def __init__(
        self, rank: int, connection: Server | Client, peers: list[Peer], invitation: Invitation
    ) -> None:
        self.rank = rank
        self.peers = peers
        self.names = invitation.names
        # Count of received signals by signal number. Only the main thread replaces the dict, in a
        # signal handler, which may run at any point of the watch's thread. So it is never mutated.
        self.signals: dict[int, int] = {}
        # Counts that peers have sent, by rank; the hub sends the largest of all ranks. Only the
        # watch's thread replaces the dict.
        self.peer_signals: dict[int, dict[int, int]] = {}
        self.calls = CollectiveCalls(rank)
        self._token = invitation.token
        # Counts and logs the messages that are refused: they do not belong to this run.
        self.refusals = (
            connection.refusals if isinstance(connection, Server) else Refusals(_log.warning)
        )
        self.receive = connection.receive
        self.interrupt = connection.interrupt
        self.close = connection.close

    def signal_counts(self) -> dict[int, int]:
        """Return the largest known count of each signal on any rank, by signal number."""
        largest: dict[int, int] = {}
        for signals in (self.signals, *self.peer_signals.values()):
            for number, count in signals.items():
                largest[number] = max(largest.get(number, 0), count)
        return largest

    @abc.abstractmethod
    def handle(self, message: Message, now: float) -> RankFailure | None:
        """Act on a message; return the failure that it announces, if any."""

    @abc.abstractmethod
    def update_connections(self, now: float) -> None:
        """Record the connections of peers that were opened or closed since the last call."""

    @abc.abstractmethod
    def send_heartbeat(self) -> None:
        """Send the messages that are due once per interval."""

    @abc.abstractmethod
    def forward_failure(self, failure: RankFailure) -> None:
        """Pass on a failure that is new to this rank."""

    def trusts_closed_connections(self, timeouts: HeartbeatTimeouts, now: float) -> bool:
        """Return True if a peer with a closed connection cannot have opened another one."""
        return True

    def find_failure(self, timeouts: HeartbeatTimeouts, now: float) -> RankFailure | None:
        """Return a failure that silence or a closed connection shows, and mark its rank as lost.

        None if no peer has failed.
        """
        trust_closed = self.trusts_closed_connections(timeouts, now)
        for peer in self.peers:
            reason = timeouts.failure_reason(peer, self.names[peer.rank], now, trust_closed)
            if reason:
                peer.lost = True
                return RankFailure(peer.rank, reason)
        return None

    def broadcast(self, kind: str, failure: RankFailure | None = None) -> None:
        """Send a message to all peers that have not left, again until each has confirmed it."""
        if failure is None:
            payload = self._payload()
        else:
            payload = self._payload(failure.origin, failure.message)
        for peer in self.peers:
            if not peer.left:
                peer.unconfirmed[kind] = payload
                self._send(peer, kind, payload)

    def _resend_unconfirmed(self, peer: Peer) -> None:
        for kind, payload in peer.unconfirmed.items():
            self._send(peer, kind, payload)

    def _payload(self, origin: int = 0, reason: str = "", confirms: str = "") -> WatchPayload:
        return WatchPayload(
            token=self._token,
            sender=self.rank,
            origin=origin,
            reason=reason,
            confirms=confirms,
            signals=self.signal_counts(),
            calls=self.calls.by_rank(),
        )

    def _decode(self, message: Message, senders: Sequence[int]) -> WatchPayload:
        """Return the payload of a message from one of these ranks.

        Raises:
            ProtocolError: If the message has another token, sender or kind, or cannot be decoded.
        """
        payload = message.decode(WatchPayload)
        if not hmac.compare_digest(payload.token, self._token):
            raise ProtocolError(f"{message.peer} must send the token of this run, got another one")
        if message.kind not in _KINDS or payload.sender not in senders:
            got = f"{message.kind!r} as rank {payload.sender}"
            raise ProtocolError(f"{message.peer} sent {got}, which the watch does not expect")
        return payload

    @abc.abstractmethod
    def _send(self, peer: Peer, kind: str, payload: WatchPayload) -> None:
        """Send without waiting. A message that cannot be sent is dropped: `_resend_unconfirmed`
        sends it again, or the deadline shows that the peer is lost."""


class Hub(WatchEndpoint):
    """Rank 0's end: answers the heartbeats of all other ranks, and forwards failures to them."""

    def __init__(self, server: Server, invitation: Invitation) -> None:
        now = time.monotonic()
        peers = [Peer(rank, now) for rank in range(1, len(invitation.names))]
        super().__init__(0, server, peers, invitation)
        self._server = server
        # Rank of each TCP connection that has sent a message, by connection id.
        self._rank_by_connection: dict[int, int] = {}
        # Opening time of each TCP connection that has sent nothing yet, by connection id.
        self._silent_since: dict[int, float] = {}

    def handle(self, message: Message, now: float) -> RankFailure | None:
        payload = self._decode(message, range(1, len(self.names)))
        peer = self.peers[payload.sender - 1]
        peer.mark_heard(now)
        # A server whose connections all have no limit need not wake up to check them.
        self._server.trust(message.connection)
        self._rank_by_connection[message.connection] = payload.sender
        self._silent_since.pop(message.connection, None)
        if message.kind == CONFIRM:
            peer.unconfirmed.pop(payload.confirms, None)
        elif message.kind == HEARTBEAT:
            self.peer_signals = {**self.peer_signals, payload.sender: payload.signals}
            calls = payload.calls.get(payload.sender, 0)
            self.calls.others = {**self.calls.others, payload.sender: calls}
            self._send(peer, HEARTBEAT, self._payload())
            self._resend_unconfirmed(peer)
        else:
            peer.left = peer.left or message.kind == GOODBYE
            self._send(peer, CONFIRM, self._payload(confirms=message.kind))
        return RankFailure(payload.sender, payload.reason) if message.kind == ABORT else None

    def update_connections(self, now: float) -> None:
        for event in self._server.connection_events():
            if event.opened:
                # The first message of a connection may arrive before this event.
                if event.connection not in self._rank_by_connection:
                    self._silent_since[event.connection] = now
                continue
            self._silent_since.pop(event.connection, None)
            rank = self._rank_by_connection.pop(event.connection, None)
            if rank is not None:
                self.peers[rank - 1].closed_at = now

    def send_heartbeat(self) -> None:
        """Do nothing: the hub answers heartbeats."""

    def trusts_closed_connections(self, timeouts: HeartbeatTimeouts, now: float) -> bool:
        # A connection that has sent nothing yet may be that of a rank that has reconnected and is
        # busy. After the deadline of a rank, it counts as that of a process outside the run.
        return all(now - since > timeouts.deadline for since in self._silent_since.values())

    def forward_failure(self, failure: RankFailure) -> None:
        self.broadcast(ABORT, failure)

    def _send(self, peer: Peer, kind: str, payload: WatchPayload) -> None:
        # A rank that cannot be reached now gets ABORT and GOODBYE again after its next heartbeat.
        # If none comes, it is lost.
        with contextlib.suppress(PeerError):
            name = identity(peer.rank, self._token)
            self._server.send(name, kind, msgspec.msgpack.encode(payload))


class Member(WatchEndpoint):
    """Any other rank's end: sends heartbeats to the hub, and believes its reports of failures."""

    def __init__(self, rank: int, client: Client, invitation: Invitation) -> None:
        self._hub = Peer(0, time.monotonic(), joined=True)
        super().__init__(rank, client, [self._hub], invitation)
        self._client = client

    def handle(self, message: Message, now: float) -> RankFailure | None:
        payload = self._decode(message, (0,))
        self._hub.mark_heard(now)
        if message.kind == CONFIRM:
            self._hub.unconfirmed.pop(payload.confirms, None)
        elif message.kind == HEARTBEAT:
            self.peer_signals, self.calls.others = {0: payload.signals}, payload.calls
        else:
            self._hub.left = self._hub.left or message.kind == GOODBYE
            self._send(self._hub, CONFIRM, self._payload(confirms=message.kind))
        return RankFailure(payload.origin, payload.reason) if message.kind == ABORT else None

    def update_connections(self, now: float) -> None:
        for event in self._client.connection_events():
            self._hub.closed_at = None if event.opened else now

    def send_heartbeat(self) -> None:
        self._send(self._hub, HEARTBEAT, self._payload())
        self._resend_unconfirmed(self._hub)

    def forward_failure(self, failure: RankFailure) -> None:
        """Do nothing: the hub has reported the failure, or is the failed rank."""

    def _send(self, peer: Peer, kind: str, payload: WatchPayload) -> None:
        # A full queue means that the hub is lost or hangs, which its silence will show.
        with contextlib.suppress(PeerError):
            self._client.send(kind, msgspec.msgpack.encode(payload))


def identity(rank: int, token: bytes) -> str:
    """Return the ZeroMQ identity of a rank.

    Only members can compute it, so that no other process can take over a rank's connection.
    """
    return f"rank {rank} of run {hashlib.blake2b(token, digest_size=8).hexdigest()}"
