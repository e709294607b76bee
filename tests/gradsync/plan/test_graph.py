"""The graphs of all ranks fit together, and lead the mean to every rank."""

from __future__ import annotations

import pytest

from lightning_dlres.core.errors import ConfigError
from lightning_dlres.gradsync.plan.graph import (
    TOPOLOGIES,
    Part,
    TaskKind,
    completes_sum,
    topology,
)

CASES = [
    (name, world_size, owner)
    for name in TOPOLOGIES
    for world_size in range(1, 6)
    for owner in range(world_size)
]


@pytest.mark.parametrize(("name", "world_size", "owner"), CASES)
def test_every_send_has_a_receive(name: str, world_size: int, owner: int) -> None:
    graphs = [topology(name)(rank, world_size, owner) for rank in range(world_size)]
    sends, receives = [], []
    for rank, graph in enumerate(graphs):
        for position, task in enumerate(graph):
            assert all(before < position for before in task.after)
            assert task.kind.is_transfer <= (task.peer not in (None, rank))
            if task.kind is TaskKind.SEND:
                sends.append((rank, task.peer, task.part))
            if task.kind is TaskKind.RECEIVE:
                receives.append((task.peer, rank, task.part))
    assert sorted(sends) == sorted(receives)
    assert len(set(sends)) == len(sends) == 2 * (world_size - 1)
    assert sum(map(completes_sum, graphs)) == 1


@pytest.mark.parametrize(("name", "world_size", "owner"), CASES)
def test_every_rank_gets_the_sum_of_all_gradients_in_one_order(
    name: str, world_size: int, owner: int
) -> None:
    """Run the graphs with lists of ranks in the place of gradients."""
    graphs = [topology(name)(rank, world_size, owner) for rank in range(world_size)]
    totals: list[list[int]] = [[] for _ in graphs]
    outgoing: dict[tuple[int, Part], list[int]] = {}
    incoming: dict[tuple[int, int, Part], list[int]] = {}
    decoded: dict[int, list[int]] = {}
    done: list[set[int]] = [set() for _ in graphs]
    is_moving = True
    while is_moving:
        is_moving = False
        for rank, graph in enumerate(graphs):
            for position, task in enumerate(graph):
                if position in done[rank] or not done[rank].issuperset(task.after):
                    continue
                if task.kind is TaskKind.RECEIVE:
                    if (task.peer, rank, task.part) not in incoming:
                        continue
                    if task.part is Part.SUM:
                        outgoing[rank, task.part] = incoming[task.peer, rank, task.part]
                elif task.kind is TaskKind.ENCODE:
                    outgoing[rank, task.part] = totals[rank] or [rank]
                elif task.kind is TaskKind.SEND:
                    incoming[rank, task.peer, task.part] = outgoing[rank, task.part]  # type: ignore[index]
                elif task.kind is TaskKind.MERGE:
                    peer = task.peer
                    part = [rank] if peer == rank else incoming[peer, rank, Part.GRADIENT]  # type: ignore[index]
                    totals[rank] = [*totals[rank], *part]
                else:
                    decoded[rank] = outgoing[rank, Part.SUM]
                done[rank].add(position)
                is_moving = True
    first = owner if name == "ring" else 0
    expected = [(first + i) % world_size for i in range(world_size)]
    assert decoded == dict.fromkeys(range(world_size), expected)
    assert [len(tasks) for tasks in done] == [len(graph) for graph in graphs]


def test_an_unknown_topology_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"topology must be one of \['ps', 'ring'\], got 'star'"):
        topology("star")
