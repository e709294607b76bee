"""Hosts of the ranks, and the task graphs of a unit in which only hosts exchange compressed data.

The *leader* of a host is its first rank. The other ranks of the host send it their uncompressed
gradients, which it adds to its own in the order of the ranks. The leaders synchronise these sums in
one of the topologies. Each leader passes the encoded total on to the other ranks of its host. All
ranks decode the same bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from lightning_dlres.gradsync.plan.graph import Graph, Part, SyncTask, TaskKind, task_graph
from lightning_dlres.gradsync.plan.plan import SyncPlan

# Ranks of each host in ascending order; hosts in the order of their first ranks.
Hosts = tuple[tuple[int, ...], ...]


def ranks_by_host(identities: Sequence[str]) -> Hosts:
    """Return the ranks of each host.

    Args:
        identities: Identity of each rank's host, by rank; equal for ranks of one host.
    """
    hosts: dict[str, list[int]] = {}
    for rank, identity in enumerate(identities):
        hosts.setdefault(identity, []).append(rank)
    return tuple(map(tuple, hosts.values()))


def host_leaders(hosts: Hosts) -> list[int]:
    """Return the leader of each host."""
    return [ranks[0] for ranks in hosts]


def shares_hosts(hosts: Hosts) -> bool:
    """Return True if there are several hosts, and several ranks on one of them."""
    return len(hosts) > 1 and any(len(ranks) > 1 for ranks in hosts)


def over_hosts(plan: SyncPlan, hosts: Hosts) -> SyncPlan:
    """Return a plan of all ranks from a plan that has one rank for each host.

    Args:
        plan: Plan of the leaders, numbered in the order of the hosts.
        hosts: Ranks of each host; empty if each rank synchronises by itself. The plan is then
            returned unchanged.
    """
    if not hosts:
        return plan
    leaders = host_leaders(hosts)
    return SyncPlan(
        world_size=sum(map(len, hosts)),
        topology=plan.topology,
        units=tuple(replace(unit, owner=leaders[unit.owner]) for unit in plan.units),
        hosts=hosts,
        message_bytes=plan.message_bytes,
    )


def plan_of_leaders(plan: SyncPlan) -> SyncPlan:
    """Return the plan of the leaders alone, from which `over_hosts` made a plan of all ranks.

    Args:
        plan: Plan of all ranks. Without hosts, it is returned unchanged.
    """
    if not plan.hosts:
        return plan
    leaders = host_leaders(plan.hosts)
    return SyncPlan(
        world_size=len(leaders),
        topology=plan.topology,
        units=tuple(replace(unit, owner=leaders.index(unit.owner)) for unit in plan.units),
        message_bytes=plan.message_bytes,
    )


def host_graph(
    topology: str, hosts: Hosts, rank: int, owner: int, *, encodes_own: bool = False
) -> Graph:
    """Return a rank's graph for one unit, with dense sums inside the hosts.

    Args:
        topology: Topology of the leaders, "ps" or "ring".
        hosts: Ranks of each host.
        rank: Rank whose tasks are returned.
        owner: Owner of the unit, a leader.
        encodes_own: True if all leaders encode the sums of their hosts; see `task_graph`.

    Raises:
        ConfigError: If no topology has that name, or it cannot encode own gradients alone.
    """
    leaders = host_leaders(hosts)
    leader, *members = next(ranks for ranks in hosts if rank in ranks)
    if rank != leader:
        return (
            # It copies nothing and compresses nothing: the payload is the gradient.
            SyncTask(TaskKind.ENCODE, Part.HOST),
            SyncTask(TaskKind.SEND, Part.HOST, leader, (0,)),
            SyncTask(TaskKind.RECEIVE, Part.SUM, leader),
            # The gradient must be sent before the sum overwrites it.
            SyncTask(TaskKind.DECODE, Part.SUM, None, (1, 2)),
        )
    tasks: list[SyncTask] = []
    summed: tuple[int, ...] = ()
    for member in members:
        tasks.append(SyncTask(TaskKind.RECEIVE, Part.HOST, member))
        tasks.append(SyncTask(TaskKind.MERGE, Part.HOST, member, (*summed, len(tasks) - 1)))
        summed = (len(tasks) - 1,)
    between = task_graph(
        topology,
        leaders.index(rank),
        len(leaders),
        leaders.index(owner),
        encodes_own=encodes_own,
    )
    first = len(tasks)
    for task in between:
        peer = None if task.peer is None else leaders[task.peer]
        after = tuple(first + position for position in task.after)
        is_first_encode = task.kind is TaskKind.ENCODE and not task.after
        if is_first_encode or (task.kind is TaskKind.MERGE and peer == rank):
            # The task reads the leader's gradient, which must be the sum of its host by then.
            after = (*summed, *after)
        tasks.append(replace(task, peer=peer, after=after))
    total = next(position for position, task in enumerate(tasks) if _gives_sum(task))
    tasks += [SyncTask(TaskKind.SEND, Part.SUM, member, (total,)) for member in members]
    return tuple(tasks)


def _gives_sum(task: SyncTask) -> bool:
    """Return True for the task after which a rank has the encoded sum."""
    return task.part is Part.SUM and task.kind in (TaskKind.ENCODE, TaskKind.RECEIVE)
