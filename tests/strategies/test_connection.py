"""The connection of the ranks: who is the parent of a process, and who is late."""

from __future__ import annotations

from pathlib import Path

import pytest
from lightning.fabric.plugins.environments import LightningEnvironment, TorchElasticEnvironment

from lightning_dlres.core.errors import ConfigError, PeerTimeoutError
from lightning_dlres.core.trace import Tracer
from lightning_dlres.strategies.connection import (
    Connection,
    is_child_of_rank_0,
)
from lightning_dlres.strategies.process_group import check_backend
from tests.support.rank_pool import RankContext, RankPool
from tests.support.waiting import wait_until


@pytest.mark.parametrize(
    ("node_rank", "local_rank", "expected"),
    [(0, 0, False), (0, 1, True), (1, 0, False), (1, 1, False)],
)
def test_rank_0_is_the_parent_on_its_own_host_only(
    monkeypatch: pytest.MonkeyPatch, node_rank: int, local_rank: int, expected: bool
) -> None:
    monkeypatch.setenv("NODE_RANK", str(node_rank))
    monkeypatch.setenv("LOCAL_RANK", str(local_rank))
    assert is_child_of_rank_0(LightningEnvironment()) == expected
    assert not is_child_of_rank_0(TorchElasticEnvironment())


@pytest.mark.parametrize("backend", ["fake", "undefined", "glo", "cpu:gloo,cuda:fake", 3])
def test_a_backend_that_connects_no_ranks_is_refused(backend: object) -> None:
    check_backend("gloo")
    check_backend("cpu:gloo,cuda:nccl")
    with pytest.raises(ConfigError, match=r"^process_group_backend must be .*'gloo'") as raised:
        check_backend(backend)
    assert "'fake' or" not in str(raised.value)
    assert "'undefined' or" not in str(raised.value)


def call_without_rank_1(context: RankContext, directory: Path) -> tuple[list[bool], str]:
    """Return the results of calls of all ranks, and the error of one that rank 1 does not join."""
    context.init_process_group()
    names = [f"stage {rank} (rank {rank})" for rank in range(context.world_size)]
    connection = Connection(names, LightningEnvironment(), 1, 3.0, Tracer())
    flag = context.rank == 1
    results = [connection.any_rank(flag), connection.all_ranks(flag), connection.all_ranks(True)]
    message = ""
    if context.rank != 1:
        with pytest.raises(PeerTimeoutError) as raised:
            connection.gather([0.0])
        message = str(raised.value)
        (directory / f"{context.rank}").touch()
    notes = [directory / f"{rank}" for rank in (0, 2)]
    wait_until(lambda: all(note.exists() for note in notes), "the others have given up")
    connection.announce_failure(RuntimeError("the test is over"))
    connection.close()
    return results, message


def test_a_rank_that_is_late_for_a_collective_call_is_named(pool: RankPool, tmp_path: Path) -> None:
    outcomes = pool.run(call_without_rank_1, 3, tmp_path)
    assert all(results == [True, False, True] for results, _ in outcomes)
    for rank in (0, 2):
        waited = f"stage {rank} (rank {rank}) waited 3 s in a collective call"
        expected = f"{waited} for stage 1 (rank 1),"
        assert outcomes[rank][1].startswith(expected)
