"""Tests of a server with hostile clients: other protocols, floods, endless messages, slow readers.

The server refuses or closes each of them, and still serves a good client.
"""

from __future__ import annotations

import subprocess
from contextlib import ExitStack, closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import zmq

from lightning_dlres.core.host.lightweight_process import lightweight_command
from lightning_dlres.core.host.service import STATUS
from lightning_dlres.core.wire.endpoint import Client
from lightning_dlres.core.wire.keys import CurveKeys
from lightning_dlres.core.wire.message import Message, pack
from lightning_dlres.core.wire.outbox import Outbox, ReplyLimits
from lightning_dlres.core.wire.refused_messages import Refusals
from lightning_dlres.core.wire.server import Server, SocketLimits
from tests.support.hostile_clients import (
    BANNERS,
    NULL_GREETING,
    connect_raw,
    frame,
    greet,
    is_closed,
)
from tests.support.waiting import wait_until

SECONDS = 20.0
SMALL = SocketLimits(frame_bytes=1 << 16, unread_bytes=1 << 20, connections=8, queued=100)


def serve(stack: ExitStack, limits: SocketLimits = SMALL, **options: object) -> Server:
    return stack.enter_context(closing(Server(limits=limits, **options)))  # type: ignore[arg-type]


def assert_served(stack: ExitStack, server: Server) -> None:
    good = stack.enter_context(closing(Client("good", server.address)))
    good.send("hello")
    assert server.expect(SECONDS, "a hello").peer == "good"
    server.send("good", "welcome")
    assert good.expect(SECONDS, "a welcome").kind == "welcome"


def serve_until(server: Server, condition, what: str) -> None:  # type: ignore[no-untyped-def]
    wait_until(lambda: server.receive(0.01) or condition(), what)


@pytest.mark.parametrize("banner", BANNERS)
def test_clients_of_other_protocols_do_no_harm(stack: ExitStack, banner: str) -> None:
    server = serve(stack)
    connect_raw(stack, server.address).sendall(BANNERS[banner])
    assert_served(stack, server)


@pytest.mark.parametrize("banner", ["zmtp 1.0", "zmtp 2.0", "tls", "ssh", "redis inline"])
def test_clients_of_other_protocols_are_closed_before_their_first_message(
    stack: ExitStack, banner: str
) -> None:
    server = serve(stack)
    raw = connect_raw(stack, server.address)
    raw.sendall(BANNERS[banner])
    raw.settimeout(0.05)
    serve_until(server, lambda: is_closed(raw), "the server closes it")
    assert not server.refusals.count


def test_messages_of_an_old_zeromq_are_refused(
    stack: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Simulates that ZeroMQ admits the peer. Its frames have no metadata.
    monkeypatch.setattr(zmq.Socket, "setsockopt_string", lambda *_: None)
    server = serve(stack)
    connect_raw(stack, server.address).sendall(BANNERS["zmtp 1.0"])
    serve_until(server, lambda: server.refusals.count, "its message is refused")
    assert_served(stack, server)


@pytest.mark.parametrize("greeted", [False, True], ids=["before", "after"])
def test_a_frame_that_claims_too_many_bytes_closes_its_connection(
    stack: ExitStack, greeted: bool
) -> None:
    server = serve(stack)
    raw = connect_raw(stack, server.address)
    if greeted:
        greet(raw)
    else:
        raw.sendall(NULL_GREETING)
    raw.sendall(frame(b"beginning", claimed=1 << 30))
    raw.settimeout(0.05)
    serve_until(server, lambda: is_closed(raw), "the server closes it")
    assert_served(stack, server)


def test_an_endless_message_closes_its_connection(stack: ExitStack) -> None:
    server = serve(stack)
    raw = connect_raw(stack, server.address)
    greet(raw)
    raw.settimeout(0.5)
    part = frame(bytes(60_000), more=True)

    def send() -> bool:
        try:
            raw.sendall(part)
        except TimeoutError:
            return False
        except OSError:
            return True
        return False

    serve_until(server, send, "the server closes it")
    assert server.refusals.count == 1
    assert_served(stack, server)


def test_silent_connections_are_closed_first(stack: ExitStack) -> None:
    server = serve(stack)
    good = stack.enter_context(closing(Client("good", server.address)))
    good.send("first")
    server.expect(SECONDS, "a message")
    silent = [connect_raw(stack, server.address) for _ in range(3 * SMALL.connections)]
    for raw in silent:
        raw.settimeout(0.01)
    serve_until(
        server,
        lambda: server.refusals.count >= len(silent) + 1 - SMALL.connections,
        "the connections beyond the limit are closed",
    )
    assert sum(not is_closed(raw) for raw in silent) == SMALL.connections - 1
    good.send("second")
    assert server.expect(SECONDS, "a message").peer == "good"
    server.send("good", "answer")
    assert good.expect(SECONDS, "an answer").kind == "answer"


def test_a_client_that_does_not_read_delays_no_other(stack: ExitStack) -> None:
    server = serve(stack)
    assert_served(stack, server)
    raw = connect_raw(stack, server.address)
    header, payload = (bytes(part) for part in pack("ask", 0, b""))
    greet(raw, b"slow")
    raw.sendall(frame(header, more=True) + frame(payload))
    request = server.expect(SECONDS, "a request")
    now = [0.0]
    limits = ReplyLimits(client_bytes=1 << 20, total_bytes=2 << 20, seconds=10.0, least_bytes=1000)
    outbox = Outbox(server, limits, clock=lambda: now[0])
    reply, sent = bytes(1 << 19), 0
    while outbox.reserve(request, len(reply)):
        outbox.reply(request, len(reply), "data", reply)
        sent += 1
        assert outbox.nbytes <= 1 << 20
        outbox.release_sent_and_drop_slow()
        # The kernel buffers the first few.
        assert sent < 200
    # A fast client can still reserve bytes.
    fast = stack.enter_context(closing(Client("fast", server.address)))
    fast.send("ask")
    other = server.expect(SECONDS, "a request")
    assert outbox.reserve(other, len(reply))
    outbox.reply(other, len(reply), "data", reply)
    assert fast.expect(SECONDS, "data").payload == reply
    assert not server.refusals.count

    def fill_and_let_time_pass() -> int:
        while outbox.reserve(request, len(reply)):
            outbox.reply(request, len(reply), "data", reply)
        now[0] += 30.0
        outbox.release_sent_and_drop_slow()
        return server.refusals.count

    # The first calls may drop nothing, because the kernel still buffers replies.
    wait_until(fill_and_let_time_pass, "the slow client is dropped")

    def is_released() -> bool:
        # The refusal so far may be that of one reply. The client itself is then dropped here.
        now[0] += 30.0
        outbox.release_sent_and_drop_slow()
        return not outbox.nbytes

    serve_until(server, is_released, "its replies are released")


class FakeServer:
    """Server that sends nothing, whose connections a test numbers."""

    def __init__(self) -> None:
        self.number = 0
        self.dropped: list[int] = []

    def connection_number(self, connection: int) -> int:
        return self.number

    def acknowledged_bytes(self, connection: int) -> int:
        return 0

    def send_tracked(self, peer: str, kind: str, payload: bytes, *, sequence: int) -> Any:
        return SimpleNamespace(done=False)

    def drop(self, connection: int, reason: str) -> None:
        self.dropped.append(connection)


def test_a_later_connection_with_the_id_of_a_slow_one_is_not_dropped() -> None:
    server, now = FakeServer(), [0.0]
    outbox = Outbox(server, ReplyLimits(seconds=10.0), clock=lambda: now[0])  # type: ignore[arg-type]

    def ask_and_wait(seconds: float) -> list[int]:
        request = Message("ask", 0, b"", "slow", 7)
        assert outbox.reserve(request, 4)
        outbox.reply(request, 4, "data", b"data")
        now[0] += seconds
        outbox.release_sent_and_drop_slow()
        return server.dropped

    assert ask_and_wait(9.0) == []
    # The client reconnects: it has ten seconds again.
    server.number += 1
    assert ask_and_wait(9.0) == []
    # It leaves, and another client gets the id.
    server.number += 1
    now[0] += 30.0
    outbox.release_sent_and_drop_slow()
    assert server.dropped == []
    # It has really come back, and does not read.
    assert ask_and_wait(11.0) == [7]


def test_the_log_of_refusals_stays_short() -> None:
    lines: list[str] = []
    now = 0.0
    refusals = Refusals(lines.append, clock=lambda: now)
    for number in range(100_000):
        now += 0.864
        refusals.note(f"message {number}\n\x1b[2J" + "x" * 10_000)
    assert refusals.count == 100_000
    assert 5 < len(lines) < 50
    assert all(line.isprintable() and len(line) < 600 for line in lines)
    counted = sum(
        1 + int(line.split("(")[1].split()[0]) if " more before" in line else 1 for line in lines
    )
    assert counted > 90_000


def test_a_dead_service_thread_ends_its_process() -> None:
    ended = subprocess.run(
        lightweight_command("tests.support.dying_service:main"),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        cwd=Path(__file__).parents[3],
    )
    assert ended.returncode == STATUS
    assert "KeyError: 'bug'" in ended.stderr
    assert "'the service' died" in ended.stderr


@pytest.mark.parametrize("is_encrypted", [True, False])
def test_the_largest_frame_arrives(stack: ExitStack, is_encrypted: bool) -> None:
    keys, own = CurveKeys.generate(), CurveKeys.generate()
    options = {"curve": keys, "allowed": [own.public]} if is_encrypted else {}
    server = serve(stack, **options)
    client = stack.enter_context(
        closing(
            Client(
                "good",
                server.address,
                curve=own if is_encrypted else None,
                server_key=keys.public if is_encrypted else None,
            )
        )
    )
    client.send("large", bytes(SMALL.frame_bytes))
    assert len(server.expect(SECONDS, "a large frame").payload) == SMALL.frame_bytes
