"""Time of one unit whose tasks have all queues and links to themselves: its critical path."""

from __future__ import annotations

from dataclasses import dataclass

from lightning_dlres.gradsync.plan.costs import LinkCosts
from lightning_dlres.gradsync.plan.graph import SyncTask, TaskKind, Topology


@dataclass(frozen=True, kw_only=True)
class UnitCosts:
    """Costs of the tasks of one unit.

    Attributes:
        encode: Seconds of encoding the gradient or the sum.
        merge: Seconds of merging a payload.
        own_merge: Seconds of merging the gradient of the merging rank, which is not encoded.
        decode: Seconds of decoding the sum.
        nbytes: Bytes of a payload.
    """

    encode: float
    merge: float
    own_merge: float
    decode: float
    nbytes: float

    def seconds_of(self, task: SyncTask, rank: int) -> float:
        """Return the seconds of a compute task of a rank."""
        if task.kind is TaskKind.ENCODE:
            return self.encode
        if task.kind is TaskKind.DECODE:
            return self.decode
        return self.own_merge if task.peer == rank else self.merge


def lone_unit_seconds(topology: Topology, owner: int, unit: UnitCosts, links: LinkCosts) -> float:
    """Return the seconds until all ranks have decoded the unit.

    A message occupies one direction of two links at a time, and moves at the speed of the slower
    one.

    Args:
        topology: Function that returns a rank's graph of the unit.
        owner: Rank that merges, or first rank of the ring.
        unit: Costs of the unit's tasks.
        links: Links of the ranks.
    """
    return _LoneUnit(topology, owner, unit, links).run()


class _LoneUnit:
    """The tasks of all ranks. Each is scheduled as soon as its predecessors are done."""

    def __init__(self, topology: Topology, owner: int, unit: UnitCosts, links: LinkCosts) -> None:
        ranks = len(links.bandwidths)
        # Payloads travel in the order of the ring, so one pass schedules most of the tasks.
        self._graphs = {
            rank: topology(rank, ranks, owner)
            for rank in ((owner + distance) % ranks for distance in range(ranks))
        }
        self._unit, self._links = unit, links
        # Seconds at which each task ends, by rank and position.
        self._ends: dict[tuple[int, int], float] = {}
        # Seconds of arrival, by source, destination and part.
        self._arrivals: dict[tuple[int, int, int], float] = {}
        self._compute_free = [0.0] * ranks
        self._send_free = [0.0] * ranks
        self._receive_free = [0.0] * ranks

    def run(self) -> float:
        total = sum(map(len, self._graphs.values()))
        while len(self._ends) < total:
            for rank, graph in self._graphs.items():
                for position, task in enumerate(graph):
                    if (rank, position) not in self._ends:
                        self._schedule(rank, position, task)
        return max(self._ends.values())

    def _schedule(self, rank: int, position: int, task: SyncTask) -> None:
        """Schedule a task if its predecessors are scheduled."""
        if any((rank, before) not in self._ends for before in task.after):
            return
        ready = max((self._ends[rank, before] for before in task.after), default=0.0)
        if task.kind is TaskKind.RECEIVE:
            assert task.peer is not None
            arrival = self._arrivals.get((task.peer, rank, task.part))
            if arrival is not None:
                self._ends[rank, position] = max(ready, arrival)
        elif task.kind is TaskKind.SEND:
            self._ends[rank, position] = self._send(rank, task, ready)
        else:
            start = max(ready, self._compute_free[rank])
            end = start + self._unit.seconds_of(task, rank)
            self._ends[rank, position] = self._compute_free[rank] = end

    def _send(self, rank: int, task: SyncTask, ready: float) -> float:
        """Schedule a transfer; return the time at which it leaves its link."""
        assert task.peer is not None
        speed = min(self._links.bandwidths[rank], self._links.bandwidths[task.peer])
        start = max(ready, self._send_free[rank], self._receive_free[task.peer])
        end = start + self._links.message_seconds + self._unit.nbytes / speed
        self._send_free[rank] = self._receive_free[task.peer] = end
        self._arrivals[rank, task.peer, task.part] = end + self._links.latency_seconds
        return end
