"""Messages arrive whole and in order; a wait that fails names the message and the peer."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from lightning_dlres.core.comm.mailbox import Channel, Mailbox, message_group, release_group
from lightning_dlres.core.comm.socket_mailbox import SocketMailbox
from lightning_dlres.core.errors import PeerError, PeerLostError
from lightning_dlres.core.trace import Tracer
from lightning_dlres.core.wire.tree import flatten
from tests.support.rank_pool import RankContext, RankPool
from tests.support.waiting import no_failure

# Timeout of a receive, in seconds. Only a failing test waits so long.
TIMEOUT = 20.0
# Timeout of the process group: never reached, so that the mailbox's own timeout decides.
GROUP_TIMEOUT = timedelta(days=1)
TRANSPORTS = ("gloo", "zmq")
NAMES = [f"stage {rank} (rank {rank})" for rank in range(3)]


def open_mailbox(
    context: RankContext,
    transport: str,
    timeout: float = TIMEOUT,
    check: Callable[[], None] = no_failure,
) -> Mailbox:
    """Return a mailbox, connected to those of the other ranks.

    Args:
        context: This rank.
        transport: "gloo" or "zmq".
        timeout: Deadline of `receive` in seconds.
        check: Called in `receive` while it waits.
    """
    context.init_process_group()
    group = dist.new_group(backend="gloo", timeout=GROUP_TIMEOUT)
    assert isinstance(group, dist.ProcessGroup)
    names = NAMES[: context.world_size]
    kind = {"gloo": Mailbox, "zmq": SocketMailbox}[transport]
    mailbox = kind(group, context.rank, names, timeout=TIMEOUT, check=no_failure, tracer=Tracer())
    # Sockets connect when they are made. A short timeout or a failure must not end that.
    mailbox.timeout, mailbox.check = timeout, check
    return mailbox


@contextmanager
def mailbox_of(context: RankContext, transport: str) -> Iterator[Mailbox]:
    """Context manager that opens a mailbox, and closes it on all ranks."""
    mailbox = open_mailbox(context, transport)
    yield mailbox
    mailbox.close(orderly=True)
    dist.barrier()


def mailbox_threads() -> list[str]:
    return [t.name for t in threading.enumerate() if t.name.startswith(("send-", "receive-"))]


def trees(seed: int) -> list[Any]:
    """Return trees of many sizes; the same for the same seed."""
    g = torch.Generator().manual_seed(seed)
    large = torch.randn(300_000, generator=g)
    return [
        None,
        large,
        large[:150_000],
        torch.randn(3, generator=g),
        {"x": [large[::2], torch.zeros(0)], "n": 2**80, "name": "ü"},
        [torch.arange(5000), (torch.rand(2000, generator=g) > 0.5), torch.tensor(2.5)],
        OrderedDict(a=np.arange(6).reshape(2, 3), b=np.float32(0.1)),
        torch.randn(70, 70, generator=g).bfloat16().t(),
        # A header longer than a frame, and headers that end near the end of the first frame.
        "long " * 2000,
        *("x" * length for length in range(1985, 2060)),
    ]


def equal(a: Any, b: Any) -> bool:
    (one, first), (other, second) = flatten(a), flatten(b)
    return one == other and all(
        x.dtype == y.dtype and torch.equal(x, y) for x, y in zip(first, second, strict=True)
    )


def exchange_trees(context: RankContext, transport: str) -> list[str]:
    peer = 1 - context.rank
    with mailbox_of(context, transport) as mailbox:
        # On GRADIENT_SYNC, the sender's frames are as short as its messages. The other two channels
        # have frames of one size.
        for channel in (Channel.ACTIVATION, Channel.GRADIENT, Channel.GRADIENT_SYNC):
            for number, tree in enumerate(trees(10 * context.rank + channel)):
                mailbox.send(peer, channel, ("tree", number), tree)
        # Receive in another order than the peer sent: channels do not wait for each other.
        for channel in (Channel.GRADIENT, Channel.GRADIENT_SYNC, Channel.ACTIVATION):
            for number, tree in enumerate(trees(10 * peer + channel)):
                received = mailbox.receive(peer, channel, ("tree", number), "a tree")
                assert equal(received, tree), number
    # The threads have ended, so all spans are recorded.
    spans = [s for s in mailbox._tracer.spans() if s.category == "transfer"]
    assert {s.name for s in spans} >= {"send activation", "receive gradient"}
    return mailbox_threads()


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_trees_arrive_in_order_and_close_ends_all_threads(pool: RankPool, transport: str) -> None:
    assert pool.run(exchange_trees, 2, transport) == [[], []]


def send_requires_grad(context: RankContext, transport: str) -> None:
    with mailbox_of(context, transport) as mailbox:
        sent = [
            torch.ones(2, requires_grad=True),
            torch.ones(2000, requires_grad=True) * 2,
            torch.ones(2),
        ]
        if context.rank == 0:
            mailbox.send(1, Channel.ACTIVATION, ("a",), sent)
        else:
            received = mailbox.receive(0, Channel.ACTIVATION, ("a",), "activations")
            assert [t.requires_grad for t in received] == [True, True, False]
            assert all(t.is_leaf for t in received)


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_requires_grad_is_sent(pool: RankPool, transport: str) -> None:
    pool.run(send_requires_grad, 2, transport)


def broadcast_from_all(context: RankContext, transport: str) -> None:
    with mailbox_of(context, transport) as mailbox:
        for source in range(3):
            own: Any = torch.full((40_000,), float(context.rank)) if context.rank == source else 0
            received = mailbox.broadcast(source, Channel.STEP, ("step", source), own, "the step")
            if context.rank == source:
                # The source may write to its tensor at once.
                own.zero_()
            else:
                assert torch.equal(received, torch.full((40_000,), float(source)))


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_every_rank_can_broadcast(pool: RankPool, transport: str) -> None:
    pool.run(broadcast_from_all, 3, transport)


def receive_unexpected(context: RankContext, transport: str) -> str:
    with mailbox_of(context, transport) as mailbox:
        if context.rank == 1:
            mailbox.send(0, Channel.GRADIENT, (3, 1), torch.ones(2000))
            mailbox.send(0, Channel.GRADIENT, (4, 1), "next")
            return ""
        with pytest.raises(PeerError) as raised:
            mailbox.receive(1, Channel.GRADIENT, (2, 1), "the gradients of micro-batch 2")
        assert mailbox.receive(1, Channel.GRADIENT, (4, 1), "the next") == "next"
    return f"{type(raised.value).__name__}: {raised.value}"


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_message_with_another_key_is_an_error(pool: RankPool, transport: str) -> None:
    assert pool.run(receive_unexpected, 2, transport)[0] == (
        "ProtocolError: stage 0 (rank 0) expected message (2, 1) (the gradients of micro-batch 2) "
        "from stage 1 (rank 1) and got (3, 1): the ranks are out of step."
    )


def wait_in_vain(context: RankContext, transport: str, failure: str) -> tuple[str, str]:
    def check() -> None:
        if failure:
            raise PeerLostError(failure)

    mailbox = open_mailbox(context, transport, 0.3, check)
    if context.rank == 1:
        mailbox.send(0, Channel.ACTIVATION, (0,), "last words")
        dist.barrier()
        dist.barrier()
        return "", ""
    dist.barrier()
    # A message that was sent before the failure still arrives.
    first = mailbox.receive(1, Channel.ACTIVATION, (0,), "the first message")
    with pytest.raises(PeerError) as raised:
        mailbox.receive(1, Channel.ACTIVATION, (1,), "the activations of micro-batch 1")
    dist.barrier()
    return first, f"{type(raised.value).__name__}: {raised.value}"


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_the_timeout_error_names_message_and_peer(pool: RankPool, transport: str) -> None:
    first, error = pool.run(wait_in_vain, 2, transport, "")[0]
    assert first == "last words"
    assert error.startswith(
        "PeerTimeoutError: stage 0 (rank 0) waited 0.3 s for the activations of micro-batch 1 from "
        "stage 1 (rank 1), and no message came."
    )


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_known_failure_ends_the_wait(pool: RankPool, transport: str) -> None:
    first, error = pool.run(wait_in_vain, 2, transport, "stage 7 is gone")[0]
    assert first == "last words"
    assert error == "PeerLostError: stage 7 is gone"


def lose_rank_one(context: RankContext, transport: str) -> list[str]:
    mailbox = open_mailbox(context, transport)
    if context.rank == 1:
        mailbox.send(0, Channel.ACTIVATION, (0,), torch.ones(5000))
        mailbox.receive(0, Channel.OBJECT, ("now",), "the signal to exit")
        os._exit(3)
    assert mailbox.receive(1, Channel.ACTIVATION, (0,), "the first").sum() == 5000
    mailbox.send(1, Channel.OBJECT, ("now",), None)
    errors = []
    for channel in (Channel.ACTIVATION, Channel.GRADIENT):
        with pytest.raises(PeerError) as raised:
            mailbox.receive(1, channel, (1,), "the second")
        errors.append(f"{type(raised.value).__name__}: {raised.value}")
    mailbox.close(orderly=False)
    return errors


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_the_error_names_a_rank_that_died(pool: RankPool, transport: str) -> None:
    alive, dead = pool.run_expecting_errors(lose_rank_one, 2, transport, keep=True)
    assert dead.error_type == "RankDied"
    assert alive.error_type is None, alive.traceback
    for error in alive.value:
        assert error.startswith(
            "PeerLostError: stage 0 (rank 0) lost stage 1 (rank 1) while it waited for the second: "
        )


def send_unsendable(context: RankContext, transport: str) -> None:
    with mailbox_of(context, transport) as mailbox:
        if context.rank == 0:
            with pytest.raises(ValueError, match=r"builtins\.object cannot be sent"):
                mailbox.send(1, Channel.OBJECT, ("x",), [object()])
            mailbox.send(1, Channel.OBJECT, ("x",), "fine")
        else:
            assert mailbox.receive(0, Channel.OBJECT, ("x",), "x") == "fine"


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_value_that_cannot_be_sent_is_an_error_of_the_sender(
    pool: RankPool, transport: str
) -> None:
    pool.run(send_unsendable, 2, transport)


def send_unknown_class(context: RankContext, transport: str) -> str:
    mailbox = open_mailbox(context, transport, timeout=1.0)
    if context.rank == 0:
        mailbox.send(1, Channel.BATCH, ("x",), make_local_class()(1))
        dist.barrier()
        return ""
    with pytest.raises(PeerError) as raised:
        mailbox.receive(0, Channel.BATCH, ("x",), "the batch")
    dist.barrier()
    return f"{type(raised.value).__name__}: {raised.value}"


def make_local_class() -> Any:
    """Return a data class that no other rank has imported."""
    kind = dataclasses.make_dataclass("OnlyHere", ["x"])
    kind.__module__ = __name__
    globals()["OnlyHere"] = kind
    return kind


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_the_error_names_a_class_that_the_receiver_has_not_imported(
    pool: RankPool, transport: str
) -> None:
    error = pool.run(send_unknown_class, 2, transport)[1]
    assert error.startswith(("ProtocolError", "PeerLostError"))
    assert "OnlyHere' arrived in a batch, but no such class is imported here" in error


def share_the_default_group(context: RankContext) -> list[float]:
    context.init_process_group()
    group, peer, received = message_group(), 1 - context.rank, []
    names = NAMES[: context.world_size]

    def new_mailbox() -> Mailbox:
        return Mailbox(
            group, context.rank, names, timeout=TIMEOUT, check=no_failure, tracer=Tracer()
        )

    abandoned, first, second = new_mailbox(), new_mailbox(), new_mailbox()
    # After a failure, the thread of a receive still waits. It must not get a later message.
    with contextlib.suppress(PeerError):
        abandoned.timeout = 0.05
        abandoned.receive(peer, Channel.ACTIVATION, ("m",), "a message that no rank sends")
    abandoned.close(orderly=False)
    for number, mailbox in enumerate((second, first)):
        mailbox.send(peer, Channel.ACTIVATION, ("m",), torch.full((3,), float(number)))
    for mailbox in (first, second):
        total = torch.ones(4)
        dist.all_reduce(total)
        received.append(
            float(mailbox.receive(peer, Channel.ACTIVATION, ("m",), "a message")[0])
            + float(total[0])
        )
    for mailbox in (first, second):
        mailbox.close(orderly=True)
    release_group(group)
    dist.barrier()
    return received


def test_mailboxes_over_the_default_group_get_their_own_messages(pool: RankPool) -> None:
    assert pool.run(share_the_default_group, 2) == [[3.0, 2.0]] * 2


def close_without_rank_one(context: RankContext) -> bool:
    """Return True if an orderly close without rank 1's goodbye has closed all sockets."""
    mailbox = open_mailbox(context, "zmq", timeout=0.5)
    assert isinstance(mailbox, SocketMailbox)
    if context.rank == 0:
        mailbox.close(orderly=True)
    dist.barrier()
    if context.rank == 1:
        mailbox.close(orderly=False)
    return mailbox._sockets._context.closed


def test_a_close_that_a_rank_does_not_join_leaves_no_socket_open(pool: RankPool) -> None:
    # An open one would block a later garbage collection of its context.
    assert pool.run(close_without_rank_one, 2) == [True, True]
