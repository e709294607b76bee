"""Predicted time of a step, from measured costs and the task graphs that the executor runs.

On each rank, the queue of compute tasks and both directions of the link work at the same time. The
busiest of them bounds the step. Its load alone is too short: it also waits for the tasks before its
first one, and the step ends only after the tasks that follow its last one. The prediction adds the
time of these tasks, for one unit.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np
from numpy.typing import NDArray

from lightning_dlres.codecs.gradient import GradientCodec
from lightning_dlres.gradsync.plan.costs import LinearCost, SyncCosts
from lightning_dlres.gradsync.plan.graph import TaskKind, topology
from lightning_dlres.gradsync.plan.lone_unit import UnitCosts, lone_unit_seconds
from lightning_dlres.gradsync.plan.plan import RAW, SyncPlan

# Bytes of a bucket of DistributedDataParallel, by default.
BUCKET_BYTES = 25 << 20

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]


@dataclass(frozen=True, kw_only=True)
class StepPrediction:
    """Predicted times of a step.

    Attributes:
        compute_seconds: Compute tasks of the busiest rank.
        transfer_seconds: Transfers of the busiest direction of a link.
        sync_seconds: Synchronisation of gradients that are all ready at once: the load of the
            busiest queue or link, plus the time for which it waits.
        step_seconds: Backward and synchronisation; time in which both run counts once.
        link_bytes: Bytes that pass the busiest direction of a link.
    """

    compute_seconds: float
    transfer_seconds: float
    sync_seconds: float
    step_seconds: float
    link_bytes: float


@dataclass(frozen=True, kw_only=True)
class UnitTable:
    """Costs of the tasks of several units: float64[units] each.

    Attributes:
        encode: Seconds of encoding a gradient or a sum.
        merge: Seconds of merging a payload.
        own_merge: Seconds of merging the gradient of the merging rank, which is not encoded.
        decode: Seconds of decoding the sum.
        nbytes: Bytes of a payload.
    """

    encode: Floats
    merge: Floats
    own_merge: Floats
    decode: Floats
    nbytes: Floats

    def where(self, is_other: NDArray[np.bool_], other: UnitTable) -> UnitTable:
        """Return a table with some units of another one."""
        return UnitTable(
            encode=np.where(is_other, other.encode, self.encode),
            merge=np.where(is_other, other.merge, self.merge),
            own_merge=np.where(is_other, other.own_merge, self.own_merge),
            decode=np.where(is_other, other.decode, self.decode),
            nbytes=np.where(is_other, other.nbytes, self.nbytes),
        )

    def row(self, unit: int) -> UnitTable:
        """Return the table of one unit."""
        return UnitTable(
            encode=self.encode[unit : unit + 1],
            merge=self.merge[unit : unit + 1],
            own_merge=self.own_merge[unit : unit + 1],
            decode=self.decode[unit : unit + 1],
            nbytes=self.nbytes[unit : unit + 1],
        )


@dataclass(frozen=True, kw_only=True)
class _TaskCounts:
    """Tasks of a rank for one unit: float64[ranks, ranks], by rank and by the unit's owner.

    `peers` is the number of ranks to which a rank sends.
    """

    encodes: Floats
    merges: Floats
    own_merges: Floats
    decodes: Floats
    sends: Floats
    receives: Floats
    peers: int


@dataclass(frozen=True, kw_only=True)
class _Loads:
    """Largest loads of all ranks.

    Attributes:
        compute: Seconds of compute tasks.
        transfer: Seconds of one direction of a link.
        busiest: Seconds of a rank's process, which computes and handles messages, or of one
            direction of a link: the longer of both.
        link_bytes: Bytes that pass one direction of a link.
    """

    compute: float
    transfer: float
    busiest: float
    link_bytes: float


class StepPredictor:
    """Predictor of steps with measured costs.

    Args:
        costs: Measured costs.
        codecs: Gradient codecs by name.
        element_bytes: Bytes of an element that is sent as it is.
        backward_seconds: Time of backward, with which synchronisation overlaps. 0: all gradients
            are ready at once.
        bucket_bytes: Bytes of a bucket of gradients. The last bucket is ready when backward ends.
        is_coordinated: True if a coordinator lets each rank send to only one rank at a time, and
            receive from only one.
    """

    def __init__(
        self,
        costs: SyncCosts,
        codecs: Mapping[str, GradientCodec],
        *,
        element_bytes: int = 4,
        backward_seconds: float = 0.0,
        bucket_bytes: int = BUCKET_BYTES,
        is_coordinated: bool = False,
    ) -> None:
        self.costs, self.world_size = costs, len(costs.links.bandwidths)
        self._codecs, self._element_bytes = codecs, element_bytes
        self._backward, self._bucket_bytes = backward_seconds, bucket_bytes
        self._bandwidths = np.array(costs.links.bandwidths)
        self._is_coordinated = is_coordinated
        # Seconds of `_idle_seconds` by topology, owner and costs of a unit.
        self._idle: dict[tuple[str, int, UnitCosts], float] = {}

    def predict_all_reduce(self, count: int) -> StepPrediction:
        """Return the prediction for torch's all-reduce of `count` elements, bucket by bucket."""
        nbytes = count * self._element_bytes
        buckets = max(-(-nbytes // self._bucket_bytes), 1)
        cost = self.costs.all_reduce
        seconds = buckets * cost.fixed_seconds + cost.seconds_per_item * nbytes
        # A ring sends (ranks - 1) / ranks of the bytes twice.
        link_bytes = 2 * nbytes * (self.world_size - 1) / self.world_size
        return StepPrediction(
            compute_seconds=0.0,
            transfer_seconds=seconds,
            sync_seconds=seconds,
            step_seconds=self._overlapped(seconds, nbytes),
            link_bytes=link_bytes,
        )

    def predict_plan(self, plan: SyncPlan) -> StepPrediction:
        """Return the prediction for a plan."""
        counts = np.array([unit.count for unit in plan.units], dtype=np.int64)
        owners = np.array([unit.owner for unit in plan.units], dtype=np.int64)
        codecs = np.array([unit.codec for unit in plan.units])
        table = self.table(RAW, counts)
        for name in set(codecs.tolist()) - {RAW}:
            table = table.where(codecs == name, self.table(name, counts))
        return self.predict_units(plan.topology, counts, owners, table)

    def table(self, codec: str, counts: Integers) -> UnitTable:
        """Return the costs of units of these numbers of elements, all with one codec."""
        cost, raw = self.costs.codecs[codec], self.costs.codecs[RAW]
        sizes, positions = np.unique(counts, return_inverse=True)
        if codec == RAW:
            nbytes = sizes * self._element_bytes
        else:
            payload_bytes = self._codecs[codec].payload_bytes
            nbytes = np.array([payload_bytes(int(size)) for size in sizes])

        def seconds(cost: LinearCost) -> Floats:
            return cost.fixed_seconds + cost.seconds_per_item * counts.astype(np.float64)

        return UnitTable(
            encode=seconds(cost.encode),
            merge=seconds(cost.merge),
            own_merge=seconds(raw.merge),
            decode=seconds(cost.decode),
            nbytes=nbytes.astype(np.float64)[positions],
        )

    def predict_units(
        self, topology_name: str, counts: Integers, owners: Integers, table: UnitTable
    ) -> StepPrediction:
        """Return the prediction for units.

        Args:
            topology_name: "ps" or "ring".
            counts: Elements of the units.
            owners: Owner of each unit.
            table: Costs of the units.
        """
        if not len(counts):
            step = self._overlapped(0.0, 0)
            return StepPrediction(
                compute_seconds=0.0,
                transfer_seconds=0.0,
                sync_seconds=0.0,
                step_seconds=step,
                link_bytes=0.0,
            )
        loads = self._loads(topology_name, owners, table)
        busiest = loads.busiest
        # The unit for which the busiest queue or link waits longest is most likely the one with the
        # largest payload, or the one with the longest encoding.
        idle = max(
            self._idle_seconds(topology_name, owners, table, unit)
            for unit in {int(table.nbytes.argmax()), int(table.encode.argmax())}
        )
        return StepPrediction(
            compute_seconds=loads.compute,
            transfer_seconds=loads.transfer,
            sync_seconds=busiest + idle,
            step_seconds=self._overlapped(busiest + idle, int(counts.sum()) * self._element_bytes),
            link_bytes=loads.link_bytes,
        )

    def _loads(self, topology_name: str, owners: Integers, table: UnitTable) -> _Loads:
        """Return the loads of the busiest rank and of the busiest direction of a link."""
        tasks, links = _task_counts(topology_name, self.world_size), self.costs.links

        def by_owner(values: Floats | None = None) -> Floats:
            return np.bincount(owners, values, self.world_size).astype(np.float64)

        compute = (
            tasks.encodes @ by_owner(table.encode)
            + tasks.merges @ by_owner(table.merge)
            + tasks.own_merges @ by_owner(table.own_merge)
            + tasks.decodes @ by_owner(table.decode)
        )
        nbytes, number = by_owner(table.nbytes), by_owner()
        link_bytes = np.stack([tasks.sends @ nbytes, tasks.receives @ nbytes])
        messages = np.stack([tasks.sends @ number, tasks.receives @ number])
        speeds, message_seconds = self._bandwidths, links.message_seconds
        if tasks.peers > 1 and not self._is_coordinated:
            # Messages to several ranks collide, but also fill each other's gaps.
            speeds = speeds * links.incast_share
            message_seconds /= tasks.peers
        transfer = link_bytes / speeds + messages * message_seconds
        # One process handles the messages of a rank, whatever their destination. In the measured
        # time of a message, a rank sends one and receives one.
        process = compute + messages.max(axis=0) * links.message_seconds
        return _Loads(
            compute=float(compute.max()),
            transfer=float(transfer.max()),
            busiest=float(max(process.max(), transfer.max())),
            link_bytes=float(link_bytes.max()),
        )

    def _idle_seconds(
        self, topology_name: str, owners: Integers, table: UnitTable, unit: int
    ) -> float:
        """Return the part of a unit's critical path in which the busiest queue or link does not
        work for it.

        List scheduling takes at most the busiest load and the critical path (Graham, 1969). With a
        single unit, their sum without the unit's own load is its critical path.
        """
        seconds = UnitCosts(
            encode=float(table.encode[unit]),
            merge=float(table.merge[unit]),
            own_merge=float(table.own_merge[unit]),
            decode=float(table.decode[unit]),
            nbytes=float(table.nbytes[unit]),
        )
        key = topology_name, int(owners[unit]), seconds
        if key not in self._idle:
            alone = lone_unit_seconds(topology(topology_name), key[1], seconds, self.costs.links)
            loads = self._loads(topology_name, owners[unit : unit + 1], table.row(unit))
            self._idle[key] = max(alone - loads.busiest, 0.0)
        return self._idle[key]

    def _overlapped(self, sync_seconds: float, nbytes: int) -> float:
        """Return the time of backward and synchronisation; the last bucket does not overlap."""
        last = min(self._bucket_bytes / nbytes, 1.0) if nbytes else 1.0
        return max(self._backward, sync_seconds * (1 - last)) + sync_seconds * last


@cache
def _task_counts(topology_name: str, world_size: int) -> _TaskCounts:
    """Return the numbers of tasks, counted in the graphs of all ranks for the owner 0.

    All ranks are alike, so the tasks depend only on the distance from the owner.
    """
    graphs = [topology(topology_name)(rank, world_size, 0) for rank in range(world_size)]
    ranks = np.arange(world_size)
    distances = (ranks[:, None] - ranks[None, :]) % world_size

    def spread(numbers: Sequence[int]) -> Floats:
        spread_out: Floats = np.array(numbers, dtype=np.float64)[distances]
        return spread_out

    def count(kind: TaskKind) -> Floats:
        return spread([sum(task.kind is kind for task in graph) for graph in graphs])

    own_merges = spread(
        [
            sum(task.kind is TaskKind.MERGE and task.peer == rank for task in graph)
            for rank, graph in enumerate(graphs)
        ]
    )
    return _TaskCounts(
        encodes=count(TaskKind.ENCODE),
        merges=count(TaskKind.MERGE) - own_merges,
        own_merges=own_merges,
        decodes=count(TaskKind.DECODE),
        sends=count(TaskKind.SEND),
        receives=count(TaskKind.RECEIVE),
        peers=max(
            len({task.peer for task in graph if task.kind is TaskKind.SEND}) for graph in graphs
        ),
    )
