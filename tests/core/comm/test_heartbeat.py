"""The silence that counts as a failure, at times that a test sets, without threads or sockets."""

from __future__ import annotations

from typing import cast

import msgspec

from lightning_dlres.core.comm import heartbeat
from lightning_dlres.core.wire.endpoint import ConnectionEvent
from lightning_dlres.core.wire.message import Message
from lightning_dlres.core.wire.server import Server

NAMES = ["rank 0", "rank 1", "rank 2"]
# A deadline of 10 s, and an interval of 1 s.
TIMEOUTS = heartbeat.HeartbeatTimeouts.of(10.0)


def failure_reason(peer: heartbeat.Peer, now: float, trust_closed: bool = True) -> str:
    """Return the reason why a peer counts as lost at a time; empty if it does not."""
    return TIMEOUTS.failure_reason(peer, "rank 1", now, trust_closed) or ""


def test_a_silent_rank_has_the_whole_deadline() -> None:
    peer = heartbeat.Peer(1, 100.0, joined=True)
    assert not failure_reason(peer, 109.9)
    assert failure_reason(peer, 110.1) == (
        "rank 1 has not been heard from for 10 s: it was killed or hangs"
    )


def test_a_closed_connection_shortens_the_deadline() -> None:
    peer = heartbeat.Peer(1, 100.0, joined=True, closed_at=100.5)
    assert not failure_reason(peer, 101.9), "it may connect again"
    assert "connection closed" in failure_reason(peer, 102.1)
    assert not failure_reason(peer, 102.1, trust_closed=False)
    peer.mark_heard(102.2)
    assert not failure_reason(peer, 110.0)


def test_a_rank_has_more_time_to_join() -> None:
    peer = heartbeat.Peer(1, 100.0)
    assert not failure_reason(peer, 100.0 + heartbeat.JOIN_SECONDS)
    assert "did not join" in failure_reason(peer, 100.1 + heartbeat.JOIN_SECONDS)


def test_silence_while_this_rank_could_not_listen_does_not_count() -> None:
    peer = heartbeat.Peer(1, 100.0, joined=True, closed_at=100.5)
    peer.discount_pause(50.0)
    assert not failure_reason(peer, 151.0)
    assert failure_reason(peer, 152.1)


class FakeServer:
    """Server that has only the connection events that a test sets."""

    def __init__(self) -> None:
        self.events: list[ConnectionEvent] = []

    def connection_events(self) -> list[ConnectionEvent]:
        events, self.events = self.events, []
        return events

    def send(self, peer: str, kind: str, payload: bytes) -> None: ...
    def receive(self, timeout: float) -> None: ...
    def interrupt(self) -> None: ...
    def trust(self, connection: int) -> None: ...
    def close(self) -> None: ...


def test_a_busy_rank_that_connects_again_is_not_lost() -> None:
    """Connection 11 of rank 1 closes. Connection 13 opens, but sends nothing, and closes later."""
    server, token = FakeServer(), bytes(32)
    invitation = heartbeat.Invitation("tcp://", NAMES, token, 10.0)
    hub = heartbeat.Hub(cast(Server, server), invitation)

    def beat(rank: int, connection: int, now: float) -> None:
        payload = msgspec.msgpack.encode(heartbeat.WatchPayload(token, rank))
        hub.handle(Message("heartbeat", 0, payload, f"rank {rank}", connection), now)

    def events(*changes: tuple[bool, int], now: float) -> None:
        """Open (True) or close (False) connections."""
        server.events = [ConnectionEvent(*change) for change in changes]
        hub.update_connections(now)

    beat(1, 11, 100.0)
    events((True, 11), (True, 12), now=100.0)
    beat(2, 12, 100.0)
    events((False, 11), (True, 13), now=100.5)
    beat(2, 12, 105.0)
    assert hub.find_failure(TIMEOUTS, 105.0) is None, "connection 13 may be rank 1"
    events((False, 13), now=105.5)
    failure = hub.find_failure(TIMEOUTS, 105.6)
    assert failure is not None
    assert failure.origin == 1
