"""Messages arrive whole and in order, and whoever waits in vain is told for what and for whom."""

from __future__ import annotations

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

from lightning_dlres.core.errors import PeerError, PeerLostError
from lightning_dlres.core.trace import Tracer
from lightning_dlres.core.wire.tree import flatten
from lightning_dlres.pipeline.comm.mailbox import Channel, Mailbox, wait_for
from tests.support.rank_pool import RankContext, RankPool

SECONDS = 20.0
LONG = timedelta(days=1)
NAMES = [f"stage {rank} (rank {rank})" for rank in range(3)]


def nothing_known() -> None:
    """No failure of another rank is known."""


def open_mailbox(
    context: RankContext, timeout: float = SECONDS, check: Callable[[], None] = nothing_known
) -> Mailbox:
    context.init_process_group()
    group = dist.new_group(backend="gloo", timeout=LONG)
    assert isinstance(group, dist.ProcessGroup)
    return Mailbox(group, context.rank, NAMES[: context.world_size], timeout, check, Tracer())


@contextmanager
def mailbox_of(context: RankContext) -> Iterator[Mailbox]:
    """A mailbox that is closed in order."""
    mailbox = open_mailbox(context)
    yield mailbox
    mailbox.close(orderly=True)
    dist.barrier()


def threads() -> list[str]:
    return [t.name for t in threading.enumerate() if t.name.startswith(("send-", "receive-"))]


def trees(seed: int) -> list[Any]:
    """Trees of all sizes; the ranks make the same ones from the same seed."""
    g = torch.Generator().manual_seed(seed)
    large = torch.randn(300_000, generator=g)
    return [
        None,
        large,
        torch.randn(3, generator=g),
        {"x": [large[::2], torch.zeros(0)], "n": 2**80, "name": "ü"},
        [torch.arange(5000), (torch.rand(2000, generator=g) > 0.5), torch.tensor(2.5)],
        OrderedDict(a=np.arange(6).reshape(2, 3), b=np.float32(0.1)),
        torch.randn(70, 70, generator=g).bfloat16().t(),
        # Headers longer than a frame, and all that end near the edge of the first one.
        "long " * 2000,
        *("x" * length for length in range(1985, 2060)),
    ]


def equal(a: Any, b: Any) -> bool:
    (one, first), (other, second) = flatten(a), flatten(b)
    return one == other and all(
        x.dtype == y.dtype and torch.equal(x, y) for x, y in zip(first, second, strict=True)
    )


def exchange(context: RankContext) -> list[str]:
    peer = 1 - context.rank
    with mailbox_of(context) as mailbox:
        for channel in (Channel.ACTIVATION, Channel.GRADIENT):
            for number, tree in enumerate(trees(10 * context.rank + channel)):
                mailbox.send(peer, channel, ("tree", number), tree)
        # Not in the order of sending: a channel does not wait for another.
        for channel in (Channel.GRADIENT, Channel.ACTIVATION):
            for number, tree in enumerate(trees(10 * peer + channel)):
                found = mailbox.receive(peer, channel, ("tree", number), "a tree")
                assert equal(found, tree), number
    # Its threads have ended, and with them what they record last.
    spans = [s for s in mailbox._tracer.spans() if s.category == "transfer"]
    assert {s.name for s in spans} >= {"send activation", "receive gradient"}
    return threads()


def test_trees_arrive_in_order_and_a_close_ends_all_threads(pool: RankPool) -> None:
    assert pool.run(exchange, 2) == [[], []]


def flags(context: RankContext) -> None:
    with mailbox_of(context) as mailbox:
        sent = [
            torch.ones(2, requires_grad=True),
            torch.ones(2000, requires_grad=True) * 2,
            torch.ones(2),
        ]
        if context.rank == 0:
            mailbox.send(1, Channel.ACTIVATION, ("a",), sent)
        else:
            found = mailbox.receive(0, Channel.ACTIVATION, ("a",), "activations")
            assert [t.requires_grad for t in found] == [True, True, False]
            assert all(t.is_leaf for t in found)


def test_whether_a_gradient_is_wanted_arrives(pool: RankPool) -> None:
    pool.run(flags, 2)


def broadcast(context: RankContext) -> Any:
    with mailbox_of(context) as mailbox:
        for source in range(3):
            mine: Any = torch.full((40_000,), float(context.rank)) if context.rank == source else 0
            found = mailbox.broadcast(source, Channel.STEP, ("step", source), mine, "the step")
            if context.rank == source:
                mine.zero_()  # its tensor may be written to at once
            else:
                assert torch.equal(found, torch.full((40_000,), float(source)))


def test_a_broadcast_from_every_rank(pool: RankPool) -> None:
    pool.run(broadcast, 3)


def out_of_step(context: RankContext) -> str:
    with mailbox_of(context) as mailbox:
        if context.rank == 1:
            mailbox.send(0, Channel.GRADIENT, (3, 1), torch.ones(2000))
            mailbox.send(0, Channel.GRADIENT, (4, 1), "next")
            return ""
        with pytest.raises(PeerError) as raised:
            mailbox.receive(1, Channel.GRADIENT, (2, 1), "the gradients of micro-batch 2")
        assert mailbox.receive(1, Channel.GRADIENT, (4, 1), "the next") == "next"
    return f"{type(raised.value).__name__}: {raised.value}"


def test_another_message_than_expected_is_an_error_and_not_data(pool: RankPool) -> None:
    assert pool.run(out_of_step, 2)[0] == (
        "ProtocolError: stage 0 (rank 0) expected message (2, 1) (the gradients of micro-batch 2) "
        "from stage 1 (rank 1) and got (3, 1): the ranks are out of step."
    )


def in_vain(context: RankContext, known: str) -> tuple[str, str]:
    def check() -> None:
        if known:
            raise PeerLostError(known)

    mailbox = open_mailbox(context, 0.3, check)
    if context.rank == 1:
        mailbox.send(0, Channel.ACTIVATION, (0,), "last words")
        dist.barrier()
        dist.barrier()
        return "", ""
    dist.barrier()
    # What was sent before the failure became known still counts.
    first = mailbox.receive(1, Channel.ACTIVATION, (0,), "the first message")
    with pytest.raises(PeerError) as raised:
        mailbox.receive(1, Channel.ACTIVATION, (1,), "the activations of micro-batch 1")
    dist.barrier()
    return first, f"{type(raised.value).__name__}: {raised.value}"


def test_a_deadline_names_what_was_waited_for_and_from_whom(pool: RankPool) -> None:
    first, error = pool.run(in_vain, 2, "")[0]
    assert first == "last words"
    assert error.startswith(
        "PeerTimeoutError: stage 0 (rank 0) waited 0.3 s for the activations of micro-batch 1 from "
        "stage 1 (rank 1), and nothing came."
    )


def test_a_failure_that_is_known_ends_a_wait(pool: RankPool) -> None:
    first, error = pool.run(in_vain, 2, "stage 7 is gone")[0]
    assert first == "last words"
    assert error == "PeerLostError: stage 7 is gone"


def dies(context: RankContext) -> list[str]:
    mailbox = open_mailbox(context)
    if context.rank == 1:
        mailbox.send(0, Channel.ACTIVATION, (0,), torch.ones(5000))
        mailbox.receive(0, Channel.OBJECT, ("now",), "the word")
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


def test_a_rank_that_dies_is_named(pool: RankPool) -> None:
    alive, dead = pool.run_expecting_errors(dies, 2, keep=True)
    assert dead.error_type == "RankDied"
    assert alive.error_type is None, alive.traceback
    for error in alive.value:
        assert error.startswith(
            "PeerLostError: stage 0 (rank 0) lost stage 1 (rank 1) while it waited for the second: "
        )


def unsendable(context: RankContext) -> None:
    with mailbox_of(context) as mailbox:
        if context.rank == 0:
            with pytest.raises(ValueError, match=r"builtins\.object cannot be sent"):
                mailbox.send(1, Channel.OBJECT, ("x",), [object()])
            mailbox.send(1, Channel.OBJECT, ("x",), "fine")
        else:
            assert mailbox.receive(0, Channel.OBJECT, ("x",), "x") == "fine"


def test_what_cannot_travel_is_an_error_where_it_is_sent(pool: RankPool) -> None:
    pool.run(unsendable, 2)


def cannot_be_built(context: RankContext) -> str:
    mailbox = open_mailbox(context, timeout=1.0)
    if context.rank == 0:
        mailbox.send(1, Channel.BATCH, ("x",), only_here()(1))
        dist.barrier()
        return ""
    with pytest.raises(PeerError) as raised:
        mailbox.receive(0, Channel.BATCH, ("x",), "the batch")
    dist.barrier()
    return f"{type(raised.value).__name__}: {raised.value}"


def only_here() -> Any:
    """A data class that no other rank has imported."""
    kind = dataclasses.make_dataclass("OnlyHere", ["x"])
    kind.__module__ = __name__
    globals()["OnlyHere"] = kind
    return kind


def test_a_class_that_the_receiver_does_not_know_is_named(pool: RankPool) -> None:
    error = pool.run(cannot_be_built, 2)[1]
    assert error.startswith(("ProtocolError", "PeerLostError"))
    assert "OnlyHere' arrived in a batch, but no such class is imported here" in error


# --- Waiting for a collective.


class Work:
    """A collective that is complete after so many looks."""

    def __init__(self, looks: float, error: Exception | None = None) -> None:
        self.looks, self.error, self.waited = looks, error, False

    def is_completed(self) -> bool:
        self.looks -= 1
        return self.looks < 0

    def wait(self) -> None:
        self.waited = True
        if self.error:
            raise self.error


def test_waiting_for_a_collective() -> None:
    done = Work(3)
    wait_for(done, "the others", SECONDS, nothing_known)
    assert done.waited


def test_a_collective_that_never_completes() -> None:
    with pytest.raises(PeerError, match=r"waited 0\.05 s for the others"):
        wait_for(Work(float("inf")), "the others", 0.05, nothing_known)


def test_a_known_failure_ends_the_wait_for_a_collective_that_does_not_complete() -> None:
    def lost() -> None:
        raise PeerLostError("rank 1 is gone")

    with pytest.raises(PeerLostError, match="rank 1 is gone"):
        wait_for(Work(float("inf")), "the others", SECONDS, lost)
    nearly = Work(4)
    wait_for(nearly, "the others", SECONDS, lost)
    assert nearly.waited, "who failed may have come here first"


def test_a_collective_that_breaks_is_a_lost_peer() -> None:
    broken = Work(0, RuntimeError("[gloo/transport/tcp/pair.cc] Connection closed by peer"))
    with pytest.raises(PeerError, match="the gradients"):
        wait_for(broken, "the gradients", SECONDS, nothing_known)
