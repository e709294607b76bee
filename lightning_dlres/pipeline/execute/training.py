"""One training step on one rank: the schedule's actions, carried out in order."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn

from lightning_dlres.core._compat import hooks_suspended
from lightning_dlres.core.errors import UnsupportedStepError
from lightning_dlres.core.wire.tree import Tree, map_tensors, tensors_of
from lightning_dlres.pipeline.comm.mailbox import Channel
from lightning_dlres.pipeline.execute.runtime import Runtime
from lightning_dlres.pipeline.plan.schedules.schedule import (
    ALL_MICROBATCHES,
    Action,
    Op,
    build_schedule,
)
from lightning_dlres.pipeline.profile.layer_times import is_lack_of_memory
from lightning_dlres.pipeline.stage.microbatch import cut, join, share
from lightning_dlres.pipeline.stage.stage import (
    GradientBuffer,
    Gradients,
    enter_inplace_safe,
    storage_id,
)


class UserStep(Protocol):
    """One training step of user code, seen from the pipeline."""

    def module_inputs(self) -> Tree:
        """First stage: run the step up to the module's call, and return what the module is called
        with."""

    def finish(self, output: Tree, microbatch: int | None, sizes: Sequence[int]) -> Tensor:
        """Last stage: run the step with `output` as the module's result, and return the loss.

        `microbatch` is None if the output is that of the whole batch, else the index of the
        micro-batch it belongs to.
        """

    def record(self, sizes: Sequence[int]) -> Tree:
        """Last stage, after the last `finish`: what the other ranks must know of the step."""


@dataclass(frozen=True)
class TrainResult:
    """What a training step leaves on every rank.

    Attributes:
        gradients: sum over the batch for every parameter held here, multiplied by the loss scale.
        records: records of the last stages: of the first replica only under GPipe, of every
            replica that had a micro-batch under 1F1B.
        sizes: samples of every micro-batch.
    """

    gradients: Gradients
    records: list[Tree]
    sizes: list[int]


class TrainingStep:
    """One training step over the global batch; every rank makes and runs one.

    Args:
        runtime: this rank's part of the pipeline.
        user: the user's step.
        schedule: "gpipe" (the loss once, over the whole batch) or "1f1b" (a loss per micro-batch,
            weighted by samples).
        seed: seed of this step for what is random in the layers.
        scale: the loss is multiplied by this before backward (mixed precision).
    """

    def __init__(
        self, runtime: Runtime, user: UserStep, schedule: str, seed: int, scale: float = 1.0
    ) -> None:
        self.runtime, self.user, self.schedule = runtime, user, schedule
        self.seed, self.scale = seed, scale
        self.stage, self.sync = runtime.stage, runtime.sync
        self.buffer = GradientBuffer()
        self.inputs: dict[int, Tree] = {}
        self.outputs: dict[int, Tree] = {}
        self.gradients: dict[int, Sequence[Tensor | None]] = {}
        self.input_gradients: list[tuple[Tensor, Tensor]] = []
        self.sizes: list[int] = []
        self.own = range(0)
        self.record: Tree = None

    def run(self, batch_digest: int) -> TrainResult:
        """Run the step; `batch_digest` is the fingerprint of the batch that this rank sees.

        Raises:
            BatchMismatchError: this rank's batch is not that of the first rank.
            PeerError: a peer is late, lost, or out of step; the message names stage, micro-batch
                and peer.
        """
        try:
            with hooks_suspended([*self.stage.parameters, *self.runtime.non_pipelined]):
                return self._run(batch_digest)
        except BaseException:
            self.stage.drop_records()
            raise

    def _run(self, batch_digest: int) -> TrainResult:
        runtime, plan = self.runtime, self.runtime.plan
        whole = self.user.module_inputs() if runtime.is_first else None
        self.sizes = runtime.announce(whole, batch_digest)
        self.own = share(len(self.sizes), len(plan.replicas), runtime.replica)
        if runtime.is_first:
            parts = cut(whole, self.sizes)
            self.inputs = {m: parts[m] for m in self.own}
        for action in build_schedule(
            self.schedule,
            plan.stages,
            runtime.stage_index,
            len(self.own),
            self.stage.recomputes,
            plan.extra_in_flight,
        ):
            self.perform(action)
        self.backward_into_step()
        self.sync.finish(self.buffer)
        runtime.buffers.run()
        records = runtime.gather_records(self.record, self.sources())
        return TrainResult(self.buffer.gradients, records, self.sizes)

    def perform(self, action: Action) -> None:
        whole = action.microbatch == ALL_MICROBATCHES
        _DO[action.op](self, ALL_MICROBATCHES if whole else self.own[action.microbatch])

    def sources(self) -> list[int]:
        ranks = self.runtime.last_ranks(self.sizes)
        return ranks[:1] if self.schedule == "gpipe" else ranks

    def receive_activation(self, m: int) -> None:
        self.inputs[m] = self.runtime.take(Channel.ACTIVATION, -1, m, "the activations")

    def forward(self, m: int) -> None:
        with self.runtime.computing("forward", m), self.explaining_single_samples(m):
            self.outputs[m] = self.stage.forward(m, self.inputs[m], self.seed)
        if not self.runtime.is_first:
            del self.inputs[m]

    @contextmanager
    def explaining_single_samples(self, m: int) -> Iterator[None]:
        """Context manager that says so if a layer fails on one sample of a larger batch, as
        BatchNorm does."""
        try:
            yield
        except Exception as error:
            samples = sum(self.sizes)
            if self.sizes[m] > 1 or samples == 1 or is_lack_of_memory(error):
                raise
            raise UnsupportedStepError(
                f"A layer fails on a micro-batch of one sample ({type(error).__name__}: {error}). "
                f"The batch of {samples} samples was cut into {len(self.sizes)} micro-batches. "
                "Set drop_last=True in the DataLoader if the last batch is small, or use "
                "HeteroPipeStrategy(microbatches=...) with fewer."
            ) from error

    def send_activation(self, m: int) -> None:
        self.runtime.give(Channel.ACTIVATION, 1, m, self.outputs.pop(m))

    def loss(self, m: int) -> None:
        if m != ALL_MICROBATCHES:
            self.loss_of_part(m)
        elif self.own:
            self.loss_of_whole()

    def loss_of_whole(self) -> None:
        """GPipe: the user's step runs once on the output of the whole batch, exact for any loss."""
        sizes = [self.sizes[m] for m in self.own]
        trees = [self.outputs.pop(m) for m in self.own]
        leaves = [tensors_of(tree) for tree in trees]
        output = join([_entered(tree) for tree in trees], sizes)
        if len(self.runtime.plan.replicas) > 1:
            output = join(
                self.runtime.exchange_outputs(output, self.sizes),
                self.runtime.machine_sizes(self.sizes),
            )
        with self.runtime.computing("loss", ALL_MICROBATCHES):
            loss = self.user.finish(output, None, self.sizes)
            del output  # a copy of all outputs, which the loss may not need any more
            # Every replica's last stage computes the same loss over the same batch: parameters
            # outside of the layers count once.
            non_pipelined = self.runtime.non_pipelined if self.runtime.replica == 0 else []
            self.take_gradients(loss, leaves, non_pipelined, self.scale)
        self.finish_loss()

    def loss_of_part(self, m: int) -> None:
        """1F1B: the user's step runs on one micro-batch, and counts by its samples."""
        tree = self.outputs.pop(m)
        with self.runtime.computing("loss", m):
            loss = self.user.finish(_entered(tree), m, self.sizes)
            weight = self.sizes[m] / sum(self.sizes)
            self.take_gradients(
                loss, [tensors_of(tree)], self.runtime.non_pipelined, self.scale * weight, [m]
            )
        if m == self.own[-1]:
            self.finish_loss()

    def finish_loss(self) -> None:
        self.record = self.user.record(self.sizes)
        self.runtime.share_record(self.record, self.sources())

    def take_gradients(
        self,
        loss: Tensor,
        leaves: list[list[Tensor]],
        non_pipelined: Sequence[nn.Parameter],
        scale: float,
        microbatches: Sequence[int] | None = None,
    ) -> None:
        wanted = [leaf for part in leaves for leaf in part if leaf.requires_grad]
        results: Iterator[Tensor | None] = iter([None] * len(wanted))
        if loss.requires_grad and (wanted or non_pipelined):
            # The gradient of scale * loss, which need not be computed for that. In half precision
            # the scale may be infinite, as that gradient would be: a product is, `full` raises.
            start = torch.ones_like(loss).mul_(scale)
            found = torch.autograd.grad(loss, [*wanted, *non_pipelined], start, allow_unused=True)
            results = iter(found)
            for parameter, gradient in zip(non_pipelined, found[len(wanted) :], strict=True):
                if gradient is not None:
                    self.buffer.add(parameter, gradient)
        for m, part in zip(microbatches or self.own, leaves, strict=True):
            self.gradients[m] = [next(results) if leaf.requires_grad else None for leaf in part]

    def recompute(self, m: int) -> None:
        with self.runtime.computing("recompute", m):
            self.stage.recompute(m)

    def receive_gradient(self, m: int) -> None:
        self.gradients[m] = self.runtime.take(Channel.GRADIENT, 1, m, "the gradients")

    def backward(self, m: int) -> None:
        last = m == self.own[-1]
        done = (lambda position: self.sync.layer_done(position, self.buffer)) if last else None
        with self.runtime.computing("backward", m):
            gradients = self.stage.backward(m, self.gradients.pop(m), self.buffer, done)
        if not self.runtime.is_first:
            self.gradients[m] = gradients
            return
        for tensor, gradient in zip(tensors_of(self.inputs.pop(m)), gradients, strict=True):
            if gradient is not None:
                self.input_gradients.append((tensor, gradient))

    def send_gradient(self, m: int) -> None:
        # A parameter gradient may share memory with what is sent, and is written to by the next
        # micro-batch and by clipping. Those of earlier micro-batches cannot.
        kept = self.buffer.pop_new_storages()
        found = self.gradients.pop(m)
        gradients = [g.clone() if g is not None and storage_id(g) in kept else g for g in found]
        self.runtime.give(Channel.GRADIENT, -1, m, gradients)

    def backward_into_step(self) -> None:
        """First stage: go on through what the step did before the module's call."""
        non_pipelined = self.runtime.non_pipelined
        if not self.input_gradients or not non_pipelined:
            return
        tensors, gradients = zip(*self.input_gradients, strict=True)
        for parameter, gradient in zip(
            non_pipelined,
            torch.autograd.grad(tensors, non_pipelined, gradients, allow_unused=True),
            strict=True,
        ):
            if gradient is not None:
                self.buffer.add(parameter, gradient)


# Not bound to a step: a step that refers to itself would keep its gradients until Python collects
# cycles.
_DO: dict[Op, Callable[[TrainingStep, int], None]] = {
    Op.RECEIVE_ACTIVATION: TrainingStep.receive_activation,
    Op.FORWARD: TrainingStep.forward,
    Op.SEND_ACTIVATION: TrainingStep.send_activation,
    Op.LOSS: TrainingStep.loss,
    Op.RECOMPUTE: TrainingStep.recompute,
    Op.RECEIVE_GRADIENT: TrainingStep.receive_gradient,
    Op.BACKWARD: TrainingStep.backward,
    Op.SEND_GRADIENT: TrainingStep.send_gradient,
}


def _entered(tree: Tree) -> Tree:
    """Return the tree with tensors that user code may change in place, which leaves do not
    allow."""

    def enter(tensor: Tensor) -> Tensor:
        return enter_inplace_safe([tensor])[0] if tensor.requires_grad else tensor

    return map_tensors(enter, tree)
