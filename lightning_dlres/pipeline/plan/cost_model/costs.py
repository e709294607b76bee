"""Costs of a stage under a profile: seconds of each kind of work, and peak bytes.

The simulator and the planner share this arithmetic.
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

# Size of a bucket: the bytes of gradients that one all-reduce synchronises.
BUCKET_BYTES = 4 << 20


def layer_ranges(split: Sequence[int]) -> list[range]:
    """Return the indices of the layers of every stage."""
    return [range(sum(split[:s]), sum(split[: s + 1])) for s in range(len(split))]


@dataclass(frozen=True)
class StageCost:
    """Costs of one stage of one replica.

    Attributes:
        seconds: Seconds of each kind of work, for one micro-batch.
        tail: Seconds from the end of the stage's last backward to the end of its step: the rest of
            the gradient synchronisation, and the optimizer's step.
        peak_bytes: Largest number of bytes that the stage holds at a time.
    """

    seconds: dict[Work, float]
    tail: float
    peak_bytes: int


@dataclass(frozen=True)
class Workload:
    """A model on devices in a fixed order: a plan without the split and the recomputed layers.

    Attributes:
        layers: Profiles of the model's layers.
        step: Costs of a step besides the layers.
        cluster: The devices and the links between them.
        replicas: Ranks of every replica, in stage order.
        schedule: Order of each stage's actions.
        microbatches: Number of micro-batches of a batch.
        recompute: "auto" (where the memory limit requires it), "never" or "always".
        extra_in_flight: See `Schedule.actions`.

    Raises:
        ConfigError: If a layer does not have one time per kind of device.
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
                    f"profile must have one forward and one backward time of layer {layer.name!r} "
                    f"for each of {kinds} kinds of device ({', '.join(self.cluster.kinds)}), got "
                    f"{len(layer.forward)} forward and {len(layer.backward)} backward times. "
                    "Profile again."
                )

    @property
    def stages(self) -> int:
        """Number of stages of a replica."""
        return len(self.replicas[0])

    @property
    def shares(self) -> tuple[int, ...]:
        """Number of micro-batches of every replica."""
        count = len(self.replicas)
        return tuple(len(share(self.microbatches, count, replica)) for replica in range(count))

    def memory_limit(self, stage: int) -> int | None:
        """Return the smallest memory limit of a stage's devices, in bytes; None: no limit."""
        limits = [self.cluster.devices[replica[stage]].memory_limit for replica in self.replicas]
        return min((limit for limit in limits if limit is not None), default=None)

    def kind(self, replica: int, stage: int) -> int:
        """Return the kind of a stage's device, as an index into `Cluster.kinds`."""
        return self.cluster.devices[self.replicas[replica][stage]].kind

    def forward_seconds(self, index: int, kind: int) -> float:
        """Return the seconds of a layer's forward for one micro-batch.

        With several replicas every layer has an autograd graph of its own (a run of one layer), so
        that its gradients are sent early. Half of `StepCosts.run_overhead_seconds` counts as
        forward, half as backward.
        """
        return self.layers[index].forward[kind] + self._run_overhead_seconds(kind) / 2

    def backward_seconds(self, index: int, kind: int) -> float:
        """Return the seconds of a layer's backward for one micro-batch; see `forward_seconds`."""
        return self.layers[index].backward[kind] + self._run_overhead_seconds(kind) / 2

    def recompute_seconds(self, index: int, kind: int) -> float:
        """Return the seconds of a layer's recomputation for one micro-batch.

        A recomputed layer always has an autograd graph of its own. Its second forward has half of
        the overhead again. With one replica, its first forward and its backward have one only
        because the layer is recomputed, so their overhead counts here, too.
        """
        overhead = _for_kind(self.step.run_overhead_seconds, kind)
        uncounted = overhead - self._run_overhead_seconds(kind)
        return self.layers[index].forward[kind] + overhead / 2 + uncounted

    def _run_overhead_seconds(self, kind: int) -> float:
        """Return the overhead of a layer's forward and backward, without recomputation; see
        `forward_seconds`."""
        return _for_kind(self.step.run_overhead_seconds, kind) if len(self.replicas) > 1 else 0.0

    def stage_cost(
        self, replica: int, stage: int, layers: range, recomputed: Collection[int]
    ) -> StageCost:
        """Return the costs of a stage that holds these layers and recomputes some of them."""
        kind = self.kind(replica, stage)
        # Forward and backward each exchange one message with every neighbour.
        neighbours = (stage > 0) + (stage < self.stages - 1)
        message_seconds = neighbours * _for_kind(self.step.message, kind)
        is_last = stage == self.stages - 1
        loss_microbatches = self.microbatches if self.schedule.whole_batch_loss else 1
        return StageCost(
            seconds={
                Work.FORWARD: message_seconds
                + math.fsum(self.forward_seconds(i, kind) for i in layers),
                Work.LOSS: _for_kind(self.step.loss, kind) * loss_microbatches if is_last else 0.0,
                Work.RECOMPUTE: math.fsum(
                    self.recompute_seconds(i, kind) for i in layers if i in recomputed
                ),
                Work.BACKWARD: message_seconds
                + math.fsum(self.backward_seconds(i, kind) for i in layers),
                Work.ACTIVATION: self._transfer_seconds(
                    replica, stage, stage + 1, self.layers[layers[-1]].output_bytes
                ),
                Work.GRADIENT: self._gradient_seconds(replica, stage, layers.start),
            },
            tail=self.tail(replica, stage, layers),
            peak_bytes=self.peak_bytes(stage, layers, recomputed),
        )

    def tail(self, replica: int, stage: int, layers: range) -> float:
        """Return `StageCost.tail` of a stage that holds these layers, in seconds."""
        kind = self.kind(replica, stage)
        update = _for_kind(self.step.update, kind) * self.trained_bytes(layers)
        return self.sync_tail(replica, stage, layers) + update

    def sync_tail(self, replica: int, stage: int, layers: range) -> float:
        """Return the seconds of gradient synchronisation after a stage's last backward.

        Buckets are sent in the order of backward, one after the other.
        """
        if len(self.replicas) == 1:
            return 0.0
        kind, pending_bytes = self.kind(replica, stage), 0
        # End of the latest bucket, in seconds after the end of the last backward.
        bucket_end = -math.inf
        # Seconds that the backward still takes.
        seconds_left = math.fsum(self.backward_seconds(index, kind) for index in layers)
        for index in reversed(layers):
            seconds_left -= self.backward_seconds(index, kind)
            pending_bytes += self.layers[index].gradient_bytes
            if pending_bytes >= BUCKET_BYTES or (index == layers.start and pending_bytes):
                bucket_start = max(bucket_end, -seconds_left)
                bucket_end = bucket_start + self.sync_seconds(stage, pending_bytes)
                pending_bytes = 0
        return max(bucket_end, 0.0)

    def sync_seconds(self, stage: int, nbytes: int) -> float:
        """Return the seconds of a ring all-reduce of this many bytes over the replicas."""
        ranks = [replica[stage] for replica in self.replicas]
        count = len(ranks)
        if count == 1 or not nbytes:
            return 0.0
        links = [
            self.cluster.link(a, b) for a, b in zip(ranks, [*ranks[1:], ranks[0]], strict=True)
        ]
        # The ring needs count - 1 rounds to sum a bucket, and as many to distribute the sum.
        rounds = 2 * (count - 1) * math.ceil(nbytes / BUCKET_BYTES)
        latency = max(link.latency for link in links) * rounds
        traffic = 2 * (count - 1) / count * nbytes
        return latency + traffic / min(link.bytes_per_second for link in links)

    def peak_bytes(self, stage: int, layers: range, recomputed: Collection[int]) -> int:
        """Return the largest number of bytes that a stage holds at a time.

        These are weights, gradients, optimizer state, the batch, the saved tensors of micro-batches
        in flight, and the temporary memory of backward.

        With a loss over the whole batch, the first backward runs while all micro-batches are in
        flight, but the gradients of earlier layers do not exist yet. In later backwards a layer has
        its new gradient beside the accumulated one, but fewer micro-batches are in flight.
        """
        bound, idle = self._busy_bytes(stage, layers, recomputed), self.idle_bytes(stage, layers)
        count = self.in_flight(stage)
        if not self.schedule.whole_batch_loss:
            return max(bound, idle)
        is_last, loss = stage == self.stages - 1, self.microbatches * self.step.loss_bytes
        saved, recomputation = self.saved_bytes(stage, layers, recomputed)
        # The part of the bound that is the same in the loss and in every backward.
        fixed = (
            bound
            - self._workspace_bytes(layers)
            - count * saved
            - recomputation
            - (loss if is_last else 0)
        )
        # The loss makes the gradients of all outputs at once.
        output = self.layers[layers[-1]].gradient_output_bytes if is_last else 0
        in_loss = count * saved + loss if is_last else 0
        in_first_backward = (
            count * (saved + output) + recomputation + self._workspace_bytes(layers, first=True)
        )
        in_later_backward = (
            (count - 1) * (saved + output) + recomputation + self._workspace_bytes(layers)
        )
        busy = fixed + max(in_loss, in_first_backward, in_later_backward)
        return max(min(bound, busy), idle)

    def bound_bytes(self, stage: int, layers: range, recomputed: Collection[int]) -> int:
        """Return an upper bound of `peak_bytes`, which the planner keeps within the limit.

        While micro-batches are in flight, the bound is linear in the recomputed layers: each of
        them frees or adds a number of bytes that does not depend on the others.
        """
        busy = self._busy_bytes(stage, layers, recomputed)
        return max(busy, self.idle_bytes(stage, layers))

    def _busy_bytes(self, stage: int, layers: range, recomputed: Collection[int]) -> int:
        """Return an upper bound of the bytes of a stage while micro-batches are in flight."""
        static = self.static_bytes(layers)
        if stage > 0:
            static += self.layers[layers[0]].input_bytes
        if stage < self.stages - 1:
            static += self.layers[layers[-1]].gradient_output_bytes
        elif self.schedule.whole_batch_loss:
            static += self.microbatches * self.step.loss_bytes
        count = self.in_flight(stage)
        saved, recomputation = self.saved_bytes(stage, layers, recomputed)
        return static + count * saved + recomputation

    def saved_bytes(
        self, stage: int, layers: range, recomputed: Collection[int]
    ) -> tuple[int, int]:
        """Return the bytes that every micro-batch in flight saves, and the bytes that recomputation
        adds for one micro-batch at a time."""
        saved = 0 if stage == 0 else self.layers[layers[0]].input_bytes
        recomputation = 0
        for index in layers:
            layer, is_last = self.layers[index], index == layers[-1]
            if index not in recomputed:
                saved += layer.saved_bytes + layer.output_bytes
            else:
                # The output stays saved as the input of the stage's next layer, if there is one.
                saved += 0 if is_last else layer.output_bytes
                recomputation += layer.saved_bytes + layer.output_bytes
        return saved, recomputation

    def idle_bytes(self, stage: int, layers: range) -> int:
        """Return the largest number of bytes that a stage holds with no micro-batch in flight."""
        return max(self.loss_check_bytes(stage, layers), self.update_bytes(layers))

    def update_bytes(self, layers: range) -> int:
        """Return the bytes that a stage holds during the optimizer's step."""
        trained = self.trained_bytes(layers)
        temporary = max(self.layers[index].update_bytes for index in layers)
        temporary += math.ceil(self.step.update_bytes_per_byte * trained)
        # Gradients accumulated over batches have been added up to one copy by then.
        extra_copies = (self.step.gradient_copies - 1) * trained
        return self.resident_bytes(layers) - extra_copies + temporary

    def loss_check_bytes(self, stage: int, layers: range) -> int:
        """Return the bytes that a stage holds during the loss check; 0 if it has no such check.

        If the loss is computed per micro-batch, the last stage checks that the mean of these losses
        equals the loss of the whole batch. No micro-batch is in flight then.
        """
        if stage < self.stages - 1 or self.schedule.whole_batch_loss or self.microbatches == 1:
            return 0
        loss = self.layers[layers[-1]].output_bytes + self.step.loss_bytes
        return self.resident_bytes(layers) + self.microbatches * loss

    def freed_by_recompute(self, stage: int, layers: range, index: int) -> int:
        """Return the bytes by which the bound for micro-batches in flight falls if the stage
        recomputes this layer; negative if it rises."""
        layer, count = self.layers[index], self.in_flight(stage)
        saved = layer.saved_bytes + (layer.output_bytes if index == layers[-1] else 0)
        return count * saved - layer.saved_bytes - layer.output_bytes

    def static_bytes(self, layers: range) -> int:
        """Return the bytes that do not depend on the number of micro-batches in flight."""
        return self.resident_bytes(layers) + self._workspace_bytes(layers)

    def _workspace_bytes(self, layers: range, first: bool = False) -> int:
        """Return the bytes that backward or the loss adds to the resident and saved bytes.

        Args:
            layers: Layers of the stage.
            first: True for the first backward of a step. The gradients of earlier layers do not
                exist yet then. A layer's new gradient becomes the accumulated one, so there is no
                second copy. The result is negative if this outweighs the temporary memory.
        """
        # Saved bytes of later layers, which are free when backward reaches a layer.
        freed = 0
        # Gradient bytes that `resident_bytes` counts but that do not exist yet.
        missing = sum(self.layers[index].gradient_bytes for index in layers) if first else 0
        workspace = -missing
        for index in reversed(layers):
            layer = self.layers[index]
            workspace = max(workspace, layer.workspace_bytes - missing - freed)
            freed += layer.saved_bytes + layer.output_bytes
            missing -= layer.gradient_bytes if first else 0
        if layers.stop == len(self.layers) and not first:
            workspace = max(workspace, self.step.loss_bytes)
        return workspace

    def resident_bytes(self, layers: range) -> int:
        """Return the bytes that a stage holds throughout a step: weights, gradients, optimizer
        state and the batch."""
        profiles = [self.layers[index] for index in layers]
        # Each shared parameter counts once.
        shared = {name: size for layer in profiles for name, size in layer.shared.items()}
        weights = sum(layer.parameter_bytes for layer in profiles) + sum(shared.values())
        trained = self.trained_bytes(layers)
        state = math.ceil(trained * self.step.state_bytes_per_parameter_byte)
        batch = self.microbatches * self.layers[0].input_bytes
        return weights + self.step.gradient_copies * trained + state + batch

    def trained_bytes(self, layers: range) -> int:
        """Return the bytes of one copy of the gradients of some layers."""
        profiles = [self.layers[index] for index in layers]
        shared = {name: size for layer in profiles for name, size in layer.shared.items()}
        return sum(layer.gradient_bytes for layer in profiles) + sum(shared.values())

    def in_flight(self, stage: int) -> int:
        """Return the largest number of micro-batches in flight on a stage, over all replicas."""
        return max(
            self.schedule.max_in_flight(self.stages, stage, count, self.extra_in_flight)
            for count in self.shares
        )

    def _transfer_seconds(self, replica: int, stage: int, receiver: int, nbytes: int) -> float:
        """Return the seconds of a message to the stage `receiver`; 0 if there is no such stage."""
        if not 0 <= receiver < self.stages:
            return 0.0
        ranks = self.replicas[replica]
        return self.cluster.transfer_seconds(ranks[stage], ranks[receiver], nbytes)

    def _gradient_seconds(self, replica: int, stage: int, first_layer: int) -> float:
        """Return the seconds in which a stage sends the gradient of its input to the stage before
        it."""
        nbytes = self.layers[first_layer - 1].gradient_output_bytes if first_layer else 0
        return self._transfer_seconds(replica, stage, stage - 1, nbytes)


def _for_kind(seconds: Sequence[float], kind: int) -> float:
    """Return the seconds on a kind of device; 0 if they were not measured."""
    return seconds[kind] if seconds else 0.0
