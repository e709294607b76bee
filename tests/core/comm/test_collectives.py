"""Collectives give all ranks the same values, without pickle, and never wait forever."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from lightning_dlres.core.comm.collectives import (
    any_rank,
    broadcast_flags,
    broadcast_tree,
    gather_bytes,
    gather_numbers,
    no_check,
    wait_for_collective,
)
from lightning_dlres.core.errors import ConfigError, PeerLostError, PeerTimeoutError
from tests.support.rank_pool import RankContext, RankPool
from tests.support.waiting import no_failure

# Timeout of a collective, in seconds. Only a failing test waits so long.
SECONDS = 20.0


def use_all_collectives(context: RankContext) -> list[Any]:
    context.init_process_group()
    rank, world = context.rank, context.world_size
    for source in range(world):
        # Large tensors have broadcasts of their own; others travel in the header.
        large = torch.arange(5000) + source
        tree = {"large": [large, large.float()], "small": torch.tensor([source]), "text": "ü" * 99}
        received = broadcast_tree(tree if rank == source else None, source, SECONDS, no_failure)
        assert received.keys() == tree.keys()
        assert all(map(torch.equal, received["large"], tree["large"]))
        assert received["small"].tolist() == [source]
        assert received["text"] == tree["text"]
    for source in range(world):
        flags = [rank == source, rank != source, False]
        assert broadcast_flags(flags, source, SECONDS, no_failure) == [True, False, False]
    assert broadcast_flags([], 0, SECONDS, no_failure) == []
    assert broadcast_tree(None, 0, SECONDS, no_failure) is None
    assert broadcast_tree([], world - 1, SECONDS, no_failure) == []
    numbers = gather_numbers([float(rank), 0.1 * rank], SECONDS, no_failure)
    assert numbers == [[float(r), 0.1 * r] for r in range(world)], "all 64 bits must arrive"
    assert gather_numbers([], SECONDS, no_failure) == [[]] * world
    pieces = gather_bytes(bytes([rank]) * rank, SECONDS, no_failure)
    assert pieces == [bytes([r]) * r for r in range(world)], "ranks may have unlike lengths"
    return [
        any_rank(flag, SECONDS, no_failure) for flag in (True, False, rank == 0, rank == world - 1)
    ]


@pytest.mark.parametrize("world", [1, 2, 3])
def test_all_ranks_get_the_same_values(pool: RankPool, world: int) -> None:
    expected = [True, False, True, True]
    assert pool.run(use_all_collectives, world) == [expected] * world


def wait_for_absent_rank(context: RankContext, failure: str) -> str:
    context.init_process_group()
    if context.rank == 1:
        return ""

    def check() -> None:
        if failure:
            raise PeerLostError(failure)

    with pytest.raises((PeerTimeoutError, PeerLostError)) as raised:
        broadcast_tree(None, 1, 0.3, check)
    return f"{type(raised.value).__name__}: {raised.value}"


def test_a_wait_for_an_absent_rank_ends_at_the_timeout(pool: RankPool) -> None:
    error = pool.run(wait_for_absent_rank, 2, "")[0]
    assert error.startswith("PeerTimeoutError: waited 0.3 s for a broadcast from rank 1")


def test_a_known_failure_ends_the_wait(pool: RankPool) -> None:
    assert pool.run(wait_for_absent_rank, 2, "rank 1 is gone")[0] == "PeerLostError: rank 1 is gone"


def broadcast_unsendable(context: RankContext) -> None:
    context.init_process_group()
    with pytest.raises(ConfigError, match="cannot be sent"):
        broadcast_tree({1, 2}, 0, SECONDS, no_failure)


def test_a_value_that_cannot_be_sent_is_an_error_at_the_source(pool: RankPool) -> None:
    pool.run(broadcast_unsendable, 1)


# --- Handles of collectives.


class Work:
    """Handle of a collective that is complete after a number of calls of `is_completed`.

    Args:
        calls: Number of calls.
        error: Raised by `wait`.
    """

    def __init__(self, calls: float, error: Exception | None = None) -> None:
        self.calls, self.error, self.waited = calls, error, False

    def is_completed(self) -> bool:
        self.calls -= 1
        return self.calls < 0

    def wait(self) -> None:
        self.waited = True
        if self.error:
            raise self.error


def test_wait_for_collective_waits_until_it_is_complete() -> None:
    done = Work(3)
    wait_for_collective(done, "the others", SECONDS, no_failure)
    assert done.waited


def test_a_collective_that_never_completes_is_an_error() -> None:
    with pytest.raises(PeerTimeoutError, match=r"waited 0\.05 s for the others"):
        wait_for_collective(Work(float("inf")), "the others", 0.05, no_failure)


def test_a_known_failure_ends_the_wait_unless_the_collective_completes() -> None:
    def raise_lost() -> None:
        raise PeerLostError("rank 1 is gone")

    with pytest.raises(PeerLostError, match="rank 1 is gone"):
        wait_for_collective(Work(float("inf")), "the others", SECONDS, raise_lost)
    nearly = Work(4)
    wait_for_collective(nearly, "the others", SECONDS, raise_lost)
    assert nearly.waited, "the failed rank may have taken part before it failed"


def test_a_broken_connection_of_a_collective_is_a_lost_peer() -> None:
    broken = Work(0, RuntimeError("[gloo/transport/tcp/pair.cc] Connection closed by peer"))
    with pytest.raises(PeerLostError, match="waited for the gradients"):
        wait_for_collective(broken, "the gradients", SECONDS, no_check)


def test_the_rank_that_broke_a_collective_is_named_once_it_is_known() -> None:
    broken, calls = Work(0, RuntimeError("Connection closed by peer")), iter(range(10))

    def raise_lost_later() -> None:
        if next(calls) == 3:
            raise PeerLostError("rank 1 is gone")

    with pytest.raises(PeerLostError, match="rank 1 is gone"):
        wait_for_collective(broken, "the gradients", SECONDS, raise_lost_later)
