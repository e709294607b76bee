"""One training step on one rank.

`TrainingStep` runs the actions of the schedule in order. `with_gradients` returns a loss whose
backward delivers the gradients of these actions to the parameters.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from lightning_dlres.core._compat import hooks_suspended
from lightning_dlres.core.comm.mailbox import Channel
from lightning_dlres.core.errors import UnsupportedStepError
from lightning_dlres.core.wire.tree import Tree, map_tensors, tensors_of
from lightning_dlres.pipeline.execute.runtime import Runtime
from lightning_dlres.pipeline.plan.schedules.base import ALL_MICROBATCHES, Action, Op, Schedule
from lightning_dlres.pipeline.stage.gradient_buffer import GradientBuffer, Gradients, storage_id
from lightning_dlres.pipeline.stage.layer_errors import (
    explaining_single_samples,
    noting_micro_batch,
)
from lightning_dlres.pipeline.stage.microbatch import join_if_alike, own_copy, share
from lightning_dlres.pipeline.stage.stage import inplace_safe_aliases


class UserStep(Protocol):
    """One training step of user code, as the pipeline calls it."""

    def before_gradient_access(self, call: Callable[[], None] | None) -> None:
        """Call a function before the user's code reads or replaces a parameter's `.grad`, which may
        be a sum of this step; None ends this."""

    def module_inputs(self) -> Tree:
        """Run the step up to the module's call, and return the module's inputs.

        Called on the first stage. `SKIPPED` if the step skips the batch before the call.
        """

    def finish(self, output: Tree, microbatch: int | None, sizes: Sequence[int]) -> Tensor | None:
        """Run the step with `output` as the module's result, and return the loss.

        Called on the last stage. None: the step skips the batch or micro-batch.

        Args:
            output: Output of the whole batch, or of one micro-batch; None if the step skips the
                batch before the module's call.
            microbatch: Index of the micro-batch; None for the whole batch.
            sizes: Samples of every micro-batch; empty if the step skips the batch before the call.
        """

    def record(self) -> Tree:
        """Return what the other ranks need of the step, such as its loss and logs.

        Called on the last stage after the last `finish`.
        """


@dataclass(frozen=True)
class TrainResult:
    """Result of a training step, on every rank.

    Attributes:
        gradients: Gradient of the batch's loss, multiplied by the loss scale, for the parameters
            that this rank holds. Parameters without a gradient are missing.
        records: Results of `UserStep.record`: that of the first replica after a loss over the whole
            batch, else that of every replica that had a micro-batch.
        sizes: Samples of every micro-batch; empty if the step skipped the batch before the module's
            call.
    """

    gradients: Gradients
    records: list[Tree]
    sizes: list[int]


class TrainingStep:
    """One training step over the global batch; every rank makes and runs one.

    Micro-batches are numbered over the global batch, except in `Action`: there the number counts
    the micro-batches of this replica.

    Args:
        runtime: This rank's part of the pipeline.
        user: The user's step.
        schedule: Order of each stage's actions. It also decides between one loss over the whole
            batch and one loss per micro-batch, weighted by samples.
        seed: Seed of this step for randomness in the layers.
        scale: Factor of the loss before backward (mixed precision).
    """

    def __init__(
        self, runtime: Runtime, user: UserStep, schedule: Schedule, seed: int, scale: float = 1.0
    ) -> None:
        self.runtime, self.user, self.schedule = runtime, user, schedule
        self.seed, self.scale = seed, scale
        self.stage, self.sync = runtime.stage, runtime.sync
        self.buffer = GradientBuffer(keeps_grad=True)
        # By micro-batch, until they are used or sent: inputs and outputs of the stage, and the
        # gradients of its outputs before backward, and of its inputs afterwards.
        self.inputs: dict[int, Tree] = {}
        self.outputs: dict[int, Tree] = {}
        self.gradients: dict[int, Sequence[Tensor | None]] = {}
        # On the first stage: the module's input tensors and their gradients.
        self.input_gradients: list[tuple[Tensor, Tensor]] = []
        self.sizes: list[int] = []
        # Micro-batches of this replica.
        self.own = range(0)
        # Micro-batch of the last action of each kind. It need not be the highest index: a schedule
        # may run backwards in any order.
        self.last: dict[Op, int] = {}
        self.record: Tree = None

    def run(self, batch_digest: int) -> TrainResult:
        """Run the step.

        Args:
            batch_digest: Fingerprint of the batch that this rank sees.

        Raises:
            BatchMismatchError: If this rank's batch is not that of the first rank.
            UnsupportedStepError: If the step or a layer cannot run in a pipeline.
            PeerError: If a peer is late, lost, or out of step; the message names stage, micro-batch
                and peer.
        """
        self.user.before_gradient_access(self.buffer.give_back)
        try:
            # Hooks on parameters run when the strategy delivers the gradients, not here.
            with hooks_suspended([*self.stage.parameters, *self.runtime.non_pipelined]):
                return self._run(batch_digest)
        except BaseException:
            self.stage.drop_records()
            raise
        finally:
            self.user.before_gradient_access(None)

    def _run(self, batch_digest: int) -> TrainResult:
        runtime, plan = self.runtime, self.runtime.plan
        module_inputs = self.user.module_inputs() if runtime.is_first else None
        self.sizes = runtime.announce(module_inputs, batch_digest)
        if not self.sizes:
            return self.skip()
        self.own = share(len(self.sizes), len(plan.replicas), runtime.replica)
        self.sync.begin(loss_scale=self.scale, has_data=bool(self.own))
        if runtime.is_first:
            parts = runtime.inputs.cut(module_inputs, self.sizes)
            self.inputs = {m: parts[m] for m in self.own}
        actions = self.schedule.actions(
            plan.stages,
            runtime.stage_index,
            len(self.own),
            recompute=self.stage.recomputes,
            extra_in_flight=plan.extra_in_flight,
        )
        self.last = {action.op: self.microbatch_of(action) for action in actions}
        try:
            for action in actions:
                _METHODS[action.op](self, self.microbatch_of(action))
        finally:
            self.buffer.give_back()
        self.backward_before_module()
        self.sync.finish(self.buffer)
        runtime.buffers.run()
        records = runtime.gather_records(self.record, self.record_sources())
        return TrainResult(self.buffer.gradients, records, self.sizes)

    def skip(self) -> TrainResult:
        """Run a step that skips the batch before the module's call: only its side effects count."""
        runtime = self.runtime
        sources = [runtime.plan.replicas[0][-1]]
        if runtime.rank in sources:
            self.user.finish(None, None, self.sizes)
            self.record = self.user.record()
            runtime.share_record(self.record, sources)
        return TrainResult({}, runtime.gather_records(self.record, sources), self.sizes)

    def microbatch_of(self, action: Action) -> int:
        """Return the number of an action's micro-batch in the global batch."""
        whole = action.microbatch == ALL_MICROBATCHES
        return ALL_MICROBATCHES if whole else self.own[action.microbatch]

    def record_sources(self) -> list[int]:
        """Return the ranks whose records count; see `TrainResult`."""
        ranks = self.runtime.last_ranks(self.sizes)
        return ranks[:1] if self.schedule.whole_batch_loss else ranks

    def receive_activation(self, m: int) -> None:
        self.inputs[m] = self.runtime.receive(Channel.ACTIVATION, -1, m, "the activations")

    def forward(self, m: int) -> None:
        with (
            self.runtime.computing("forward", m),
            self.explaining_single_samples(m),
            noting_micro_batch(self.sizes[m], sum(self.sizes)),
        ):
            inputs = self.inputs[m]
            if self.runtime.is_first:
                inputs = own_copy(inputs, self.sizes)
            self.outputs[m] = self.stage.forward(m, inputs, self.seed)
        if not self.runtime.is_first:
            del self.inputs[m]

    def explaining_single_samples(self, m: int) -> AbstractContextManager[None]:
        """Return a context manager that explains a layer's error on a micro-batch of one sample."""
        samples = sum(self.sizes)
        return explaining_single_samples(
            self.sizes[m] == 1 < samples,
            f"The batch of {samples} samples was cut into {len(self.sizes)} micro-batches. ",
        )

    def send_activation(self, m: int) -> None:
        self.runtime.send(Channel.ACTIVATION, 1, m, self.outputs.pop(m))

    def loss(self, m: int) -> None:
        if m != ALL_MICROBATCHES:
            self.loss_of_microbatch(m)
        elif self.own:
            self.loss_of_batch()

    def loss_of_batch(self) -> None:
        """Run the user's step once on the output of the whole batch.

        The loss is then exact, even if it is no mean over samples.
        """
        sizes = [self.sizes[m] for m in self.own]
        trees = [self.outputs.pop(m) for m in self.own]
        leaves = [tensors_of(tree) for tree in trees]
        output = join_if_alike([_inplace_safe(tree) for tree in trees], sizes)
        if len(self.runtime.plan.replicas) > 1:
            output = join_if_alike(
                self.runtime.exchange_outputs(output, self.sizes),
                self.runtime.replica_sizes(self.sizes),
            )
        with self.runtime.computing("loss", ALL_MICROBATCHES):
            loss = self.user.finish(output, None, self.sizes)
            # `output` is a copy of all outputs. Free it before backward, unless autograd needs it.
            del output
            # The last stage of every replica computes the same loss over the same batch, so
            # the gradients of parameters outside of the layers must count in one replica only.
            non_pipelined = self.runtime.non_pipelined if self.runtime.replica == 0 else []
            self.backward_from_loss(loss, leaves, non_pipelined, self.scale)
        self.finish_loss()

    def loss_of_microbatch(self, m: int) -> None:
        """Run the user's step on one micro-batch, weighted by its samples."""
        tree = self.outputs.pop(m)
        with self.runtime.computing("loss", m):
            loss = self.user.finish(_inplace_safe(tree), m, self.sizes)
            weight = self.sizes[m] / sum(self.sizes)
            self.backward_from_loss(
                loss, [tensors_of(tree)], self.runtime.non_pipelined, self.scale * weight, [m]
            )
        if m == self.last[Op.LOSS]:
            self.finish_loss()

    def finish_loss(self) -> None:
        """Send the record of the step to all ranks, after the last loss."""
        self.record = self.user.record()
        self.runtime.share_record(self.record, self.record_sources())

    def backward_from_loss(
        self,
        loss: Tensor | None,
        leaves: list[list[Tensor]],
        non_pipelined: Sequence[nn.Parameter],
        scale: float,
        microbatches: Sequence[int] | None = None,
    ) -> None:
        """Run backward through the user's step, from the loss to the stage's outputs.

        Args:
            loss: Loss of the batch, or of one micro-batch; None gives no gradients.
            leaves: Output tensors of every micro-batch in the loss.
            non_pipelined: Parameters that get a gradient from the loss itself.
            scale: Factor of the loss.
            microbatches: Micro-batches in the loss; None for all of this replica.
        """
        with_gradient = [leaf for part in leaves for leaf in part if leaf.requires_grad]
        leaf_gradients: Iterator[Tensor | None] = iter([None] * len(with_gradient))
        if loss is not None and loss.requires_grad and (with_gradient or non_pipelined):
            # Starting from `scale` instead of 1 gives the gradients of scale * loss. In half
            # precision the scale may overflow. `mul_` then gives infinity, as backward of the
            # product would, and `torch.full` would raise.
            loss_gradient = torch.ones_like(loss).mul_(scale)
            gradients = torch.autograd.grad(
                loss, [*with_gradient, *non_pipelined], loss_gradient, allow_unused=True
            )
            leaf_gradients = iter(gradients)
            for parameter, gradient in zip(
                non_pipelined, gradients[len(with_gradient) :], strict=True
            ):
                if gradient is not None:
                    self.buffer.add(parameter, gradient)
        for m, part in zip(microbatches or self.own, leaves, strict=True):
            self.gradients[m] = [
                next(leaf_gradients) if leaf.requires_grad else None for leaf in part
            ]

    def recompute(self, m: int) -> None:
        with self.runtime.computing("recompute", m):
            self.stage.recompute(m)

    def receive_gradient(self, m: int) -> None:
        self.gradients[m] = self.runtime.receive(Channel.GRADIENT, 1, m, "the gradients")

    def backward(self, m: int) -> None:
        # A layer's gradients are final, and can be sent, after the last backward of the layer.
        is_last = m == self.last[Op.BACKWARD]
        done = (lambda position: self.sync.layer_done(position, self.buffer)) if is_last else None
        with self.runtime.computing("backward", m):
            gradients = self.stage.backward(m, self.gradients.pop(m), self.buffer, done)
        if not self.runtime.is_first:
            self.gradients[m] = gradients
            return
        for tensor, gradient in zip(tensors_of(self.inputs.pop(m)), gradients, strict=True):
            if gradient is not None:
                self.input_gradients.append((tensor, gradient))

    def send_gradient(self, m: int) -> None:
        # A message must not share storage with a parameter's gradient: the next micro-batch and
        # clipping write to that. Gradients from before the last message cannot share storage with
        # this one, so check only the new ones.
        new_storages = self.buffer.pop_new_storages()
        gradients = [
            g.clone() if g is not None and storage_id(g) in new_storages else g
            for g in self.gradients.pop(m)
        ]
        self.runtime.send(Channel.GRADIENT, -1, m, gradients)

    def backward_before_module(self) -> None:
        """Run backward through the user's step before the module's call, on the first stage.

        It adds the gradients of the parameters that this part of the step uses.
        """
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


# Unbound methods: a step with references to itself would be freed, with its gradients, only when
# Python collects cycles.
_METHODS: dict[Op, Callable[[TrainingStep, int], None]] = {
    Op.RECEIVE_ACTIVATION: TrainingStep.receive_activation,
    Op.FORWARD: TrainingStep.forward,
    Op.SEND_ACTIVATION: TrainingStep.send_activation,
    Op.LOSS: TrainingStep.loss,
    Op.RECOMPUTE: TrainingStep.recompute,
    Op.RECEIVE_GRADIENT: TrainingStep.receive_gradient,
    Op.BACKWARD: TrainingStep.backward,
    Op.SEND_GRADIENT: TrainingStep.send_gradient,
}


def _inplace_safe(tree: Tree) -> Tree:
    """Return the tree with aliases that user code may change in place.

    Autograd refuses in-place operations on the leaves themselves.
    """

    def alias(tensor: Tensor) -> Tensor:
        return inplace_safe_aliases([tensor])[0] if tensor.requires_grad else tensor

    return map_tensors(alias, tree)


class _DeliverGradients(torch.autograd.Function):
    """Autograd function that passes computed gradients to the parameters in the loss's backward.

    Between a step and its backward, Lightning zeroes gradients, divides the loss for accumulation,
    scales it for mixed precision, and runs hooks. All of that works as in ordinary training,
    because autograd adds the gradients only in backward.
    """

    @staticmethod
    def forward(
        ctx: Any,
        loss: Tensor,
        anchor: Tensor,
        gradients: list[Tensor],
        scale: float,
        *parameters: Tensor,
    ) -> Tensor:
        ctx.gradients, ctx.scale = gradients, scale
        return loss.clone()

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        gradients, ctx.gradients = ctx.gradients, None
        if gradients is None:
            raise UnsupportedStepError(
                "backward must run once on the loss of a step, got a second call (retain_graph?): "
                "the schedule computes the gradients only once. Scale the loss instead, or return "
                "a sum of losses."
            )
        factor = float(grad_output) / ctx.scale
        if factor != 1.0:
            gradients = [gradient * factor for gradient in gradients]
        return None, None, None, None, *gradients


def with_gradients(loss: Tensor, gradients: Gradients, scale: float) -> Tensor:
    """Return a loss of the same value whose backward adds `gradients` to the parameters' `.grad`.

    Args:
        loss: Loss, a scalar tensor.
        gradients: Gradient of `scale * loss` for every parameter of this rank.
        scale: Factor in the gradients. Backward divides them by it, and multiplies them by the
            gradient of the loss that autograd passes.
    """
    # The anchor makes the loss require a gradient on a stage that has no trainable parameter.
    anchor = torch.zeros((), requires_grad=True)
    delivering: Tensor = _DeliverGradients.apply(  # type: ignore[no-untyped-call]
        loss.detach(), anchor, list(gradients.values()), scale, *gradients
    )
    return delivering
