"""One training step of an unchanged LightningModule, run in two places.

The first stage runs `training_step` up to the call of the pipelined module. This gives the
module's inputs. The last stage runs `training_step` from its start to the loss; there the call
returns the pipeline's output. Every run is isolated: it leaves nothing on the rank. The last stage
collects the run's side effects (changes, logs and printed text), and every rank applies them once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import Tensor

from lightning_dlres.core import rng
from lightning_dlres.core.errors import UnsupportedStepError
from lightning_dlres.core.wire.nested import tensors_in
from lightning_dlres.core.wire.tree import Tree, map_tensors, tensors_of
from lightning_dlres.pipeline.capture.crossing import Returned
from lightning_dlres.pipeline.execute.layer_settings import SettingsSnapshot
from lightning_dlres.pipeline.execute.runtime import SKIPPED
from lightning_dlres.pipeline.stage.microbatch import cut_batch
from lightning_dlres.strategies.hetero_pipe.replay.logs import LogRecord
from lightning_dlres.strategies.hetero_pipe.replay.step_effects import IsolatedRun, StepEffects
from lightning_dlres.strategies.hetero_pipe.step.normalisers import NormaliserRecorder
from lightning_dlres.strategies.hetero_pipe.step.parameter_guard import (
    LayerTensorGuard,
    PipelinedWeightGuard,
    graph_leaves,
    layer_weight_error,
)
from lightning_dlres.strategies.hetero_pipe.step.pipelined_module import LocalLayers
from lightning_dlres.strategies.hetero_pipe.step.single_device_view import single_device_view
from lightning_dlres.strategies.hetero_pipe.step.step_context import StepContext

Guard = TypeVar("Guard", bound=PipelinedWeightGuard)


@dataclass
class LightningStep:
    """One training step on this rank, as a `pipeline.execute.training.UserStep`.

    Every rank makes one instance for every step. The order is:

    1. The first stage of every replica calls `module_inputs` once. The run is undone. If the step
       returns None before the module's call, it skips the batch: the last stage of the first
       replica alone runs the step once more, for its side effects.
    2. The last stage of every replica calls `finish`: once for the whole batch, or once for each
       micro-batch of the replica. Every run starts from the same state, is undone, and has its
       side effects collected. A replica without a micro-batch does not run the step.
    3. These last stages call `record`. All ranks get the same records. After a run on the whole
       batch this is the first replica's record only. After runs on micro-batches it is one record
       from each replica that ran the step.
    4. Every rank calls `apply` once, those that ran the step included.

    Attributes:
        context: Objects that all steps share.
        args: Arguments of `training_step`; the first is the batch.
        keeps_batch: Whether every run gets a copy of the batch, so that further runs on the batch
            see no change that user code makes in place.
        is_trial: Whether only the loss is needed, as in checks and profiling. A trial shows no
            messages of `logging`, and does not refuse changes of the layers' settings.
        effects: What the runs of the step changed, logged and printed.
        losses: Loss of every run; 0 for a run that returned None.
        skipped: For every run, True if it returned None.
        extra: Values beside the loss in the dict that the step returned; None without a dict, and
            after a run on one of several micro-batches.
        normalisers: For every run on a micro-batch, the values that normalise its loss.
        operations: For every run on a micro-batch, the operations that compute its loss, as text.
        finite: For every gradient of a tensor in a micro-batch's output, a boolean scalar tensor:
            True if all of the gradient is finite.
    """

    context: StepContext
    args: tuple[Any, ...]
    keeps_batch: bool = False
    is_trial: bool = False
    losses: list[Tensor] = field(default_factory=list)
    skipped: list[bool] = field(default_factory=list)
    extra: dict[str, Any] | None = None
    normalisers: list[list[float]] = field(default_factory=list)
    operations: list[str] = field(default_factory=list)
    finite: list[Tensor] = field(default_factory=list)

    def __post_init__(self) -> None:
        context = self.context
        error = context.settings.replaced_weight()
        if error is not None:
            raise UnsupportedStepError(error)
        context.begin_step(self.args)
        self._rewind_random_state = context.rewind_random_state
        # New metrics must be known before the effects take a snapshot of all.
        context.register_metrics()
        layers = context.pipelined.layers
        self.effects = StepEffects(
            context.module, layers, context.state, context.metrics, context.device
        )
        self._parts: Sequence[Any] | None = None

    def before_gradient_access(self, call: Callable[[], None] | None) -> None:
        """Call a function before `training_step` reads or replaces a `.grad`; None ends this."""
        self.context.gradients.give_back = call

    def module_inputs(self) -> Tree:
        """Run the step up to the call of the module and return this call's inputs, as one tree.

        The result is `SKIPPED` if the step returns None without a call.

        Raises:
            UnsupportedStepError: If the step does not call the module, uses a layer's weight before
                the call, or changes a setting of a layer.
        """
        pipelined, step = self.context.pipelined, self.context.module.training_step
        layer_tensors = self.context.layer_tensors
        with self.effects.undone(layer_tensors) as run, self._layer_settings_restored() as before:
            with self._user_code(self._guard(PipelinedWeightGuard)):
                check = self._check_at_call(before, run)
                inputs = pipelined.inputs_of(step, self._batch_args(), check)
        if isinstance(inputs, Returned):
            return SKIPPED
        self._refuse_gradients_past_pipeline(tensors_of(inputs))
        return inputs

    def finish(self, output: Tree, microbatch: int | None, sizes: Sequence[int]) -> Tensor | None:
        """Run the step with `output` as the result of the module's call and return the loss.

        The result is None if the step returns None.

        Args:
            output: Output of the last layer, for the batch or a micro-batch; None if the step skips
                the batch before the call.
            microbatch: Index of the micro-batch; None for the whole batch.
            sizes: Samples of every micro-batch; empty if the step skips the batch before the call.

        Raises:
            UnsupportedStepError: If the step does not call the module exactly once, makes an
                operation that the guard refuses, changes a setting of a layer, or returns no loss;
                or if `split_batch` returns a wrong number of parts.
        """
        context = self.context
        # Every run starts with the random state that the step's only run has in plain training.
        self._rewind_random_state()
        is_first_run = not self.losses
        if microbatch is None:
            args = self._batch_args()
            guard = self._guard(PipelinedWeightGuard)
        else:
            args = self._microbatch_args(microbatch, sizes)
            guard = self._guard(NormaliserRecorder)
            self._watch_gradients(output)
            if is_first_run:
                # From here on the metrics collect the states of this step's micro-batches only.
                context.metrics.reset()
        shows_logging = is_first_run and not self.is_trial
        with self.effects.isolated(context.layer_tensors, shows_logging=shows_logging) as run:
            with (
                # In a real step the first run is enough to notice a change of settings. A trial
                # goes on after a change, so it undoes the changes of every run.
                self._layer_settings_restored() if self.is_trial or is_first_run else nullcontext(),
                # Within it the guard sees every read of a parameter.
                self._user_code(guard),
            ):
                result = context.pipelined.finish(
                    context.module.training_step, args, output, guard.record_call
                )
            self.effects.collect(run)
        loss = self._loss_of(result, is_whole=len(sizes) == 1 or microbatch is None)
        self._refuse_gradients_past_pipeline([] if loss is None else [loss])
        if isinstance(guard, NormaliserRecorder):
            self.normalisers.append(guard.values())
            self.operations.append(guard.operations())
        self.skipped.append(loss is None)
        no_loss = torch.zeros((), device=context.device)
        self.losses.append(no_loss if loss is None else loss.detach())
        return loss

    def record(self) -> Tree:
        """Return the record of the step, as plain data for all ranks; called after the last run.

        It holds the losses, the side effects, and the signs that the loss is no mean over samples.
        """
        return {
            "losses": torch.stack(self.losses),
            "skipped": self.skipped,
            **self.effects.to_tree(by_parts=self._parts is not None),
            "extra": self.extra,
            "normalisers": self.normalisers,
            "operations": self.operations,
            "finite": [bool(flag) for flag in self.finite],
        }

    def apply(self, records: Sequence[Tree], part_sizes: Sequence[int] | None) -> Tensor | None:
        """Apply the step's side effects to this rank, and return the loss of the batch.

        The result is None if the step returned None.

        Args:
            records: Results of `record`, the same on all ranks.
            part_sizes: Samples of every micro-batch, if the step ran per micro-batch; None after a
                run on the whole batch.
        """
        # `self.log` makes tensors of numbers, in the precision plugin's default dtype.
        with self.context.precision():
            self.effects.apply(records, part_sizes)
        if any(flag for record in records for flag in record["skipped"]):
            return None
        losses = torch.cat([record["losses"].to(self.context.device) for record in records])
        if part_sizes is None:
            return losses[0]
        sizes = torch.tensor(part_sizes, dtype=losses.dtype, device=losses.device)
        return (losses * (sizes / sum(part_sizes))).sum()

    @contextmanager
    def undone(self) -> Iterator[None]:
        """Context manager that undoes all that user code changes, logs and prints inside it."""
        with self.effects.undone(self.context.layer_tensors):
            yield

    def restore_metrics(self) -> None:
        """Put the metrics back to their state before the step."""
        self.effects.restore_metrics()

    def run_whole(
        self, guard: LayerTensorGuard, layers: LocalLayers
    ) -> tuple[Tensor, list[LogRecord]]:
        """Run the whole step on this rank; return the loss and the calls of `self.log`.

        Metrics keep what the step added to them.

        Args:
            guard: Guard that records the tensors that layers make.
            layers: Runs the layers.

        Raises:
            UnsupportedStepError: If the step does not call the module exactly once, makes an
                operation that the guard refuses, or returns no loss.
        """
        context = self.context
        with self.effects.isolated(context.layer_tensors, guard.layer_tensors) as run:
            with self._user_code(guard):
                result = context.pipelined.run_locally(
                    context.module.training_step, self._batch_args(), layers, guard.record_call
                )
        loss = self._loss_of(result, is_whole=True)
        if loss is None:
            raise UnsupportedStepError("training_step returned None, which shows no loss")
        return loss, run.logs

    def _check_at_call(self, before: SettingsSnapshot, run: IsolatedRun) -> Callable[[], None]:
        """Return a check, made when the step calls the module, that nothing has changed before that
        the module reads.

        The step may put a change back after the call, but other ranks run the layers without it.

        Args:
            before: The settings at the start of the step.
            run: The run of the step.
        """
        settings, state = self.context.settings, self.context.state_of_call()
        if self.is_trial or state is None:
            return lambda: None
        behaviour, others = settings.behaviour(), state.begin()

        def check() -> None:
            error = settings.change_before_call(before, behaviour)
            error = error or state.change(others, self.effects, run)
            if error is not None:
                raise UnsupportedStepError(error)

        return check

    @contextmanager
    def _layer_settings_restored(self) -> Iterator[SettingsSnapshot]:
        """Context manager that undoes changes of the layers' settings, and refuses them, and
        those of hooks and forwards.

        It yields the settings.

        In a real step all ranks take part, and all of them get the error. A trial does not refuse:
        it may run on one rank only, and its error would leave the others waiting.
        """
        settings = self.context.settings
        before, code = settings.snapshot(), settings.code()
        try:
            yield before
        finally:
            error = settings.restore(before) or settings.change_of_code(code)
        if error is not None and not self.is_trial:
            raise UnsupportedStepError(error)

    def _guard(self, kind: type[Guard]) -> Guard:
        context = self.context
        return kind(context.layer_tensors, context.module, context.gradients)

    @contextmanager
    def _user_code(self, guard: PipelinedWeightGuard) -> Iterator[None]:
        """Context manager in which `training_step` runs: with the precision plugin's context, the
        single-device view and a guard."""
        with self.context.precision(), single_device_view("training_step"), guard:
            yield

    def _watch_gradients(self, output: Tree) -> None:
        # The hooks refer to the list only: a reference to this step would keep the step alive. They
        # do not read the flags, since that would wait for the device.
        finite = self.finite

        def record_finite(gradient: Tensor) -> None:
            finite.append(gradient.isfinite().all())

        for tensor in tensors_of(output):
            if tensor.requires_grad:
                tensor.register_hook(record_finite)

    def _refuse_gradients_past_pipeline(self, results: Sequence[Tensor]) -> None:
        """Check that no gradient reaches a layer's parameter without passing the pipeline: it would
        be lost.

        Args:
            results: Loss, or inputs of the pipelined module.

        Raises:
            UnsupportedStepError: If a gradient does.
        """
        layer_parameters = self.context.pipelined.layers.layer_only_parameters
        for leaf in graph_leaves(results):
            if leaf in layer_parameters:
                raise layer_weight_error("its gradient", leaf, self.context.module)

    def _batch_args(self) -> tuple[Any, ...]:
        """Return the arguments for a run on the whole batch."""
        if not self.keeps_batch:
            return self.args
        return (map_tensors(Tensor.clone, self.args[0]), *self.args[1:])

    def _microbatch_args(self, microbatch: int, sizes: Sequence[int]) -> tuple[Any, ...]:
        """Return the arguments for a run on a micro-batch. The batch is cut once per step."""
        if self._parts is None:
            split = self.context.split_batch or cut_batch
            self._parts = list(split(self._batch_args()[0], sizes))
            if len(self._parts) != len(sizes):
                raise UnsupportedStepError(
                    f"split_batch must return one part per micro-batch ({len(sizes)}), got "
                    f"{len(self._parts)}. Return a list with one part for each entry of sizes."
                )
        return (self._parts[microbatch], *self.args[1:])

    def _loss_of(self, result: Any, is_whole: bool) -> Tensor | None:
        """Return the loss in a result of `training_step`, as a tensor without dimensions.

        None, which skips the batch, stays None.

        A run on the whole batch also sets `extra`.

        Raises:
            UnsupportedStepError: If the result has no loss, or one with several elements.
        """
        if result is None:
            return None
        loss = result.get("loss") if isinstance(result, Mapping) else result
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            got = type(result).__name__
            if isinstance(loss, Tensor):
                got = f"a tensor of shape {tuple(loss.shape)}"
            raise UnsupportedStepError(
                "training_step must return a scalar tensor, or a dict with one under 'loss', got "
                f"{got}. Return a scalar loss, or None to skip the batch."
            )
        if is_whole and isinstance(result, Mapping):
            extra = {key: value for key, value in result.items() if key != "loss"}
            self.extra = map_tensors(lambda t: t.detach().clone(), extra)
        return loss.reshape(())


@contextmanager
def opened_between_layers(context: StepContext) -> Iterator[Callable[..., Any]]:
    """Context manager in which `training_step` runs so that it leaves nothing behind.

    The random state is that from the start of the step.

    Yields:
        Function that returns the step's result, and the tensors that it logs.
    """
    rewind_later = rng.rewinder(context.device)
    effects = StepEffects(
        context.module, context.pipelined.layers, context.state, context.metrics, context.device
    )
    context.rewind_random_state()
    try:
        with (
            context.metrics.isolated(),
            effects.isolated(context.layer_tensors) as run,
            context.precision(),
            single_device_view("training_step"),
            PipelinedWeightGuard(context.layer_tensors, context.module, context.gradients),
        ):

            def code(batch: Any, *others: Any) -> list[Any]:
                # The code may decide by the number of the batch.
                now = context.step_arguments[1:]
                result = context.module.training_step(batch, *(now or others))
                logged = [log.value for log in run.logs if isinstance(log.value, Tensor)]
                return [result, logged, [*tensors_in([vars(call) for call in run.logger_calls])]]

            yield code
    finally:
        rewind_later()
