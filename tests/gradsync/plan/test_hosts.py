"""Ranks of one host send their gradients to one of them, and all ranks get the sum of all."""

from __future__ import annotations

import pytest

from lightning_dlres.core.errors import ConfigError
from lightning_dlres.gradsync.plan.graph import Part, TaskKind, completes_sum
from lightning_dlres.gradsync.plan.hosts import (
    Hosts,
    host_graph,
    host_leaders,
    over_hosts,
    plan_of_leaders,
    ranks_by_host,
    shares_hosts,
)
from lightning_dlres.gradsync.plan.plan import RAW, CodecChoice, SyncPlan, make_plan
from lightning_dlres.gradsync.plan.units import GradientSpec

HOSTS: list[Hosts] = [
    ((0, 1), (2,)),
    ((0, 2), (1, 3)),
    ((0,), (1, 2, 3), (4, 5)),
    ((0, 3, 4), (1,), (2, 5)),
    ((0, 1, 2),),
]
# Topology, hosts, and owner of the unit.
CASES = [
    (topology, hosts, owner)
    for topology in ("ps", "ring")
    for hosts in HOSTS
    for owner in host_leaders(hosts)
]
# The same, and True if all leaders encode the sums of their own hosts. A ring cannot.
ENCODING_CASES = [
    (*case, encodes_own)
    for case in CASES
    for encodes_own in ((False, True) if case[0] == "ps" else (False,))
]


def plan_over(hosts: Hosts) -> SyncPlan:
    """Return a plan of three equal gradients."""
    specs = [GradientSpec(name=name, count=10) for name in "abc"]
    choices = [CodecChoice(codec=RAW, partitions=1) for _ in specs]
    plan = make_plan(
        specs,
        choices,
        world_size=len(hosts),
        topology="ps",
        alignment=1,
        message_bytes=1000,
    )
    return over_hosts(plan, hosts)


@pytest.mark.parametrize(
    ("identities", "hosts", "shared"),
    [
        ("aabb", ((0, 1), (2, 3)), True),
        ("abab", ((0, 2), (1, 3)), True),
        ("baa", ((0,), (1, 2)), True),
        ("abc", ((0,), (1,), (2,)), False),
        ("aaa", ((0, 1, 2),), False),
        ("a", ((0,),), False),
    ],
)
def test_ranks_of_one_identity_share_a_host(identities: str, hosts: Hosts, shared: bool) -> None:
    assert ranks_by_host(identities) == hosts
    assert shares_hosts(hosts) == shared


@pytest.mark.parametrize(("topology", "hosts", "owner", "encodes_own"), ENCODING_CASES)
def test_all_ranks_get_the_sums_of_the_hosts_in_one_order(
    topology: str, hosts: Hosts, owner: int, encodes_own: bool
) -> None:
    """Run the graphs of all ranks with lists in the place of tensors.

    The gradient of a rank is the list of this rank, and the sum of a host the list of its ranks. A
    sum over hosts is a list of such sums.
    """
    ranks = sorted(rank for host in hosts for rank in host)
    graphs = {r: host_graph(topology, hosts, r, owner, encodes_own=encodes_own) for r in ranks}
    gradients = {rank: [rank] for rank in ranks}
    totals: dict[int, list[list[int]]] = {rank: [] for rank in ranks}
    outgoing: dict[tuple[int, Part], list[list[int]]] = {}
    incoming: dict[tuple[int, int, Part], list[list[int]]] = {}
    decoded, done = {}, {rank: set[int]() for rank in ranks}
    is_moving = True
    while is_moving:
        is_moving = False
        # The last tasks come first: only `after` may keep a task behind those that it needs.
        tasks = [
            (rank, position) for rank in ranks for position in reversed(range(len(graphs[rank])))
        ]
        for rank, position in tasks:
            task = graphs[rank][position]
            if position in done[rank] or not done[rank].issuperset(task.after):
                continue
            if task.kind.is_transfer:
                assert task.peer not in (None, rank)
            key = (task.peer, rank, task.part)
            if task.kind is TaskKind.RECEIVE:
                if key not in incoming:
                    continue
                if task.part is Part.SUM:
                    outgoing[rank, Part.SUM] = incoming[key]  # type: ignore[index]
            elif task.kind is TaskKind.ENCODE:
                # Without a predecessor but the sum inside the host, it encodes that sum.
                is_own = all(graphs[rank][before].part is Part.HOST for before in task.after)
                outgoing[rank, task.part] = [gradients[rank]] if is_own else totals[rank]
            elif task.kind is TaskKind.SEND:
                assert task.peer is not None
                incoming[rank, task.peer, task.part] = outgoing[rank, task.part]
            elif task.kind is TaskKind.MERGE and task.part is Part.HOST:
                gradients[rank] = gradients[rank] + incoming[key][0]  # type: ignore[index]
            elif task.kind is TaskKind.MERGE:
                is_own = task.peer == rank
                totals[rank] = totals[rank] + ([gradients[rank]] if is_own else incoming[key])  # type: ignore[index]
            else:
                decoded[rank] = outgoing[rank, Part.SUM]
            done[rank].add(position)
            is_moving = True
    # A ring adds from the owner on.
    first = host_leaders(hosts).index(owner) if topology == "ring" else 0
    expected = [list(host) for host in (*hosts[first:], *hosts[:first])]
    assert decoded == dict.fromkeys(ranks, expected)
    assert all(len(done[rank]) == len(graphs[rank]) for rank in ranks)
    assert sum(map(completes_sum, graphs.values())) == 1


@pytest.mark.parametrize(("topology", "hosts", "owner"), CASES)
def test_ranks_that_do_not_lead_their_host_talk_to_its_leader_only(
    topology: str, hosts: Hosts, owner: int
) -> None:
    for leader, *members in hosts:
        for member in members:
            peers = {task.peer for task in host_graph(topology, hosts, member, owner)}
            assert peers == {None, leader}


def test_a_plan_over_hosts_has_leaders_as_owners_and_round_trips() -> None:
    hosts: Hosts = ((0, 2), (1, 3), (4,))
    plan = plan_over(hosts)
    assert (plan.world_size, plan.message_bytes) == (5, 1000)
    assert {unit.owner for unit in plan.units} == {0, 1, 4}
    assert SyncPlan.from_json(plan.to_json()) == plan
    assert "5 ranks on 3 hosts" in plan.table()


@pytest.mark.parametrize("hosts", HOSTS)
def test_the_plan_of_the_leaders_can_be_recovered(hosts: Hosts) -> None:
    plan = plan_over(hosts)
    leaders = plan_of_leaders(plan)
    assert (leaders.world_size, leaders.hosts) == (len(hosts), ())
    assert over_hosts(leaders, hosts) == plan


def test_without_hosts_a_plan_stays_as_it_is() -> None:
    plan = plan_of_leaders(plan_over(((0,), (1,))))
    assert over_hosts(plan, ()) is plan
    assert plan_of_leaders(plan) is plan


@pytest.mark.parametrize(
    ("hosts", "message"),
    [
        (((0, 1),), "hosts must be sorted and have each of the 3 ranks once"),
        (((1, 0), (2,)), "hosts must be sorted"),
        (((0, 1), (1, 2)), "hosts must be sorted"),
        (((0, 1, 2), ()), "hosts must be sorted"),
        (((0, 1, 2),), r"owner must be one of the first ranks of the hosts \[0\], got 1"),
    ],
)
def test_hosts_that_do_not_fit_are_refused(hosts: Hosts, message: str) -> None:
    plan = plan_over(((0,), (1,), (2,)))
    with pytest.raises(ConfigError, match=message):
        SyncPlan(world_size=3, topology="ps", units=plan.units, hosts=hosts)
