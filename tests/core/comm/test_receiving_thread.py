"""A rank hears only the other ranks of its run, in order, and names one that sends nonsense."""

from __future__ import annotations

from contextlib import ExitStack, suppress

import pytest
import torch
import zmq
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from lightning_dlres.core.comm.mailbox import Channel
from lightning_dlres.core.comm.receiving_thread import PREFIX, Control, SocketReceiver
from lightning_dlres.core.errors import PeerError, PeerLostError, ProtocolError
from lightning_dlres.core.wire import payload
from lightning_dlres.core.wire.keys import CurveKeys, use_keys
from tests.support.rank_sockets import CHANNEL, TOKENS, TwoRanks
from tests.support.waiting import wait_until

# Deadline of a wait, in seconds. Only a failing test waits so long.
SECONDS = 20.0


def send_as_stranger(
    stack: ExitStack, ranks: TwoRanks, identity: bytes, keys: CurveKeys | None
) -> None:
    """Send a valid message as a process that is not a rank of the run.

    Args:
        stack: Stack that closes the socket.
        ranks: The message goes to rank 0.
        identity: ZeroMQ identity of the process.
        keys: Keys of the process; None sends without encryption.
    """
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    stack.callback(context.destroy, linger=0)
    client = context.socket(zmq.DEALER)
    # The stack holds the socket: the garbage collector would close it before it has sent.
    stack.callback(client.close)
    # Rank 0 may refuse the connection before or after the send. Without these options, the send or
    # the end of the context would then wait for ever.
    client.setsockopt(zmq.LINGER, 0)
    client.setsockopt(zmq.SNDTIMEO, 0)
    client.setsockopt(zmq.IDENTITY, identity)
    if keys is not None:
        use_keys(client, keys, ranks.keys[0].public)
    client.connect(ranks.sockets[0].address)
    with suppress(zmq.Again):
        client.send_multipart([PREFIX.pack(CHANNEL, 0) + payload.encode("false", ("key",))[0]])


@pytest.mark.parametrize("is_encrypted", [False, True])
def test_messages_arrive_in_order(stack: ExitStack, is_encrypted: bool) -> None:
    ranks = TwoRanks(stack, is_encrypted=is_encrypted)
    for number in range(20):
        ranks.send([number, torch.full((5000 * number,), float(number))])
    for number in range(20):
        key, (first, tensor) = ranks.items.get(timeout=SECONDS)  # type: ignore[misc]
        assert (key, first) == (("key",), number)
        assert torch.equal(tensor, torch.full((5000 * number,), float(number)))


def test_a_message_waits_until_its_channel_is_asked_for(stack: ExitStack) -> None:
    ranks = TwoRanks(stack)
    ranks.send("early", channel=Channel.SYNC_PLAN)
    ranks.send("other")
    assert ranks.items.get(timeout=SECONDS) == (("key",), "other")
    receiver = SocketReceiver()
    ranks.receiving.add(1, Channel.SYNC_PLAN, receiver)
    ranks.send("late", channel=Channel.SYNC_PLAN)
    texts = [receiver.items.get(timeout=SECONDS) for _ in range(2)]
    assert texts == [(("key",), "early"), (("key",), "late")]


@pytest.mark.parametrize("identity", [b"rank 1", *TOKENS])
def test_keys_of_the_run_are_needed_between_hosts(stack: ExitStack, identity: bytes) -> None:
    """Even the token of rank 1 is not enough."""
    ranks = TwoRanks(stack, is_encrypted=True)
    send_as_stranger(stack, ranks, identity, None)
    send_as_stranger(stack, ranks, identity, CurveKeys.generate())
    ranks.send("true")
    assert ranks.items.get(timeout=SECONDS) == (("key",), "true")
    assert ranks.items.empty()


def test_the_token_of_a_rank_is_needed_on_one_host(stack: ExitStack) -> None:
    ranks = TwoRanks(stack)
    send_as_stranger(stack, ranks, b"rank 1", None)
    wait_until(lambda: ranks.sockets[0].refusals.count, "the stranger is refused")
    ranks.send("true")
    assert ranks.items.get(timeout=SECONDS) == (("key",), "true")
    assert ranks.items.empty()


def test_a_broken_message_that_waited_for_its_channel_is_handed_over_once(stack: ExitStack) -> None:
    ranks = TwoRanks(stack)
    ranks.sockets[1].send_frames(0, [PREFIX.pack(Channel.SYNC_PLAN, 0)])
    ranks.send("next", number=1)
    assert ranks.items.get(timeout=SECONDS) == (("key",), "next")
    receiver = SocketReceiver()
    ranks.receiving.add(1, Channel.SYNC_PLAN, receiver)
    error = receiver.items.get(timeout=SECONDS)
    assert isinstance(error, ProtocolError)
    assert ranks.items.get(timeout=SECONDS) is error
    ranks.end()
    assert receiver.items.empty()


def test_a_broken_message_from_before_a_goodbye_is_an_error(stack: ExitStack) -> None:
    ranks = TwoRanks(stack)
    ranks.sockets[1].send_frames(0, [PREFIX.pack(Channel.SYNC_PLAN, 0)])
    ranks.sockets[1].send_frames(0, [PREFIX.pack(Control.GOODBYE, 1)])
    wait_until(lambda: ranks.receiving._sources[1].has_ended, "the goodbye has arrived")
    receiver = SocketReceiver()
    ranks.receiving.add(1, Channel.SYNC_PLAN, receiver)
    assert isinstance(receiver.items.get(timeout=SECONDS), ProtocolError)


def test_a_receiver_gets_the_error_that_ended_the_thread_before(
    stack: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(timeout: float) -> None:
        raise KeyError("bug")

    ranks = TwoRanks(stack)
    monkeypatch.setattr(ranks.sockets[0], "next_message", fail)
    error = ranks.items.get(timeout=SECONDS)
    assert isinstance(error, KeyError)
    receiver = SocketReceiver()
    ranks.receiving.add(1, Channel.SYNC_PLAN, receiver)
    assert receiver.items.get(timeout=SECONDS) is error


def header(tree: object = "text") -> bytes:
    """Return the header of a valid message, without its prefix."""
    return payload.encode(tree, ("key",))[0]


# Valid messages without content.
CONTROL_MESSAGES = tuple(PREFIX.pack(control, 0) for control in Control)
# Frames of broken messages.
BROKEN = {
    "no prefix": [b"short"],
    "no header": [PREFIX.pack(CHANNEL, 0)],
    "no msgpack": [PREFIX.pack(CHANNEL, 0) + b"\xc1"],
    "a missing number": [PREFIX.pack(CHANNEL, 1) + header()],
    "an unknown channel": [PREFIX.pack(999, 0) + header()],
    "bytes that no tensor has": [PREFIX.pack(CHANNEL, 0) + header(), b"more"],
    "no bytes of a tensor": [PREFIX.pack(CHANNEL, 0) + header(torch.zeros(5000))],
    "too few bytes": [PREFIX.pack(CHANNEL, 0) + header(torch.zeros(5000)), bytes(19_999)],
    # The msgpack bytes of the value "text" become those of an object of the class `os:x`.
    "a class that is not imported": [
        PREFIX.pack(CHANNEL, 0) + header().replace(b"\xa1v\xa4text", b"\xa1c\xa4os:x")
    ],
}


@pytest.mark.parametrize("frames", BROKEN.values(), ids=BROKEN)
def test_a_broken_message_ends_the_connection_and_names_its_sender(
    stack: ExitStack, frames: list[bytes]
) -> None:
    ranks = TwoRanks(stack)
    ranks.sockets[1].send_frames(0, frames)
    error = ranks.items.get(timeout=SECONDS)
    assert isinstance(error, ProtocolError)
    assert ranks.receiving.failures == {1: error}
    # Later messages are not heard, and a new channel gets the error at once.
    ranks.send("late", number=0)
    receiver = SocketReceiver()
    ranks.receiving.add(1, Channel.SYNC_PLAN, receiver)
    assert receiver.items.get(timeout=SECONDS) is error
    assert ranks.items.empty()


@settings(deadline=None, max_examples=15)
@given(st.lists(st.binary(max_size=60), min_size=1, max_size=2), st.booleans())
@example([b""], True)
@example([bytes(PREFIX.size)], False)
def test_random_bytes_of_a_rank_are_an_error(frames: list[bytes], has_prefix: bool) -> None:
    # These are valid, and no channel gets them.
    assume(has_prefix or not frames[0].startswith(CONTROL_MESSAGES))
    with ExitStack() as stack:
        ranks = TwoRanks(stack)
        if has_prefix:
            frames[0] = PREFIX.pack(CHANNEL, 0) + frames[0]
        ranks.sockets[1].send_frames(0, frames)
        assert isinstance(ranks.items.get(timeout=SECONDS), PeerError)


@pytest.mark.parametrize("has_said_goodbye", [False, True])
def test_a_closed_connection_is_an_error_unless_the_rank_has_said_goodbye(
    stack: ExitStack, has_said_goodbye: bool
) -> None:
    """The messages from before the end arrive first."""
    ranks = TwoRanks(stack)
    ranks.send("last words")
    if has_said_goodbye:
        ranks.sockets[1].send_frames(0, [PREFIX.pack(Control.GOODBYE, 1)])
    ranks.sockets[1].close_after(SECONDS)
    assert ranks.items.get(timeout=SECONDS) == (("key",), "last words")
    if has_said_goodbye:
        ranks.receiving.end(orderly=True).join(SECONDS)
        assert ranks.items.empty()
    else:
        assert isinstance(ranks.items.get(timeout=SECONDS), PeerLostError)


def test_a_rank_is_closed_only_after_its_last_message(stack: ExitStack) -> None:
    """The message of a stranger, which is refused, comes before the last one."""
    ranks = TwoRanks(stack)
    ranks.send("first")
    assert ranks.items.get(timeout=SECONDS) == (("key",), "first")
    ranks.end()
    reader = ranks.sockets[0]
    # The first call may return at the interrupt that has ended the thread.
    assert reader.next_message(0.0) is None
    send_as_stranger(stack, ranks, b"rank 1", None)
    wait_until(lambda: reader._socket.poll(0), "the stranger has sent")
    ranks.send("last words")
    ranks.sockets[1].close_after(SECONDS)

    def is_closed() -> bool:
        reader._read_monitor()
        return bool(reader._closed_ranks)

    wait_until(is_closed, "rank 1 has closed its connection")
    assert reader.next_message(SECONDS) is None, "the message of the stranger is refused"
    assert reader.closed_ranks() == []
    message = reader.next_message(SECONDS)
    assert message is not None
    assert message[0] == 1
    assert set(reader.closed_ranks()) == {1}


def test_a_rank_may_send_much_before_it_is_read(stack: ExitStack) -> None:
    """Only connections that have not shown a token are cut off."""
    ranks = TwoRanks(stack)
    ranks.send("first")
    assert ranks.items.get(timeout=SECONDS) == (("key",), "first")
    ranks.end()
    ranks.send(torch.zeros(4 << 20))
    connections = ranks.sockets[0]._connections
    (connection,) = connections._connections.values()
    wait_until(lambda: connection.unread_bytes() > 1 << 20, "the kernel has received much")
    connections.check()
    assert len(connections) == 1
    # The first call may return at the interrupt that has ended the thread.
    frames = ranks.sockets[0].next_message(SECONDS) or ranks.sockets[0].next_message(SECONDS)
    assert frames is not None
    assert len(frames[1][1]) == 16 << 20


def test_nothing_is_sent_over_closed_sockets(stack: ExitStack) -> None:
    ranks = TwoRanks(stack)
    ranks.sockets[1].close_after(0.0)
    with pytest.raises(PeerLostError, match="rank 0 cannot be reached"):
        ranks.send("late")
