"""What one rank knows all ranks know, without pickle and without waiting for ever."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from lightning_dlres.core.errors import ConfigError, PeerLostError, PeerTimeoutError
from lightning_dlres.pipeline.comm.objects import (
    all_ranks,
    any_rank,
    broadcast_tree,
    gather_numbers,
)
from tests.support.rank_pool import RankContext, RankPool

SECONDS = 20.0


def nothing_known() -> None:
    """No failure of another rank is known."""


def everything(context: RankContext) -> list[Any]:
    context.init_process_group()
    rank, world = context.rank, context.world_size
    for source in range(world):
        large = torch.arange(5000) + source
        tree = {"large": [large, large.float()], "small": torch.tensor([source]), "text": "ü" * 99}
        found = broadcast_tree(tree if rank == source else None, source, SECONDS, nothing_known)
        assert found.keys() == tree.keys()
        assert all(map(torch.equal, found["large"], tree["large"]))
        assert found["small"].tolist() == [source]
        assert found["text"] == tree["text"]
    assert broadcast_tree(None, 0, SECONDS, nothing_known) is None
    assert broadcast_tree([], world - 1, SECONDS, nothing_known) == []
    numbers = gather_numbers([float(rank), 0.1 * rank], SECONDS, nothing_known)
    assert numbers == [[float(r), 0.1 * r] for r in range(world)], "64 bits arrive"
    assert gather_numbers([], SECONDS, nothing_known) == [[]] * world
    return [
        any_rank(flag, SECONDS, nothing_known)
        for flag in (True, False, rank == 0, rank == world - 1)
    ] + [
        all_ranks(flag, SECONDS, nothing_known)
        for flag in (True, False, rank == 0, rank != world - 1)
    ]


@pytest.mark.parametrize("world", [1, 2, 3])
def test_all_ranks_come_to_know_the_same(pool: RankPool, world: int) -> None:
    expected = [True, False, True, True, True, False, world == 1, False]
    assert pool.run(everything, world) == [expected] * world


def in_vain(context: RankContext, known: str) -> str:
    context.init_process_group()
    if context.rank == 1:
        return ""

    def check() -> None:
        if known:
            raise PeerLostError(known)

    with pytest.raises((PeerTimeoutError, PeerLostError)) as raised:
        broadcast_tree(None, 1, 0.3, check)
    return f"{type(raised.value).__name__}: {raised.value}"


def test_a_rank_that_does_not_come_is_waited_for_no_longer_than_the_timeout(pool: RankPool) -> None:
    error = pool.run(in_vain, 2, "")[0]
    assert error.startswith("PeerTimeoutError: waited 0.3 s for a broadcast from rank 1")


def test_a_known_failure_ends_the_wait(pool: RankPool) -> None:
    assert pool.run(in_vain, 2, "rank 1 is gone")[0] == "PeerLostError: rank 1 is gone"


def unsendable(context: RankContext) -> None:
    context.init_process_group()
    with pytest.raises(ConfigError, match="cannot be sent"):
        broadcast_tree({1, 2}, 0, SECONDS, nothing_known)


def test_what_cannot_travel_is_an_error_at_the_source(pool: RankPool) -> None:
    pool.run(unsendable, 1)
