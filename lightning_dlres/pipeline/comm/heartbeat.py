"""Heartbeats between rank 0 and the others: what is said, to whom, and when silence is a failure.

A star of one `Hub` and many `Member`s over ZeroMQ. Neither has a thread or a clock of its own: a
`Watch` (see `liveness`) owns one, calls it with the time, and acts on the failures that it returns.
So the rules can be tested on any clock and without sockets.
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
from lightning_dlres.core.wire.frames import Message
from lightning_dlres.core.wire.net import Client, Server
from lightning_dlres.core.wire.refused_messages import Refusals

_log = logging.getLogger(__name__)

# Ranks start at different speeds: imports, and the collective that carries the invitation.
JOIN_SECONDS = 60.0

HEARTBEAT, ABORT, GOODBYE, CONFIRM = "heartbeat", "abort", "goodbye", "confirm"
_KINDS = frozenset((HEARTBEAT, ABORT, GOODBYE, CONFIRM))


@dataclass(frozen=True)
class RankFailure:
    """Why the run cannot go on: the rank at fault, and a sentence that names it."""

    origin: int
    message: str


class Invitation(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a rank must know to join; whoever holds it is trusted."""

    endpoint: str
    names: list[str]
    token: bytes
    deadline: float
    server_key: bytes = b""
    client_public: bytes = b""
    client_secret: bytes = b""


class Note(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The payload of every message: proof of membership, who sends, what went wrong, and how often
    the sender has got each signal (by its number)."""

    token: bytes
    sender: int
    origin: int = 0
    reason: str = ""
    confirms: str = ""
    signals: dict[int, int] = {}


@dataclass
class Line:
    """What this rank knows of one other rank; times are `time.monotonic` seconds."""

    rank: int
    heard: float
    joined: bool = False
    left: bool = False
    lost: bool = False
    cut: float | None = None
    # By kind: what the other side has not confirmed yet; it is sent again with the next heartbeat.
    owed: dict[str, Note] = field(default_factory=dict)

    def listen(self, now: float) -> None:
        """The other side was heard."""
        self.heard, self.joined, self.cut = now, True, None

    def excuse(self, seconds: float) -> None:
        """Silence while this rank itself could not listen does not count."""
        self.heard += seconds
        self.cut = None if self.cut is None else self.cut + seconds

    @property
    def settled(self) -> bool:
        """Whether nothing is left to wait for."""
        return self.left or self.lost or not self.owed


@dataclass(frozen=True)
class HeartbeatPatience:
    """When silence becomes a failure, in seconds."""

    deadline: float
    interval: float

    @classmethod
    def of(cls, deadline: float) -> HeartbeatPatience:
        return cls(deadline, min(deadline / 10, 1.0))

    def complaint(self, line: Line, name: str, now: float, trust_cut: bool) -> str | None:
        """Return what is wrong with a line, or None while there is hope."""
        silent = now - line.heard
        if line.left:
            return None
        if not line.joined:
            wait = max(self.deadline, JOIN_SECONDS)
            missing = f"{name} did not join the watch within {format_seconds(wait)}"
            return f"{missing}: it was killed, hangs or is cut off" if silent > wait else None
        if silent > self.deadline:
            waited = format_seconds(self.deadline)
            return f"{name} has not been heard of for {waited}: it was killed or hangs"
        # ZeroMQ connects again within a tenth of a second, and a live rank beats on.
        cut = now - line.cut if trust_cut and line.cut is not None else 0.0
        if cut > min(1.0, self.deadline / 4) and silent > 2 * self.interval:
            return f"{name} is gone: its connection closed without a goodbye (killed or crashed)"
        return None


class Side(abc.ABC):
    """One end of the star; all methods but `interrupt` run in the watch's thread."""

    def __init__(
        self, rank: int, endpoint: Server | Client, lines: list[Line], invitation: Invitation
    ) -> None:
        self.rank = rank
        self.lines = lines
        self.names = invitation.names
        # How often this rank has got each signal (by its number): replaced by the main thread only,
        # which the watch's thread may interrupt anywhere.
        self.signals: dict[int, int] = {}
        # The same of the others, on the hub: written by the watch's thread only.
        self.others_signals: dict[int, dict[int, int]] = {}
        self._token = invitation.token
        # Of messages that are none of this run.
        self.refusals = (
            endpoint.refusals if isinstance(endpoint, Server) else Refusals(_log.warning)
        )
        self.receive = endpoint.receive
        self.interrupt = endpoint.interrupt
        self.close = endpoint.close

    @abc.abstractmethod
    def take(self, message: Message, now: float) -> RankFailure | None:
        """Act on a message; return the failure that it tells of."""

    @abc.abstractmethod
    def connections(self, now: float) -> None:
        """Note which connections came and went."""

    @abc.abstractmethod
    def beat(self) -> None:
        """Send what is due once an interval."""

    @abc.abstractmethod
    def relay(self, failure: RankFailure) -> None:
        """Pass on a failure that is new to this side."""

    def trusts_cuts(self, patience: HeartbeatPatience, now: float) -> bool:
        """Return whether a closed connection can be told from one that was opened anew."""
        return True

    def judge(self, patience: HeartbeatPatience, now: float) -> RankFailure | None:
        """Return the failure that silence and lost connections show."""
        trust_cut = self.trusts_cuts(patience, now)
        for line in self.lines:
            complaint = patience.complaint(line, self.names[line.rank], now, trust_cut)
            if complaint:
                line.lost = True
                return RankFailure(line.rank, complaint)
        return None

    def tell(self, kind: str, failure: RankFailure | None = None) -> None:
        """Send everyone a note, until each has confirmed it."""
        note = self._note() if failure is None else self._note(failure.origin, failure.message)
        for line in self.lines:
            if not line.left:
                line.owed[kind] = note
                self._send(line, kind, note)

    def _settle(self, line: Line) -> None:
        for kind, note in line.owed.items():
            self._send(line, kind, note)

    def _note(self, origin: int = 0, reason: str = "", confirms: str = "") -> Note:
        return Note(self._token, self.rank, origin, reason, confirms, self.signals)

    def _read(self, message: Message, senders: Sequence[int]) -> Note:
        note = message.decode(Note)
        if not hmac.compare_digest(note.token, self._token):
            raise ProtocolError(
                f"{message.peer} sent the token of another run; expected this one's"
            )
        if message.kind not in _KINDS or note.sender not in senders:
            got = f"{message.kind!r} as rank {note.sender}"
            raise ProtocolError(f"{message.peer} sent {got}, which the watch does not know")
        return note

    @abc.abstractmethod
    def _send(self, line: Line, kind: str, note: Note) -> None:
        """Send without waiting; what cannot be sent now is left to `_settle` or to silence."""


class Hub(Side):
    """Rank 0: hears everyone, and passes on what the others must know."""

    def __init__(self, server: Server, invitation: Invitation) -> None:
        now = time.monotonic()
        lines = [Line(rank, now) for rank in range(1, len(invitation.names))]
        super().__init__(0, server, lines, invitation)
        self._server = server
        # The rank of a TCP connection, and the times at which those that have not spoken opened.
        self._speakers: dict[int, int] = {}
        self._unknown: dict[int, float] = {}

    def take(self, message: Message, now: float) -> RankFailure | None:
        note = self._read(message, range(1, len(self.names)))
        line = self.lines[note.sender - 1]
        line.listen(now)
        self._speakers[message.connection] = note.sender
        self._unknown.pop(message.connection, None)
        if message.kind == CONFIRM:
            line.owed.pop(note.confirms, None)
        elif message.kind == HEARTBEAT:
            self.others_signals = {**self.others_signals, note.sender: note.signals}
            self._send(line, HEARTBEAT, self._note())
            self._settle(line)
        else:
            line.left = line.left or message.kind == GOODBYE
            self._send(line, CONFIRM, self._note(confirms=message.kind))
        return RankFailure(note.sender, note.reason) if message.kind == ABORT else None

    def connections(self, now: float) -> None:
        for event in self._server.connection_events():
            if event.opened:
                # Its first message may have been faster than this event.
                if event.connection not in self._speakers:
                    self._unknown[event.connection] = now
                continue
            self._unknown.pop(event.connection, None)
            rank = self._speakers.pop(event.connection, None)
            if rank is not None:
                self.lines[rank - 1].cut = now

    def beat(self) -> None:
        """Do nothing: the hub answers heartbeats."""

    def trusts_cuts(self, patience: HeartbeatPatience, now: float) -> bool:
        # A connection that has not spoken yet may be a rank that is back, but busy; for as long as
        # a rank may be silent. A stranger that connects and says nothing is trusted no longer.
        return all(now - since > patience.deadline for since in self._unknown.values())

    def relay(self, failure: RankFailure) -> None:
        self.tell(ABORT, failure)

    def _send(self, line: Line, kind: str, note: Note) -> None:
        # A rank that cannot be reached is told when it is heard of again, or else it is lost.
        with contextlib.suppress(PeerError):
            self._server.send(identity(line.rank, self._token), kind, msgspec.msgpack.encode(note))


class Member(Side):
    """Any other rank: reports to the hub, and believes it."""

    def __init__(self, rank: int, client: Client, invitation: Invitation) -> None:
        self._hub = Line(0, time.monotonic(), joined=True)
        super().__init__(rank, client, [self._hub], invitation)
        self._client = client

    def take(self, message: Message, now: float) -> RankFailure | None:
        note = self._read(message, (0,))
        self._hub.listen(now)
        if message.kind == CONFIRM:
            self._hub.owed.pop(note.confirms, None)
        elif message.kind != HEARTBEAT:
            self._hub.left = self._hub.left or message.kind == GOODBYE
            self._send(self._hub, CONFIRM, self._note(confirms=message.kind))
        return RankFailure(note.origin, note.reason) if message.kind == ABORT else None

    def connections(self, now: float) -> None:
        for event in self._client.connection_events():
            self._hub.cut = None if event.opened else now

    def beat(self) -> None:
        self._send(self._hub, HEARTBEAT, self._note())
        self._settle(self._hub)

    def relay(self, failure: RankFailure) -> None:
        """Do nothing: members learn of failures from the hub, or of the hub's own."""

    def _send(self, line: Line, kind: str, note: Note) -> None:
        # A full queue means that the hub is gone or hangs, which the silence will show.
        with contextlib.suppress(PeerError):
            self._client.send(kind, msgspec.msgpack.encode(note))


def identity(rank: int, token: bytes) -> str:
    """Return a name that only members can know, so that nobody else takes over a connection."""
    return f"rank {rank} of run {hashlib.blake2b(token, digest_size=8).hexdigest()}"
