"""Tests of servers and clients over real sockets: whole messages, and errors that name the peer."""

from __future__ import annotations

import contextlib
import re
import threading
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq

from lightning_dlres.core.errors import (
    ConfigError,
    PeerLostError,
    PeerTimeoutError,
    ProtocolError,
)
from lightning_dlres.core.wire.endpoint import Client, ConnectionEvent
from lightning_dlres.core.wire.keys import CurveKeys
from lightning_dlres.core.wire.message import pack, unpack
from lightning_dlres.core.wire.outbox import ReplyLimits
from lightning_dlres.core.wire.server import Server, SocketLimits
from tests.support.waiting import wait_until

# Deadline of a wait, in seconds; only a failing test reaches it.
SECONDS = 20.0
# Seconds that a test waits to see that no message comes. A test always waits that long.
SILENCE_SECONDS = 0.3
# Time limit in seconds of a send by a refused client. ZeroMQ ends the connection of a refused
# client for good, so that a send finds no queue unless it is faster than the refusal.
REFUSED_SEND_SECONDS = 0.05


class Greeting(msgspec.Struct):
    text: str


def serve(stack: ExitStack, **options: object) -> Server:
    return stack.enter_context(closing(Server(**options)))  # type: ignore[arg-type]


def connect(stack: ExitStack, name: str, server: Server, **options: object) -> Client:
    client = Client(name, server.address, server="the hub", **options)  # type: ignore[arg-type]
    return stack.enter_context(closing(client))


def raw_socket(stack: ExitStack, name: bytes, server: Server) -> zmq.Socket[bytes]:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    stack.callback(context.destroy, linger=0)
    bare = context.socket(zmq.DEALER)
    if name:
        bare.setsockopt(zmq.IDENTITY, name)
    bare.connect(server.address)
    return bare


def test_messages_go_both_ways(stack: ExitStack) -> None:
    server = serve(stack)
    client = connect(stack, "rank 1", server)
    payload = bytes(range(256)) * 4096
    assert [client.send("gradient", payload), client.send("gradient", bytearray(3))] == [0, 1]
    first, second = (server.expect(SECONDS, "a gradient") for _ in range(2))
    assert (first.kind, first.sequence, first.payload) == ("gradient", 0, payload)
    assert (second.sequence, second.payload, first.peer) == (1, bytes(3), "rank 1")
    server.send("rank 1", "answer", memoryview(b"xyz")[1:], sequence=first.sequence)
    answer = client.expect(SECONDS, "an answer")
    assert (answer.kind, answer.sequence, answer.payload) == ("answer", 0, b"yz")
    assert server.address in answer.peer


def test_typed_payloads_are_decoded_or_refused(stack: ExitStack) -> None:
    server = serve(stack)
    client = connect(stack, "rank 1", server)
    client.send("greeting", msgspec.msgpack.encode(Greeting("hello")))
    client.send("greeting", b"\xc1")
    assert server.expect(SECONDS, "a greeting").decode(Greeting) == Greeting("hello")
    with pytest.raises(ProtocolError, match=r"rank 1 sent .* expected a Greeting"):
        server.expect(SECONDS, "a greeting").decode(Greeting)


@pytest.mark.parametrize(
    ("frames", "complaint"),
    [
        ([b"only one"], "1 frame, expected 2 frames"),
        ([b"\xc1", b""], "header"),
        ([b"", b""], "header"),
        ([b""] * 5, "more than 2 frames, expected 2 frames"),
        ([b"\x91" * 1500, b""], "header"),
        ([b"\x81\xa4note" + b"\x91" * 100_000, b""], "header"),
        ([b"\x81\xa4kind\xdb\xff\xff\xff\xff", b""], "header"),
        ([msgspec.msgpack.encode({"kind": "k" * 65}), b""], "header"),
        ([msgspec.msgpack.encode({"kind": 3}), b""], "header"),
        ([bytes(pack("data", 0, b"abc")[0]), b"abd"], "damaged"),
        ([bytes(pack("data", 0, b"abc")[0]), b"abcd"], "4 bytes"),
    ],
)
def test_refusing_a_corrupt_message_names_its_sender(
    stack: ExitStack,
    frames: list[bytes],
    complaint: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    server = serve(stack)
    bare = raw_socket(stack, b"rank 7", server)
    bare.send_multipart(frames)
    bare.send_multipart([bytes(part) for part in pack("data", 1, b"fine")])
    assert server.expect(SECONDS, "data").payload == b"fine"
    assert server.refusals.count == 1
    assert re.search(f"(rank 7|a client of tcp.*) sent .*{complaint}", capsys.readouterr().err)


def test_a_flipped_bit_never_changes_the_payload() -> None:
    header, payload = (bytes(part) for part in pack("data", 5, b"payload"))
    good = unpack([header, payload], "rank 1")
    for part, position in [(0, i) for i in range(len(header))] + [(1, i) for i in range(7)]:
        frames = [bytearray(header), bytearray(payload)]
        frames[part][position] ^= 1
        # A flip in the header's kind or sequence leaves a valid message with the same payload.
        with contextlib.suppress(ProtocolError):
            damaged = unpack([bytes(frame) for frame in frames], "rank 1")
            assert damaged.payload == good.payload


def test_a_client_without_a_readable_name_is_refused(
    stack: ExitStack, capsys: pytest.CaptureFixture[str]
) -> None:
    server = serve(stack)
    raw_socket(stack, b"\xff\xfe", server).send_multipart([b"", b""])
    wait_until(lambda: server.receive(SECONDS) or server.refusals.count, "it is refused")
    assert "name in UTF-8" in capsys.readouterr().err


def test_messages_under_a_name_that_zeromq_has_made_are_dropped(stack: ExitStack) -> None:
    # ZeroMQ also gives such a name to a connection that its client has replaced.
    server = serve(stack)
    unnamed = raw_socket(stack, b"", server)
    unnamed.send_multipart([bytes(part) for part in pack("data", 1, b"late")])
    assert server.receive(SECONDS) is None
    connect(stack, "rank 1", server).send("hello")
    assert server.expect(SECONDS, "a hello").peer == "rank 1"
    assert server.refusals.count == 0


def test_a_timeout_names_the_peer_and_what_was_waited_for(stack: ExitStack) -> None:
    server = serve(stack)
    client = connect(stack, "rank 1", server)
    assert client.receive(0.0) is None
    with pytest.raises(PeerTimeoutError, match=r"the weights from the hub \(tcp://127.0.0.1:"):
        client.expect(0.05, "the weights")
    with pytest.raises(PeerTimeoutError, match=f"a hello from a client of {server.address}"):
        server.expect(0.05, "a hello")


def test_sending_to_an_unknown_client_is_an_error(stack: ExitStack) -> None:
    server = serve(stack)
    with pytest.raises(PeerLostError, match="rank 9"):
        server.send("rank 9", "hello")


def test_a_full_queue_is_an_error_and_not_a_hang(stack: ExitStack) -> None:
    listener = serve(stack)
    client = connect(stack, "rank 1", listener, send_timeout=0.0)
    listener.close()

    def fill() -> None:
        for _ in range(100_000):
            client.send("data")

    with pytest.raises(PeerTimeoutError, match="the hub"):
        fill()


def test_a_second_client_takes_over_the_name(stack: ExitStack) -> None:
    server = serve(stack)
    first = connect(stack, "rank 1", server)
    first.send("hello")
    server.expect(SECONDS, "a hello")
    second = connect(stack, "rank 1", server)
    second.send("again")
    assert server.expect(SECONDS, "a hello").kind == "again"
    server.send("rank 1", "welcome")
    assert second.expect(SECONDS, "a welcome").kind == "welcome"


@pytest.mark.parametrize("earlier", [0, 1, 3])
def test_interrupt_ends_a_wait_in_another_thread(stack: ExitStack, earlier: int) -> None:
    server = serve(stack)
    for _ in range(earlier):
        server.interrupt()
        server.interrupt()
        assert server.receive(SECONDS) is None
    returned = threading.Event()

    def wait() -> None:
        assert server.receive(SECONDS) is None
        returned.set()

    thread = threading.Thread(target=wait)
    thread.start()
    server.interrupt()
    assert returned.wait(SECONDS / 2)
    thread.join(SECONDS)


def test_connection_events_and_messages_have_the_same_ids(stack: ExitStack) -> None:
    server = serve(stack, monitor=True)
    client = connect(stack, "rank 1", server)
    client.send("hello")
    opened = [e.connection for e in events_until(server, opened=True)]
    message = None
    while message is None:
        message = server.receive(SECONDS)
    assert opened == [message.connection]
    client.close()
    assert [e.connection for e in events_until(server, opened=False)] == opened


def events_until(server: Server, *, opened: bool) -> list[ConnectionEvent]:
    events: list[ConnectionEvent] = []

    def has_event() -> bool:
        events.extend(e for e in server.connection_events() if e.opened == opened)
        return bool(events)

    wait_until(has_event, f"a connection event came, opened={opened}")
    return events


def test_curve_admits_only_allowed_keys(stack: ExitStack) -> None:
    keys, friend, stranger = (CurveKeys.generate() for _ in range(3))
    server = serve(stack, curve=keys, allowed=[friend.public])
    keyed = {"curve": stranger, "server_key": keys.public}
    intruder = connect(stack, "intruder", server, **keyed, send_timeout=REFUSED_SEND_SECONDS)
    plain = connect(stack, "plain", server, send_timeout=REFUSED_SEND_SECONDS)
    guest = connect(stack, "guest", server, curve=friend, server_key=keys.public)
    for client in (intruder, plain):
        with contextlib.suppress(PeerTimeoutError):
            client.send("hello")
    guest.send("hello")
    assert server.expect(SECONDS, "a hello").peer == "guest"
    server.send("guest", "welcome")
    assert guest.expect(SECONDS, "a welcome").kind == "welcome"
    # A connection that opens or closes ends `receive` early, but not `expect`.
    with pytest.raises(PeerTimeoutError, match="a second hello"):
        server.expect(SILENCE_SECONDS, "a second hello")
    with pytest.raises(PeerTimeoutError, match="keys"):
        intruder.expect(0.05, "a welcome")


def test_curve_without_allowed_keys_needs_allow_any(stack: ExitStack) -> None:
    keys = CurveKeys.generate()
    with pytest.raises(ConfigError, match="allow_any=True"):
        Server(curve=keys)
    server = serve(stack, curve=keys, allow_any=True)
    client = connect(stack, "x", server, curve=CurveKeys.generate(), server_key=keys.public)
    client.send("hello")
    assert server.expect(SECONDS, "a hello").peer == "x"


def test_secrets_stay_out_of_logs() -> None:
    keys = CurveKeys.generate()
    assert keys.secret.decode() not in repr(keys)


def test_bad_arguments_are_refused(stack: ExitStack) -> None:
    server = serve(stack)
    port = int(server.address.rpartition(":")[2])
    with pytest.raises(ConfigError, match=f"port {port}"):
        Server(port=port)
    with pytest.raises(ConfigError, match=r"192\.0\.2\.1"):
        Server(bind="192.0.2.1", insecure=True)
    for wrong in (-1, 1 << 16, port + (1 << 16)):
        with pytest.raises(ConfigError, match=f"port must be 0 to 65535, got {wrong}"):
            Server(port=wrong)
        with pytest.raises(ConfigError, match="no port from 1 to 65535"):
            Client("rank 1", f"tcp://127.0.0.1:{wrong}")
    # ZeroMQ cannot encode these paths. A context that stays open would block the exit.
    with pytest.raises(ConfigError, match="cannot listen on"):
        Server(path=Path("/tmp/\udc80"))
    with pytest.raises(ConfigError, match="address"):
        Client("rank 1", "ipc:///tmp/\udc80")
    with pytest.raises(ConfigError, match="curve"):
        Server(allow_any=True)
    for public in ("0.0.0.0", "::", "192.0.2.1", "127.evil.example", "*"):
        with pytest.raises(ConfigError, match="bind must be a loopback address"):
            Server(bind=public)
    with pytest.raises(ConfigError, match="address"):
        Client("rank 1", "nonsense")
    with pytest.raises(ConfigError, match="server_key"):
        Client("rank 1", server.address, curve=CurveKeys.generate())
    with pytest.raises(ConfigError, match="identity"):
        Client("", server.address)
    keys = CurveKeys.generate()
    with pytest.raises(ConfigError, match="server_key must be 40 bytes"):
        Client("rank 1", server.address, curve=keys, server_key=keys.public[:-1])
    with pytest.raises(ConfigError, match="allowed must be 40 bytes"):
        Server(curve=keys, allowed=[b"~" * 40])
    with pytest.raises(ConfigError, match="must be that of the secret key"):
        CurveKeys(CurveKeys.generate().public, keys.secret)


@pytest.mark.parametrize(
    ("options", "rule"),
    [
        ({"frame_bytes": 0}, "frame_bytes must be a whole number of at least 1, got 0"),
        ({"unread_bytes": 1.5}, "unread_bytes must be a whole number"),
        ({"connections": True}, "connections must be a whole number"),
        ({"queued": -1}, "queued must be a whole number"),
    ],
)
def test_invalid_socket_limits_are_refused(options: dict[str, Any], rule: str) -> None:
    with pytest.raises(ConfigError, match=rule):
        SocketLimits(**options)


@pytest.mark.parametrize(
    ("options", "rule"),
    [
        ({"client_bytes": 0}, "client_bytes must be a whole number"),
        ({"total_bytes": "1"}, "total_bytes must be a whole number"),
        ({"seconds": 0.0}, "seconds must be a finite number above 0, got 0.0"),
        ({"least_bytes": -1}, "least_bytes must be a whole number of at least 0, got -1"),
    ],
)
def test_invalid_reply_limits_are_refused(options: dict[str, Any], rule: str) -> None:
    with pytest.raises(ConfigError, match=rule):
        ReplyLimits(**options)


def test_close_may_be_repeated() -> None:
    server = Server(curve=CurveKeys.generate(), allow_any=True, monitor=True)
    server.close()
    server.close()
    server.interrupt()
