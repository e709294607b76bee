"""Segments: consecutive layers that one stage can hold in a plan, for a fixed order of devices.

The integer program chooses one segment for each stage. It gets only the segments whose lower bound
of the step time is below a target, which are few. Each has the cheapest recomputation that meets
the stage's memory limit. No other recomputation can be faster, since a step never gets shorter when
some of its work takes longer. If a stage has devices of several kinds, each kind may have another
cheapest recomputation. Then there are several segments with the same layers.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from lightning_dlres.pipeline.plan.cost_model.costs import Workload
from lightning_dlres.pipeline.plan.cost_model.events import Work
from lightning_dlres.pipeline.plan.cost_model.footprint import Footprint, Matrix
from lightning_dlres.pipeline.plan.search.knapsack import cheapest_cover, cheapest_covers

# Relative rounding error of bounds, which add up in another order than the simulator. Without this
# tolerance, rounding could cut off the best plan.
_ROUNDING = 1e-9


@dataclass(frozen=True)
class Segment:
    """Consecutive layers on a stage: from `first` up to, not including, `stop`.

    Attributes:
        stage: Index of the stage.
        first: Index of the first layer.
        stop: Index of the layer after the last one.
        recomputed: Indices of the recomputed layers.
        bound: Lower bound, in seconds, of a step with this segment.
        seconds: Seconds of each kind of work for one micro-batch, for every replica.
        tails: `StageCost.tail`, in seconds, for every replica.
    """

    stage: int
    first: int
    stop: int
    recomputed: tuple[int, ...]
    bound: float
    seconds: tuple[dict[Work, float], ...]
    tails: tuple[float, ...]


class Segments:
    """The segments of one workload.

    Bounds are computed for all segments at once, exact costs only for single segments.
    Matrices are over (first, stop) of a segment.

    Args:
        workload: The model on its devices.
    """

    def __init__(self, workload: Workload) -> None:
        self.workload = workload
        self.num_layers = len(workload.layers)
        self._footprint = Footprint(workload)
        # Results of `segment`, by (stage, first, stop).
        self._cache: dict[tuple[int, int, int], Segment | None] = {}

    @cached_property
    def bounds(self) -> list[Matrix]:
        """Lower bound of a step with each segment: for every stage a matrix over (first, stop).

        The bound is infinite if the segment cannot exist, or does not fit into memory.
        """
        bounds = []
        for stage in range(self.workload.stages):
            matrix = np.full((self.num_layers + 1, self.num_layers + 1), -np.inf)
            for replica, share in enumerate(self.workload.shares):
                if share:
                    matrix = np.maximum(matrix, self._bound(replica, stage, share))
            if (limit := self.workload.memory_limit(stage)) is not None:
                matrix[self._footprint.least_bytes(stage) > limit] = np.inf
            bounds.append(matrix)
        return bounds

    @property
    def root_bound(self) -> float:
        """Lower bound, in seconds, of the step of any split; infinite if none fits into memory."""
        return self._root[0]

    @property
    def root_stops(self) -> tuple[int, ...]:
        """`Segment.stop` of every stage, in a split in which the largest bound of a segment is
        `root_bound`."""
        return self._root[1]

    @cached_property
    def _root(self) -> tuple[float, tuple[int, ...]]:
        """The root bound and its stops, from a dynamic program over the stages."""
        # For the stages so far, by the layer where they stop: the smallest possible value of the
        # largest bound among their segments.
        best = np.full(self.num_layers + 1, np.inf)
        best[0] = 0.0
        firsts = []
        for matrix in self.bounds:
            largest = np.maximum(best[:, None], matrix)
            firsts.append(np.argmin(largest, axis=0))
            best = np.min(largest, axis=0)
        stops = [self.num_layers]
        for first in reversed(firsts[1:]):
            stops.append(int(first[stops[-1]]))
        return float(best[self.num_layers]), tuple(reversed(stops))

    def faster_than(self, target: float) -> list[list[Segment]]:
        """Return for every stage the segments that may be part of a plan faster than the target.

        All segments meet the memory limits. The lists are empty if there is no such plan.

        Args:
            target: Step time, in seconds.
        """
        limit = target * (1 + _ROUNDING)
        candidates = self._connected(
            [(matrix <= limit) & np.isfinite(matrix) for matrix in self.bounds]
        )
        segments = [
            [
                segment
                for first, stop in np.argwhere(mask)
                for segment in self._alternatives(stage, int(first), int(stop))
                if segment.bound <= limit
            ]
            for stage, mask in enumerate(candidates)
        ]
        # The exact bounds may have removed segments, and with them the only neighbours of others.
        masks = []
        for of_stage in segments:
            mask = np.zeros_like(candidates[0])
            for segment in of_stage:
                mask[segment.first, segment.stop] = True
            masks.append(mask)
        connected = self._connected(masks)
        return [
            [segment for segment in of_stage if mask[segment.first, segment.stop]]
            for of_stage, mask in zip(segments, connected, strict=True)
        ]

    def segment(self, stage: int, first: int, stop: int) -> Segment | None:
        """Return a segment with its cheapest recomputation; None if it does not fit into memory.

        The cost of recomputing a layer is its time on the stage's slowest kind of device.
        """
        key = stage, first, stop
        if key not in self._cache:
            recomputed = self._cheapest_recomputation(stage, range(first, stop))
            self._cache[key] = (
                self._exact_segment(*key, recomputed) if recomputed is not None else None
            )
        return self._cache[key]

    def _alternatives(self, stage: int, first: int, stop: int) -> list[Segment]:
        """Return one segment for each set of recomputed layers that may be the fastest."""
        default = self.segment(stage, first, stop)
        if default is None or len(self._stage_kinds(stage)) == 1:
            return [] if default is None else [default]
        if not default.recomputed or self.workload.recompute == "always":
            return [default]
        layers = range(first, stop)
        freed, need = self._freed(stage, layers)
        seconds = [
            [self.workload.recompute_seconds(i, k) for i in layers]
            for k in self._stage_kinds(stage)
        ]
        covers = cheapest_covers(seconds, freed, need)
        layer_sets = [tuple(first + position for position in cover) for cover in covers]
        return [
            self._exact_segment(stage, first, stop, recomputed)
            for recomputed in dict.fromkeys([default.recomputed, *layer_sets])
        ]

    def _stage_kinds(self, stage: int) -> list[int]:
        """Return the kinds of the stage's devices, as ascending indices."""
        workload = self.workload
        return sorted({workload.kind(replica, stage) for replica in range(len(workload.replicas))})

    def _freed(self, stage: int, layers: range) -> tuple[list[int], int]:
        """Return the bytes that the recomputation of each layer frees, and the bytes that must be
        freed."""
        workload = self.workload
        freed = [workload.freed_by_recompute(stage, layers, index) for index in layers]
        return freed, workload.bound_bytes(stage, layers, ()) - (workload.memory_limit(stage) or 0)

    def _exact_segment(
        self, stage: int, first: int, stop: int, recomputed: tuple[int, ...]
    ) -> Segment:
        """Return a segment with its exact costs, and a bound that counts its recomputed layers."""
        layers, workload = range(first, stop), self.workload
        costs = [
            workload.stage_cost(replica, stage, layers, recomputed)
            for replica in range(len(workload.replicas))
        ]
        bound = float(self.bounds[stage][first, stop])
        for replica, (cost, share) in enumerate(zip(costs, workload.shares, strict=True)):
            if recomputed and share:
                before = float(self._round_trip_before[replica][stage][first])
                bound = max(bound, before + self._busy_seconds(cost.seconds, share))
        return Segment(
            stage,
            first,
            stop,
            recomputed,
            bound,
            tuple(cost.seconds for cost in costs),
            tuple(cost.tail for cost in costs),
        )

    def _busy_seconds(self, seconds: dict[Work, float], share: int) -> float:
        """Return the seconds that a stage computes in a step.

        Args:
            seconds: `Segment.seconds` of one replica.
            share: Number of micro-batches of the replica.
        """
        work = seconds[Work.FORWARD] + seconds[Work.BACKWARD] + seconds[Work.RECOMPUTE]
        return share * work + seconds[Work.LOSS] * self.workload.schedule.losses(share)

    def _cheapest_recomputation(self, stage: int, layers: range) -> tuple[int, ...] | None:
        """Return the layers of the cheapest recomputation within the memory limit; None if there is
        none."""
        workload = self.workload
        limit = workload.memory_limit(stage)
        default = tuple(layers) if workload.recompute == "always" else ()
        if limit is None or workload.bound_bytes(stage, layers, default) <= limit:
            return default
        # Recomputation frees only memory of micro-batches in flight.
        if workload.recompute != "auto" or workload.idle_bytes(stage, layers) > limit:
            return None
        freed, need = self._freed(stage, layers)
        kinds = self._stage_kinds(stage)
        seconds = [max(workload.recompute_seconds(i, kind) for kind in kinds) for i in layers]
        chosen = cheapest_cover(seconds, freed, need)
        return tuple(layers.start + position for position in chosen) if chosen is not None else None

    def _bound(self, replica: int, stage: int, share: int) -> Matrix:
        """Return a lower bound of the step time with each segment, for one replica.

        It is the larger one of two bounds:

        1. The stage does all its work, one thing at a time. Before this, the first micro-batch
           passes forward through the earlier stages. After this, the last micro-batch passes
           backward through them while the stage's own tail (see `StageCost`) runs. The longer of
           these two counts.
        2. The micro-batch whose backward comes first makes the whole round trip through all stages.
           The round trip overlaps neither with `Schedule.serial_forwards` of the stage, nor with
           any of its backwards.

        Args:
            replica: Index of the replica.
            stage: Index of the stage.
            share: Number of micro-batches of the replica.
        """
        schedule, stages = self.workload.schedule, self.workload.stages
        forward, backward, loss, tail = self._stage_seconds(replica, stage)
        recomputation = self._footprint.recompute_seconds(replica, stage)
        before = self._round_trip_before[replica][stage]
        before_forward = self._forward_before[replica][stage]
        after = self._round_trip_after[replica][stage]
        _, _, last_loss, _ = self._stage_seconds(replica, stages - 1)
        own_loss = loss * schedule.losses(share)
        busy = share * (forward + backward + recomputation) + own_loss
        bound = np.maximum(before[:, None] + busy, before_forward[:, None] + busy + tail)
        extra = self.workload.extra_in_flight
        serial_forwards = schedule.serial_forwards(stages, stage, share, extra)
        work = share * backward + serial_forwards * forward
        # The first recomputation may overlap with the wait for the gradient.
        work = work + (share - 1) * recomputation
        bound = np.maximum(bound, before[:, None] + work + last_loss + after[None, :])
        return np.where(self._exists(stage), bound, np.inf)

    def _exists(self, stage: int) -> NDArray[np.bool_]:
        """Return a mask of the segments that leave at least one layer for each other stage.

        The first stage starts with the first layer; the last stage ends with the last layer.
        """
        first = np.arange(self.num_layers + 1)[:, None]
        stop = np.arange(self.num_layers + 1)[None, :]
        stages_after = self.workload.stages - 1 - stage
        exists = (stop > first) & (first >= stage) & (stop <= self.num_layers - stages_after)
        if stage == 0:
            exists &= first == 0
        if stages_after == 0:
            exists &= stop == self.num_layers
        return exists

    def _stage_seconds(self, replica: int, stage: int) -> tuple[Matrix, Matrix, float, Matrix]:
        """Return the seconds of forward, backward, loss and the shortest possible tail.

        Forward, backward and loss are for one micro-batch, except a loss over the whole batch. All
        but the loss are matrices. The shortest tail is the optimizer's step alone, without gradient
        synchronisation.
        """
        workload = self.workload
        kind = workload.kind(replica, stage)
        sums = []  # Matrix of forward, then of backward.
        neighbours = (stage > 0) + (stage < workload.stages - 1)
        message_seconds = neighbours * workload.step.message[kind] if workload.step.message else 0.0
        for times in (
            [workload.forward_seconds(index, kind) for index in range(self.num_layers)],
            [workload.backward_seconds(index, kind) for index in range(self.num_layers)],
        ):
            prefix = np.concatenate([[0.0], np.cumsum(times)])
            sums.append(prefix[None, :] - prefix[:, None] + message_seconds)
        loss = 0.0
        if stage == workload.stages - 1 and workload.step.loss:
            loss_microbatches = workload.microbatches if workload.schedule.whole_batch_loss else 1
            loss = workload.step.loss[kind] * loss_microbatches
        update = workload.step.update[kind] if workload.step.update else 0.0
        return sums[0], sums[1], loss, self._footprint.trained_bytes.astype(np.float64) * update

    @cached_property
    def _cut_transfers(self) -> list[list[tuple[Matrix, Matrix]]]:
        """Seconds of sending the activation to the next stage, and of its gradient coming back.

        One list per replica, with one pair of vectors per stage but the last. Index i of a vector
        is the cut between layers i - 1 and i.
        """
        workload, replicas = self.workload, []
        activation_bytes = np.array([0] + [layer.output_bytes for layer in workload.layers])
        gradient_bytes = np.array([0] + [layer.gradient_output_bytes for layer in workload.layers])
        for ranks in workload.replicas:
            links = [workload.cluster.link(a, b) for a, b in itertools.pairwise(ranks)]
            replicas.append(
                [
                    (
                        link.latency + activation_bytes / link.bytes_per_second,
                        link.latency + gradient_bytes / link.bytes_per_second,
                    )
                    for link in links
                ]
            )
        return replicas

    def _shortest_before(self, replica: int, forward_only: bool) -> list[Matrix]:
        """Return the shortest seconds of one micro-batch in all earlier stages, for every stage.

        They include the transfers to the stage. Each entry is a vector over the stage's first
        layer.

        Args:
            replica: Index of the replica.
            forward_only: Whether to count the forward only, not forward and backward.
        """
        best = np.full(self.num_layers + 1, np.inf)
        best[0] = 0.0
        shortest = [best]
        for stage in range(self.workload.stages - 1):
            forward, backward, _, _ = self._stage_seconds(replica, stage)
            activation, gradient = self._cut_transfers[replica][stage]
            compute = forward if forward_only else forward + backward
            transfer = activation if forward_only else activation + gradient
            own = np.where(self._exists(stage), compute, np.inf)
            best = np.min(best[:, None] + own, axis=0) + transfer
            shortest.append(best)
        return shortest

    @cached_property
    def _round_trip_before(self) -> list[list[Matrix]]:
        """`_shortest_before` of forward and backward, for every replica."""
        return [
            self._shortest_before(replica, False) for replica in range(len(self.workload.replicas))
        ]

    @cached_property
    def _forward_before(self) -> list[list[Matrix]]:
        """`_shortest_before` of the forward, for every replica."""
        return [
            self._shortest_before(replica, True) for replica in range(len(self.workload.replicas))
        ]

    @cached_property
    def _round_trip_after(self) -> list[list[Matrix]]:
        """Shortest seconds of one micro-batch in all later stages, forward and backward.

        They include the transfers. One list per replica with one vector per stage, over
        `Segment.stop` of the stage.
        """
        replicas = []
        for replica in range(len(self.workload.replicas)):
            best = np.full(self.num_layers + 1, np.inf)
            best[self.num_layers] = 0.0
            last_stage_first = [best]
            for stage in reversed(range(1, self.workload.stages)):
                forward, backward, _, _ = self._stage_seconds(replica, stage)
                own = np.where(self._exists(stage), forward + backward, np.inf)
                activation, gradient = self._cut_transfers[replica][stage - 1]
                best = np.min(own + best[None, :], axis=1) + activation + gradient
                last_stage_first.append(best)
            replicas.append(last_stage_first[::-1])
        return replicas

    def _connected(self, masks: list[NDArray[np.bool_]]) -> list[NDArray[np.bool_]]:
        """Return the masks of the segments that are part of some split, if all other segments are
        in the masks, too."""
        reached = [np.zeros(self.num_layers + 1, bool) for _ in range(len(masks) + 1)]
        reached[0][0] = True
        for stage, mask in enumerate(masks):
            reached[stage + 1] = np.any(mask & reached[stage][:, None], axis=0)
        reaches_end = np.zeros(self.num_layers + 1, bool)
        reaches_end[self.num_layers] = True
        connected = []
        for stage in reversed(range(len(masks))):
            mask = masks[stage] & reached[stage][:, None] & reaches_end[None, :]
            connected.append(mask)
            reaches_end = np.any(mask, axis=1)
        return connected[::-1]
