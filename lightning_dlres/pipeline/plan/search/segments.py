"""Which runs of layers a stage could hold in a plan that is faster than a target, for a fixed order
of devices.

The planner's integer program has one choice for each such segment. Lower bounds on the step's time
leave few of them, and each comes with the cheapest recomputation that meets the stage's memory
limit: the time of a step never falls when some work in it takes longer, so within a segment nothing
else needs to be tried. Only where the stage's devices are unlike, they may disagree about what is
the cheapest: then there are several segments with the same layers."""

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

# Bounds are sums in another order than the simulator's: rounding must not cut off the best plan.
_ROUNDING = 1e-9


@dataclass(frozen=True)
class Segment:
    """Layers `first` to `stop` on a stage.

    Attributes:
        recomputed: the layers that are recomputed.
        bound: no step with this segment is shorter.
        seconds: of each kind of work, for every replica.
        tails: see `StageCost.tail`, for every replica.
    """

    stage: int
    first: int
    stop: int
    recomputed: tuple[int, ...]
    bound: float
    seconds: tuple[dict[Work, float], ...]
    tails: tuple[float, ...]


class Segments:
    """The segments of one workload: bounds first, for all at once; exact costs for those asked
    for."""

    def __init__(self, workload: Workload) -> None:
        self.workload = workload
        self.count = len(workload.layers)
        self._footprint = Footprint(workload)
        self._made: dict[tuple[int, int, int], Segment | None] = {}

    @cached_property
    def bounds(self) -> list[Matrix]:
        """For every stage a matrix over (first, stop): no step with this segment is shorter.
        Infinite where there is no such segment, and where memory cannot hold it."""
        found = []
        for stage in range(self.workload.stages):
            whole = np.full((self.count + 1, self.count + 1), -np.inf)
            for replica, share in enumerate(self.workload.shares):
                if share:
                    whole = np.maximum(whole, self._bound(replica, stage, share))
            if (limit := self.workload.memory_limit(stage)) is not None:
                whole[self._footprint.least(stage) > limit] = np.inf
            found.append(whole)
        return found

    @property
    def root_bound(self) -> float:
        """No step of any split is shorter; infinite where no split fits into memory."""
        return self._root[0]

    @property
    def root_stops(self) -> tuple[int, ...]:
        """Where the stages stop in a split whose segments allow a step that short."""
        return self._root[1]

    @cached_property
    def _root(self) -> tuple[float, tuple[int, ...]]:
        best = np.full(self.count + 1, np.inf)
        best[0] = 0.0
        firsts = []
        for matrix in self.bounds:
            reached = np.maximum(best[:, None], matrix)
            firsts.append(np.argmin(reached, axis=0))
            best = np.min(reached, axis=0)
        stops = [self.count]
        for first in reversed(firsts[1:]):
            stops.append(int(first[stops[-1]]))
        return float(best[self.count]), tuple(reversed(stops))

    def below(self, target: float) -> list[list[Segment]]:
        """Return for every stage the segments that may be part of a plan faster than the target,
        memory limits met; empty lists where there is no such plan."""
        limit = target * (1 + _ROUNDING)
        open_ = self._connected([(matrix <= limit) & np.isfinite(matrix) for matrix in self.bounds])
        found = [
            [
                segment
                for first, stop in np.argwhere(matrix)
                for segment in self._alternatives(stage, int(first), int(stop))
                if segment.bound <= limit
            ]
            for stage, matrix in enumerate(open_)
        ]
        masks = []
        for made in found:
            mask = np.zeros_like(open_[0])
            for segment in made:
                mask[segment.first, segment.stop] = True
            masks.append(mask)
        kept = self._connected(masks)
        return [
            [segment for segment in made if mask[segment.first, segment.stop]]
            for made, mask in zip(found, kept, strict=True)
        ]

    def segment(self, stage: int, first: int, stop: int) -> Segment | None:
        """Return a segment with its cheapest recomputation, that of the slowest device; None where
        the stage's memory cannot hold it."""
        place = stage, first, stop
        if place not in self._made:
            recomputed = self._recomputed(stage, range(first, stop))
            self._made[place] = self._make(*place, recomputed) if recomputed is not None else None
        return self._made[place]

    def _alternatives(self, stage: int, first: int, stop: int) -> list[Segment]:
        """Return a segment with each recomputation that may be the best."""
        usual = self.segment(stage, first, stop)
        if usual is None or len(self._kinds(stage)) == 1:
            return [] if usual is None else [usual]
        if not usual.recomputed or self.workload.recompute == "always":
            return [usual]
        layers = range(first, stop)
        freed, need = self._freed(stage, layers)
        seconds = [
            [self.workload.recompute_seconds(i, k) for i in layers] for k in self._kinds(stage)
        ]
        covers = [tuple(first + i for i in x) for x in cheapest_covers(seconds, freed, need)]
        return [
            self._make(stage, first, stop, x) for x in dict.fromkeys([usual.recomputed, *covers])
        ]

    def _kinds(self, stage: int) -> list[int]:
        workload = self.workload
        return sorted({workload.kind(replica, stage) for replica in range(len(workload.replicas))})

    def _freed(self, stage: int, layers: range) -> tuple[list[int], int]:
        """Return what recomputing each layer frees, and how much has to be freed."""
        workload = self.workload
        freed = [workload.freed_by_recompute(stage, layers, index) for index in layers]
        return freed, workload.bound_bytes(stage, layers, ()) - (workload.memory_limit(stage) or 0)

    def _make(self, stage: int, first: int, stop: int, recomputed: tuple[int, ...]) -> Segment:
        layers, workload = range(first, stop), self.workload
        costs = [
            workload.stage_cost(replica, stage, layers, recomputed)
            for replica in range(len(workload.replicas))
        ]
        bound = float(self.bounds[stage][first, stop])
        for replica, (cost, share) in enumerate(zip(costs, workload.shares, strict=True)):
            if recomputed and share:
                before = float(self._round_before[replica][stage][first])
                bound = max(bound, before + self._busy(cost.seconds, share))
        return Segment(
            stage,
            first,
            stop,
            recomputed,
            bound,
            tuple(cost.seconds for cost in costs),
            tuple(cost.tail for cost in costs),
        )

    def _busy(self, seconds: dict[Work, float], share: int) -> float:
        work = seconds[Work.FORWARD] + seconds[Work.BACKWARD] + seconds[Work.RECOMPUTE]
        return share * work + seconds[Work.LOSS] * self.workload.schedule.losses(share)

    def _recomputed(self, stage: int, layers: range) -> tuple[int, ...] | None:
        workload = self.workload
        limit = workload.memory_limit(stage)
        everything = tuple(layers) if workload.recompute == "always" else ()
        if limit is None or workload.bound_bytes(stage, layers, everything) <= limit:
            return everything
        # Recomputing frees nothing of what is held while no micro-batch is in flight.
        if workload.recompute != "auto" or workload.idle_bytes(stage, layers) > limit:
            return None
        freed, need = self._freed(stage, layers)
        kinds = self._kinds(stage)
        seconds = [max(workload.recompute_seconds(i, kind) for kind in kinds) for i in layers]
        chosen = cheapest_cover(seconds, freed, need)
        return tuple(layers.start + position for position in chosen) if chosen is not None else None

    def _bound(self, replica: int, stage: int, share: int) -> Matrix:
        """A stage works on one thing at a time, and before and after that the first and the last
        micro-batch pass the stages above; or one micro-batch makes the whole round, and the stage's
        other work follows."""
        schedule, stages = self.workload.schedule, self.workload.stages
        forward, backward, loss, tail = self._own(replica, stage)
        again = self._footprint.seconds(replica, stage)
        before, before_forward = (
            self._round_before[replica][stage],
            self._forward_before[replica][stage],
        )
        after = self._round_after[replica][stage]
        _, _, last_loss, _ = self._own(replica, stages - 1)
        own_loss = loss * schedule.losses(share)
        busy = share * (forward + backward + again) + own_loss
        bound = np.maximum(before[:, None] + busy, before_forward[:, None] + busy + tail)
        extra = self.workload.extra_in_flight
        forwards = schedule.serial_forwards(stages, stage, share, extra)
        work = share * backward + forwards * forward
        # The first micro-batch is recomputed while its gradient is still on its way.
        work = work + (share - 1) * again
        bound = np.maximum(bound, before[:, None] + work + last_loss + after[None, :])
        return np.where(self._exists(stage), bound, np.inf)

    def _exists(self, stage: int) -> NDArray[np.bool_]:
        first = np.arange(self.count + 1)[:, None]
        stop = np.arange(self.count + 1)[None, :]
        left, right = stage, self.workload.stages - 1 - stage
        exists = (stop > first) & (first >= left) & (stop <= self.count - right)
        if stage == 0:
            exists &= first == 0
        if right == 0:
            exists &= stop == self.count
        return exists

    def _own(self, replica: int, stage: int) -> tuple[Matrix, Matrix, float, Matrix]:
        """Seconds of forward and backward over (first, stop), of the loss, and the least tail."""
        workload = self.workload
        kind = workload.kind(replica, stage)
        sums = []
        messages = (stage > 0) + (stage < workload.stages - 1)
        message = messages * workload.step.message[kind] if workload.step.message else 0.0
        for times in (
            [workload.forward_seconds(index, kind) for index in range(self.count)],
            [workload.backward_seconds(index, kind) for index in range(self.count)],
        ):
            prefix = np.concatenate([[0.0], np.cumsum(times)])
            sums.append(prefix[None, :] - prefix[:, None] + message)
        loss = 0.0
        if stage == workload.stages - 1 and workload.step.loss:
            whole = workload.microbatches if workload.schedule.whole_batch_loss else 1
            loss = workload.step.loss[kind] * whole
        update = workload.step.update[kind] if workload.step.update else 0.0
        return sums[0], sums[1], loss, self._footprint.trained.astype(np.float64) * update

    @cached_property
    def _crossing(self) -> list[list[tuple[Matrix, Matrix]]]:
        """For every replica and stage the seconds of a transfer down and up across the cut below
        it, by cut."""
        workload, found = self.workload, []
        for ranks in workload.replicas:
            row = []
            for a, b in itertools.pairwise(ranks):
                link = workload.cluster.link(a, b)
                down = [0] + [layer.output_bytes for layer in workload.layers]
                up = [0] + [layer.gradient_output_bytes for layer in workload.layers]
                row.append(
                    (
                        link.latency + np.array(down) / link.bytes_per_second,
                        link.latency + np.array(up) / link.bytes_per_second,
                    )
                )
            found.append(row)
        return found

    def _shortest(self, replica: int, forward_only: bool) -> list[Matrix]:
        """For every stage the least seconds in which one micro-batch passes the stages above it, by
        the stage's first layer."""
        best = np.full(self.count + 1, np.inf)
        best[0] = 0.0
        found = [best]
        for stage in range(self.workload.stages - 1):
            forward, backward, _, _ = self._own(replica, stage)
            own = np.where(
                self._exists(stage), forward if forward_only else forward + backward, np.inf
            )
            down, up = self._crossing[replica][stage]
            best = np.min(best[:, None] + own, axis=0) + (down if forward_only else down + up)
            found.append(best)
        return found

    @cached_property
    def _round_before(self) -> list[list[Matrix]]:
        return [self._shortest(replica, False) for replica in range(len(self.workload.replicas))]

    @cached_property
    def _forward_before(self) -> list[list[Matrix]]:
        return [self._shortest(replica, True) for replica in range(len(self.workload.replicas))]

    @cached_property
    def _round_after(self) -> list[list[Matrix]]:
        """For every replica and stage the least seconds in which one micro-batch passes the stages
        below it, by where the stage's layers stop."""
        found = []
        for replica in range(len(self.workload.replicas)):
            best = np.full(self.count + 1, np.inf)
            best[self.count] = 0.0
            row = [best]
            for stage in reversed(range(1, self.workload.stages)):
                forward, backward, _, _ = self._own(replica, stage)
                own = np.where(self._exists(stage), forward + backward, np.inf)
                down, up = self._crossing[replica][stage - 1]
                best = np.min(own + best[None, :], axis=1) + down + up
                row.append(best)
            found.append(row[::-1])
        return found

    def _connected(self, masks: list[NDArray[np.bool_]]) -> list[NDArray[np.bool_]]:
        """Keep what lies on a way from the first layer to the last."""
        reached = [np.zeros(self.count + 1, bool) for _ in range(len(masks) + 1)]
        reached[0][0] = True
        for stage, mask in enumerate(masks):
            reached[stage + 1] = np.any(mask & reached[stage][:, None], axis=0)
        leads = np.zeros(self.count + 1, bool)
        leads[self.count] = True
        kept = []
        for stage in reversed(range(len(masks))):
            mask = masks[stage] & reached[stage][:, None] & leads[None, :]
            kept.append(mask)
            leads = np.any(mask, axis=1)
        return kept[::-1]
