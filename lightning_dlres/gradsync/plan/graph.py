"""Task graphs of a unit: a parameter server and a ring, over the same five kinds of tasks.

Compute tasks encode, merge and decode; transfer tasks send and receive. A task of one kind never
waits inside a task of the other kind: it becomes ready when its predecessors are done. The graph of
a rank depends on the topology, the rank, and the owner of the unit.

Two things travel: partial sums of the gradient on their way to the rank that completes the sum
(`Part.GRADIENT`), and the encoded sum on its way to all ranks (`Part.SUM`). Only the rank that
completes the sum encodes it. All ranks, this one included, decode the same bytes, and so hold the
same gradient bit for bit.

A third one, gradients on their way to another rank of the same host (`Part.HOST`), is only in the
graphs of `hosts`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum, IntEnum

from lightning_dlres.core.errors import ConfigError, got_expected


class TaskKind(Enum):
    """Kind of a task."""

    ENCODE = "encode"
    MERGE = "merge"
    DECODE = "decode"
    SEND = "send"
    RECEIVE = "receive"

    @property
    def is_transfer(self) -> bool:
        """True if the task belongs to the queue of transfers."""
        return self in (TaskKind.SEND, TaskKind.RECEIVE)

    @property
    def leads_to_sends(self) -> bool:
        """True if payloads to send may become ready after tasks of this kind."""
        return self is not TaskKind.DECODE


class Part(IntEnum):
    """Content of a transfer: a partial sum of the gradient, the sum for all ranks, or the gradient
    of a rank, as it is, for the leader of its host."""

    GRADIENT = 0
    SUM = 1
    HOST = 2


@dataclass(frozen=True)
class SyncTask:
    """A task of one rank for one unit.

    Attributes:
        kind: Kind of the task.
        part: What is encoded or transferred.
        peer: Other rank of a transfer, or rank whose data is merged, which may be this one. None
            for other tasks.
        after: Positions in the graph of the tasks that must be done before.
    """

    kind: TaskKind
    part: Part
    peer: int | None = None
    after: tuple[int, ...] = ()


Graph = tuple[SyncTask, ...]
# Function that returns a rank's graph from the rank, the number of ranks, and the unit's owner.
Topology = Callable[[int, int, int], Graph]


def parameter_server(rank: int, world_size: int, owner: int, *, encodes_own: bool = False) -> Graph:
    """Return a rank's graph in which the owner merges all gradients in the order of the ranks.

    Args:
        rank: Rank whose tasks are returned.
        world_size: Number of ranks.
        owner: Rank that merges.
        encodes_own: True if the owner encodes its own gradient, too, and merges the decoded one.
    """
    if rank != owner:
        return (
            SyncTask(TaskKind.ENCODE, Part.GRADIENT),
            SyncTask(TaskKind.SEND, Part.GRADIENT, owner, (0,)),
            SyncTask(TaskKind.RECEIVE, Part.SUM, owner),
            # The message may read the gradient's memory, so it must be sent before the sum
            # overwrites the gradient.
            SyncTask(TaskKind.DECODE, Part.SUM, None, (1, 2)),
        )
    tasks: list[SyncTask] = []
    if encodes_own:
        tasks.append(SyncTask(TaskKind.ENCODE, Part.GRADIENT))
    merged: tuple[int, ...] = ()
    for peer in range(world_size):
        after = merged
        if peer != owner:
            tasks.append(SyncTask(TaskKind.RECEIVE, Part.GRADIENT, peer))
            after = (*merged, len(tasks) - 1)
        elif encodes_own:
            after = (*merged, 0)
        tasks.append(SyncTask(TaskKind.MERGE, Part.GRADIENT, peer, after))
        merged = (len(tasks) - 1,)
    return _with_sum(tasks, merged, [peer for peer in range(world_size) if peer != owner])


def ring(rank: int, world_size: int, owner: int) -> Graph:
    """Return a rank's graph in which a partial sum, and then the sum, goes around the ring.

    The sum is in the order of the ring: owner, owner + 1, and so on. Its last rank completes it.

    Args:
        rank: Rank whose tasks are returned.
        world_size: Number of ranks.
        owner: First rank of the ring.
    """
    position, last = (rank - owner) % world_size, world_size - 1
    following, previous = (rank + 1) % world_size, (rank - 1) % world_size
    tasks: list[SyncTask] = []
    merged: tuple[int, ...] = ()
    if position:
        tasks.append(SyncTask(TaskKind.RECEIVE, Part.GRADIENT, previous))
        tasks.append(SyncTask(TaskKind.MERGE, Part.GRADIENT, previous, (0,)))
        tasks.append(SyncTask(TaskKind.MERGE, Part.GRADIENT, rank, (1,)))
        merged = (2,)
    if position == last:
        if not position:
            tasks.append(SyncTask(TaskKind.MERGE, Part.GRADIENT, rank))
            merged = (0,)
        return _with_sum(tasks, merged, [following] if world_size > 1 else [])
    tasks.append(SyncTask(TaskKind.ENCODE, Part.GRADIENT, None, merged))
    tasks.append(SyncTask(TaskKind.SEND, Part.GRADIENT, following, (len(tasks) - 1,)))
    sent = len(tasks) - 1
    tasks.append(SyncTask(TaskKind.RECEIVE, Part.SUM, previous))
    received = len(tasks) - 1
    if position != last - 1:
        tasks.append(SyncTask(TaskKind.SEND, Part.SUM, following, (received,)))
    tasks.append(SyncTask(TaskKind.DECODE, Part.SUM, None, (sent, received)))
    return tuple(tasks)


def _with_sum(tasks: list[SyncTask], merged: tuple[int, ...], receivers: list[int]) -> Graph:
    """Return the tasks of the rank that completes the sum."""
    tasks.append(SyncTask(TaskKind.ENCODE, Part.SUM, None, merged))
    encoded = (len(tasks) - 1,)
    tasks += [SyncTask(TaskKind.SEND, Part.SUM, peer, encoded) for peer in receivers]
    tasks.append(SyncTask(TaskKind.DECODE, Part.SUM, None, encoded))
    return tuple(tasks)


TOPOLOGIES: dict[str, Topology] = {"ps": parameter_server, "ring": ring}


def topology(name: str) -> Topology:
    """Return the topology of a name: "ps" or "ring".

    Raises:
        ConfigError: If no topology has that name.
    """
    if name not in TOPOLOGIES:
        raise ConfigError(got_expected("topology", name, f"one of {sorted(TOPOLOGIES)}", "'ps'"))
    return TOPOLOGIES[name]


def task_graph(
    name: str, rank: int, world_size: int, owner: int, *, encodes_own: bool = False
) -> Graph:
    """Return a rank's graph for one unit.

    Args:
        name: Topology, "ps" or "ring".
        rank: Rank whose tasks are returned.
        world_size: Number of ranks.
        owner: Owner of the unit.
        encodes_own: True if all ranks encode their own gradient; see
            `GradientCodec.transforms_gradient`.

    Raises:
        ConfigError: If no topology has that name, or it cannot encode own gradients alone.
    """
    if not encodes_own:
        return topology(name)(rank, world_size, owner)
    if name != "ps":
        rule = "'ps' for a codec with momentum or clipping"
        raise ConfigError(got_expected("topology", name, rule, "topology='ps'"))
    return parameter_server(rank, world_size, owner, encodes_own=True)


def completes_sum(graph: Graph) -> bool:
    """Return True if the rank of a graph encodes the sum."""
    return any(task.kind is TaskKind.ENCODE and task.part is Part.SUM for task in graph)
