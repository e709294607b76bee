"""What a stage costs under a profile: seconds of everything it does, and the most bytes it holds.

One place for the arithmetic that the simulator and the planner share.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from lightning_dlres.core.errors import ConfigError
from lightning_dlres.pipeline.plan.cost_model.events import Work
from lightning_dlres.pipeline.plan.schedules.base import Schedule
from lightning_dlres.pipeline.profile.cluster import Cluster
from lightning_dlres.pipeline.profile.run_profile import LayerProfile, StepCosts
from lightning_dlres.pipeline.stage.microbatch import share

BUCKET_BYTES = 4 << 20
Replicas = Sequence[Sequence[int]]


def layer_ranges(split: Sequence[int]) -> list[range]:
    """Return the indices of the layers of every stage."""
    return [range(sum(split[:s]), sum(split[: s + 1])) for s in range(len(split))]


@dataclass(frozen=True)
class StageCost:
    """One stage of one machine.

    Attributes:
        seconds: of each kind of work, for one micro-batch.
        tail: seconds from the end of the stage's last backward to the end of its step: what is left
            of the gradient synchronisation, and what every step takes.
        peak_bytes: the most that the stage holds at a time.
    """

    seconds: dict[Work, float]
    tail: float
    peak_bytes: int


@dataclass(frozen=True)
class Workload:
    """What is to be run on which devices, in which order; a split and recomputation are missing.

    Attributes:
        layers: the model.
        step: what a step does beside the layers.
        cluster: the devices.
        replicas: ranks of every replica, in stage order.
        schedule: order of each stage's actions.
        microbatches: into how many the batch is cut.
        recompute: "auto" (where memory asks for it), "never" or "always".
        extra_in_flight: see `Schedule.actions`.
    """

    layers: tuple[LayerProfile, ...]
    step: StepCosts
    cluster: Cluster
    replicas: tuple[tuple[int, ...], ...]
    schedule: Schedule
    microbatches: int
    recompute: str = "auto"
    extra_in_flight: int = 0

    def __post_init__(self) -> None:
        kinds = len(self.cluster.kinds)
        for layer in self.layers:
            if len(layer.forward) != kinds or len(layer.backward) != kinds:
                raise ConfigError(
                    f"profile: layer {layer.name!r} has times for {len(layer.forward)} kinds of "
                    f"device, expected {kinds}: {', '.join(self.cluster.kinds)}. Profile again."
                )

    @property
    def stages(self) -> int:
        """Number of stages of a replica."""
        return len(self.replicas[0])

    @property
    def shares(self) -> tuple[int, ...]:
        """Number of micro-batches of every replica."""
        count = len(self.replicas)
        return tuple(len(share(self.microbatches, count, m)) for m in range(count))

    def limit(self, stage: int) -> int | None:
        """Return the bytes that a stage may take on every replica; None: no limit."""
        limits = [self.cluster.devices[replica[stage]].memory_limit for replica in self.replicas]
        return min((limit for limit in limits if limit is not None), default=None)

    def kind(self, replica: int, stage: int) -> int:
        """Return the kind of device of a stage."""
        return self.cluster.devices[self.replicas[replica][stage]].kind

    def forward_seconds(self, index: int, kind: int) -> float:
        """Return the seconds of a layer forward. With several replicas every layer is a run of its
        own, so that its gradients can leave early."""
        return self.layers[index].forward[kind] + self._run_overhead_seconds(kind) / 2

    def backward_seconds(self, index: int, kind: int) -> float:
        """Return the seconds of a layer backward."""
        return self.layers[index].backward[kind] + self._run_overhead_seconds(kind) / 2

    def recompute_seconds(self, index: int, kind: int) -> float:
        """Return what it takes to recompute a layer: that makes it a run of its own, too."""
        return self.layers[index].forward[kind] + _of(self.step.run_overhead_seconds, kind)

    def _run_overhead_seconds(self, kind: int) -> float:
        return _of(self.step.run_overhead_seconds, kind) if len(self.replicas) > 1 else 0.0

    def stage_cost(
        self, replica: int, stage: int, layers: range, recomputed: Collection[int]
    ) -> StageCost:
        """Return what a stage costs that holds these layers and recomputes some of them."""
        kind = self.kind(replica, stage)
        messages = (stage > 0) + (stage < self.stages - 1)
        message = messages * _of(self.step.message, kind)
        last = stage == self.stages - 1
        whole = self.microbatches if self.schedule.whole_batch_loss else 1
        return StageCost(
            seconds={
                Work.FORWARD: message + math.fsum(self.forward_seconds(i, kind) for i in layers),
                Work.LOSS: _of(self.step.loss, kind) * whole if last else 0.0,
                Work.RECOMPUTE: math.fsum(
                    self.recompute_seconds(i, kind) for i in layers if i in recomputed
                ),
                Work.BACKWARD: message + math.fsum(self.backward_seconds(i, kind) for i in layers),
                Work.ACTIVATION: self._transfer(
                    replica, stage, 1, self.layers[layers[-1]].output_bytes
                ),
                Work.GRADIENT: self._gradient_transfer(replica, stage, layers.start),
            },
            tail=self.tail(replica, stage, layers),
            peak_bytes=self.peak_bytes(stage, layers, recomputed),
        )

    def tail(self, replica: int, stage: int, layers: range) -> float:
        """Return the seconds that a stage still needs when its last backward has ended."""
        kind = self.kind(replica, stage)
        update = _of(self.step.update, kind) * self.trained_bytes(layers)
        return self.sync_tail(replica, stage, layers) + update

    def sync_tail(self, replica: int, stage: int, layers: range) -> float:
        """Return the seconds of the gradient synchronisation that are left when the stage's last
        backward has ended (E3): buckets go out in the order of backward, one after the other."""
        if len(self.replicas) == 1:
            return 0.0
        kind, before_end, end, pending = self.kind(replica, stage), 0.0, -math.inf, 0
        before_end = math.fsum(self.backward_seconds(index, kind) for index in layers)
        for index in reversed(layers):
            layer = self.layers[index]
            before_end -= self.backward_seconds(index, kind)
            pending += layer.gradient_bytes
            if pending >= BUCKET_BYTES or (index == layers.start and pending):
                end = max(end, -before_end) + self.sync_seconds(stage, pending)
                pending = 0
        return max(end, 0.0)

    def sync_seconds(self, stage: int, nbytes: int) -> float:
        """Return the seconds of summing so many bytes over the replicas, in a ring."""
        ranks = [replica[stage] for replica in self.replicas]
        count = len(ranks)
        if count == 1 or not nbytes:
            return 0.0
        links = [
            self.cluster.link(a, b) for a, b in zip(ranks, [*ranks[1:], ranks[0]], strict=True)
        ]
        rounds = 2 * (count - 1) * math.ceil(nbytes / BUCKET_BYTES)
        latency = max(link.latency for link in links) * rounds
        traffic = 2 * (count - 1) / count * nbytes
        return latency + traffic / min(link.bytes_per_second for link in links)

    def peak_bytes(self, stage: int, layers: range, recomputed: Collection[int]) -> int:
        """Return the most bytes that a stage holds at a time: weights, gradients, the optimizer's
        state, the batch, what micro-batches in flight keep, and what backward needs for a moment.

        Under GPipe a layer's first gradient comes while all micro-batches are in flight, and none
        below it is made yet; from the second on there are two of it, but fewer micro-batches."""
        bound, apart = self._busy_bytes(stage, layers, recomputed), self.apart_bytes(stage, layers)
        count = self.in_flight(stage)
        if not self.schedule.whole_batch_loss:
            return max(bound, apart)
        last, loss = stage == self.stages - 1, self.microbatches * self.step.loss_bytes
        kept, again = self.kept_bytes(stage, layers, recomputed)
        held = bound - self._workspace(layers) - count * kept - again - (loss if last else 0)
        output = self.layers[layers[-1]].gradient_output_bytes if last else 0
        first = count * (kept + output) + again + self._workspace(layers, first=True)
        later = (count - 1) * (kept + output) + again + self._workspace(layers)
        busy = held + max(first, later, count * kept + loss if last else 0)
        return max(min(bound, busy), apart)

    def bound_bytes(self, stage: int, layers: range, recomputed: Collection[int]) -> int:
        """Return a bound of `peak_bytes` to which every layer that is recomputed adds or takes a
        number of its own; the planner keeps it within the limit."""
        busy = self._busy_bytes(stage, layers, recomputed)
        return max(busy, self.apart_bytes(stage, layers))

    def _busy_bytes(self, stage: int, layers: range, recomputed: Collection[int]) -> int:
        held = [self.layers[index] for index in layers]
        static = self.static_bytes(layers)
        if stage > 0:
            static += held[0].input_bytes
        if stage < self.stages - 1:
            static += held[-1].gradient_output_bytes
        elif self.schedule.whole_batch_loss:
            static += self.microbatches * self.step.loss_bytes
        count = self.in_flight(stage)
        kept, again = self.kept_bytes(stage, layers, recomputed)
        return static + count * kept + again

    def kept_bytes(self, stage: int, layers: range, recomputed: Collection[int]) -> tuple[int, int]:
        """Return what a micro-batch in flight keeps, and what recomputing adds to one of them."""
        kept = 0 if stage == 0 else self.layers[layers[0]].input_bytes
        again = 0
        for index in layers:
            layer, is_last = self.layers[index], index == layers[-1]
            if index not in recomputed:
                kept += layer.saved_bytes + layer.output_bytes
            else:
                kept += 0 if is_last else layer.output_bytes
                again += layer.saved_bytes + layer.output_bytes
        return kept, again

    def apart_bytes(self, stage: int, layers: range) -> int:
        """Return the most that a stage holds while no micro-batch is in flight."""
        return max(self.check_bytes(stage, layers), self.update_bytes(layers))

    def update_bytes(self, layers: range) -> int:
        """Return what a stage holds while the optimizer steps."""
        trained = self.trained_bytes(layers)
        moment = max(self.layers[index].update_bytes for index in layers)
        moment += math.ceil(self.step.update_bytes_per_byte * trained)
        # What accumulated over batches is one gradient by now.
        before = (self.step.gradient_copies - 1) * trained
        return self.resident_bytes(layers) - before + moment

    def check_bytes(self, stage: int, layers: range) -> int:
        """Return what a last stage holds while it checks that the loss of the whole batch is the
        mean of the micro-batches', as 1F1B asks; nothing is in flight then."""
        if stage < self.stages - 1 or self.schedule.whole_batch_loss or self.microbatches == 1:
            return 0
        loss = self.layers[layers[-1]].output_bytes + self.step.loss_bytes
        return self.resident_bytes(layers) + self.microbatches * loss

    def freed_by_recompute(self, stage: int, layers: range, index: int) -> int:
        """Return by how many bytes the bound falls if the stage recomputes this layer."""
        layer, count = self.layers[index], self.in_flight(stage)
        kept = layer.saved_bytes + (layer.output_bytes if index == layers[-1] else 0)
        return count * kept - layer.saved_bytes - layer.output_bytes

    def static_bytes(self, layers: range) -> int:
        """Return the bytes that do not depend on how many micro-batches are in flight."""
        return self.resident_bytes(layers) + self._workspace(layers)

    def _workspace(self, layers: range, first: bool = False) -> int:
        """Return what backward, or the loss, needs for a moment beyond all gradients: in the first
        backward of a step the gradients that it makes are the ones that stay, and those below are
        still to come."""
        # While a layer goes backward, what those above it kept is gone.
        gone = 0
        missing = sum(self.layers[index].gradient_bytes for index in layers) if first else 0
        workspace = -missing
        for index in reversed(layers):
            layer = self.layers[index]
            workspace = max(workspace, layer.workspace_bytes - missing - gone)
            gone += layer.saved_bytes + layer.output_bytes
            missing -= layer.gradient_bytes if first else 0
        if layers.stop == len(self.layers) and not first:
            workspace = max(workspace, self.step.loss_bytes)
        return workspace

    def resident_bytes(self, layers: range) -> int:
        """Return the bytes that are held all the time: weights, gradients, the optimizer's state
        and the batch."""
        held = [self.layers[index] for index in layers]
        shared = {name: size for layer in held for name, size in layer.shared.items()}
        weights = sum(layer.parameter_bytes for layer in held) + sum(shared.values())
        trained = self.trained_bytes(layers)
        state = math.ceil(trained * self.step.state_bytes_per_parameter_byte)
        batch = self.microbatches * self.layers[0].input_bytes
        return weights + self.step.gradient_copies * trained + state + batch

    def trained_bytes(self, layers: range) -> int:
        """Return the bytes of the gradients of some layers."""
        held = [self.layers[index] for index in layers]
        shared = {name: size for layer in held for name, size in layer.shared.items()}
        return sum(layer.gradient_bytes for layer in held) + sum(shared.values())

    def in_flight(self, stage: int) -> int:
        """Return the most micro-batches that a stage keeps at a time."""
        return max(
            self.schedule.max_in_flight(self.stages, stage, count, self.extra_in_flight)
            for count in self.shares
        )

    def _transfer(self, replica: int, stage: int, step: int, nbytes: int) -> float:
        if not 0 <= stage + step < self.stages:
            return 0.0
        ranks = self.replicas[replica]
        return self.cluster.transfer_seconds(ranks[stage], ranks[stage + step], nbytes)

    def _gradient_transfer(self, replica: int, stage: int, first: int) -> float:
        nbytes = self.layers[first - 1].gradient_output_bytes if first else 0
        return self._transfer(replica, stage, -1, nbytes)


def _of(seconds: Sequence[float], kind: int) -> float:
    return seconds[kind] if seconds else 0.0
