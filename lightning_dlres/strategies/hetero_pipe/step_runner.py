"""Runner of the steps on one rank.

It chooses the schedule, replays logs on every rank, and returns each step's loss to Lightning.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor

from lightning_dlres.core import rng
from lightning_dlres.core.rng import derive_seed
from lightning_dlres.core.wire.tree import Tree, map_tensors, tensors_of
from lightning_dlres.pipeline.execute.digest import digest
from lightning_dlres.pipeline.execute.runtime import SKIPPED, Runtime
from lightning_dlres.pipeline.execute.training import TrainingStep, TrainResult, with_gradients
from lightning_dlres.pipeline.plan.schedules.gpipe import GPipe
from lightning_dlres.pipeline.plan.schedules.registry import schedule_named
from lightning_dlres.pipeline.stage.microbatch import is_unjoined, microbatch_sizes, samples_in
from lightning_dlres.strategies.hetero_pipe.checks.loss_check import (
    inexact_schedule_error,
    reason_against_microbatches,
    reason_in_fingerprints,
    reason_in_records,
)
from lightning_dlres.strategies.hetero_pipe.evaluation.evaluator import Evaluator
from lightning_dlres.strategies.hetero_pipe.replay.layer_calls import LayerCalls
from lightning_dlres.strategies.hetero_pipe.replay.logs import logs_in
from lightning_dlres.strategies.hetero_pipe.replay.user_state.attribute_changes import (
    unsendable_values,
)
from lightning_dlres.strategies.hetero_pipe.step.normalisers import doubt_about_batch
from lightning_dlres.strategies.hetero_pipe.step.output_without_gradient import (
    raising_in_backward,
)
from lightning_dlres.strategies.hetero_pipe.step.step_context import StepContext
from lightning_dlres.strategies.hetero_pipe.step.user_step import LightningStep

# Result of `training_step` as Lightning takes it.
StepOutput = Tensor | dict[str, Any] | None
# Part of the seed of forward calls outside of training steps. Without it, such a call would draw
# the same random numbers as a training step.
_FORWARD_SEED_PART = 1
# A false alarm is a check that finds the loss exact, after a doubt. After this number of false
# alarms the run changes to a loss over the whole batch, which costs less than checking each batch.
_MAX_FALSE_ALARMS = 3
# Steps after which the loss is checked at the latest. A check runs the layers forward once more.
_MOST_STEPS_BETWEEN_CHECKS = 100


class StepRunner:
    """Runner of training and evaluation steps on one rank.

    All ranks call its methods in the same order. Each last stage sends a record of its step (side
    effects, losses) to all ranks. All ranks decide from the same records, so that they change the
    schedule, or raise, in the same step.

    Args:
        context: Context of the user's steps.
        runtime: This rank's part of the pipeline.
        evaluator: Runs steps and calls outside of training.
        schedule: Name of the schedule with which the run begins.
        may_change_schedule: Whether GPipe may replace it where the loss requires that.
        seed: Base seed of the layers' random numbers.
        barrier: Waits for all ranks.
        log_rank_zero: Logs a line on rank 0.
        on_schedule_change: Called with the name of the schedule to which the run changes.
        update_trainable: Called before every training step; adapts the runtime to changes of
            `requires_grad`.
    """

    def __init__(
        self,
        context: StepContext,
        runtime: Runtime,
        evaluator: Evaluator,
        *,
        schedule: str,
        may_change_schedule: bool,
        seed: int,
        barrier: Callable[[], None],
        log_rank_zero: Callable[[str], None],
        on_schedule_change: Callable[[str], None],
        update_trainable: Callable[[], None],
    ) -> None:
        self.context, self.runtime, self.seed = context, runtime, seed
        self.evaluator = evaluator
        self._barrier, self._log_rank_zero = barrier, log_rank_zero
        self._on_schedule_change = on_schedule_change
        self._update_trainable = update_trainable
        self.schedule, self.may_change_schedule = schedule, may_change_schedule
        # Indices of the runtime's buffers that the forward changed in the last check.
        self.changing_buffers: list[int] = []
        self._num_steps, self._last_due_check = 0, 0
        # Attributes that cannot be sent to other ranks. A message for each is logged only once.
        self._reported_attributes: set[str] = set()
        self._false_alarms = 0
        self._checked_operations: set[str] = set()
        self._num_forwards = 0
        self._layer_calls = LayerCalls(
            context.module, context.pipelined.layers, context.metrics, context.device
        )

    @property
    def loss_per_microbatch(self) -> bool:
        """True if the schedule computes the loss per micro-batch.

        This is exact only for a loss that is a mean over samples.
        """
        return not schedule_named(self.schedule).whole_batch_loss

    def train(self, args: tuple[Any, ...], batch: int, scale: float) -> StepOutput:
        """Run one training step and return its loss, whose backward delivers the gradients.

        The result is None if the step returns None, to skip the batch.

        Args:
            args: Arguments of `training_step`; the first is the batch.
            batch: Index of the batch since the start of training; part of the random seed.
            scale: Factor by which the gradient scaler multiplies the loss; 1.0 without a scaler.
        """
        self.evaluator.whole.release()
        self._update_trainable()
        with self.runtime.tracer.span("step", "step", batch=batch):
            return self._train(args, batch, scale)

    def _train(self, args: tuple[Any, ...], batch: int, scale: float) -> StepOutput:
        seed, fingerprint = derive_seed(self.seed, batch), digest(args[0])
        # The check of the loss makes no `LightningStep` on some ranks.
        self.context.begin_step(args)
        per_microbatch = self.loss_per_microbatch and self.runtime.microbatches > 1
        checked = per_microbatch and self._check_is_due()
        if checked:
            self._check(args, seed, fingerprint, unchecked=self._num_steps - self._last_due_check)
            self._last_due_check = self._num_steps
        parameters = (*self.runtime.stage.parameters, *self.runtime.non_pipelined)
        self.context.gradients.begin_step(parameters)
        # The check may have changed the schedule.
        per_microbatch = per_microbatch and self.loss_per_microbatch
        before = _StateBeforeStep(self, args) if per_microbatch else None
        step, result = self._run(args, seed, scale, fingerprint)
        # A step that skips its batch has shown nothing of the loss: check the next one.
        self._num_steps += bool(result.sizes)
        if before is not None and len(result.sizes) > 1:
            self._check_finished_step(
                before,
                step,
                result,
                seed=seed,
                scale=scale,
                fingerprint=fingerprint,
                checked=checked,
            )
            if not self.loss_per_microbatch:
                self.runtime.sync.undo_step()
                step, result = self._run(before.args, seed, scale, fingerprint)
        loss, extra = self._apply_effects(step, result)
        if loss is None:
            if result.sizes:
                # The residuals of compression that went into the unused gradients are sent again.
                self.runtime.sync.undo_step()
            return None
        delivered = with_gradients(loss, result.gradients, scale)
        return {"loss": delivered, **extra} if extra is not None else delivered

    def evaluate(self, hook: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        """Run a validation, test or predict step; called by all ranks.

        Every call of the pipelined module goes through the pipeline.

        Args:
            hook: Bound method of the LightningModule, such as `validation_step`.
            args: Arguments of the hook; the first is the batch.
        """
        return self.evaluator.run(hook, args, self.forward, digest(args[0]))

    def answer(self, inputs: Tree, layer: int | None = None) -> Tree:
        """Answer a call of the pipelined module outside of steps; called by all ranks."""
        return self.evaluator.answer(inputs, layer, forward=self.forward)

    def forward(
        self, inputs: Tree, layer: int | None = None, fingerprint: int | None = None
    ) -> Tree:
        """Run the pipelined module forward, without autograd; called by all ranks.

        Args:
            inputs: Inputs of the module, the same on all ranks.
            layer: Layer that runs alone, if the training step is pipelined, on the inputs of its
                call; None for all layers.
            fingerprint: Digest of the batch, compared between ranks; None takes that of the inputs.
        """
        self._num_forwards += 1
        seed = derive_seed(self.seed, self._num_forwards, _FORWARD_SEED_PART)
        place = "outside of a step" if fingerprint is None else "in an evaluation step"
        fingerprint = digest(inputs) if fingerprint is None else fingerprint
        reason = (
            f"It has called the pipelined module {self.context.pipelined.path!r} {place}. The "
            "module must be called on all ranks or on none. Call it without a condition on the "
            "rank."
        )
        with torch.no_grad(), self.runtime.explaining(reason):
            if layer is None:
                output = self.runtime.forward(inputs, seed, fingerprint, place=place)
                output = map_tensors(lambda t: t.to(self.context.device), output)
            else:
                call = partial(self.context.pipelined.call, layer, inputs)
                run = partial(self._layer_calls.run, layer, inputs, call)
                self._layer_calls.begin(layer)
                result = self.runtime.compute_layer(layer, run, fingerprint, place=place)
                output = self._layer_calls.finish(inputs, result)
        output = self.context.pipelined.output(output)
        requires_gradients = torch.is_grad_enabled() and not torch.is_inference_mode_enabled()
        if not requires_gradients:
            return output
        input_tensors = tensors_of(inputs)
        return map_tensors(lambda t: raising_in_backward(t, input_tensors), output)

    def _run(
        self, args: tuple[Any, ...], seed: int, scale: float, fingerprint: int
    ) -> tuple[LightningStep, TrainResult]:
        runs_twice = self.runtime.is_first and self.runtime.is_last
        step = LightningStep(self.context, args, keeps_batch=runs_twice)
        schedule = schedule_named(self.schedule)
        training = TrainingStep(self.runtime, step, schedule, seed, scale)
        return step, training.run(fingerprint)

    def _check_finished_step(
        self,
        before: _StateBeforeStep,
        step: LightningStep,
        result: TrainResult,
        *,
        seed: int,
        scale: float,
        fingerprint: int,
        checked: bool,
    ) -> None:
        """Check the loss, or fall back to GPipe, if the records suggest an inexact loss.

        A reason in the records proves that the step must run once per batch, so the run falls back
        at once. A doubt calls for a check. Both need the state from before the step. After a
        fallback it stays restored, since the step runs again.

        Args:
            before: State before the step.
            step: The user's step.
            result: Result of the step, with the records of all replicas.
            seed: Seed of the step.
            scale: Factor by which the gradient scaler multiplies the loss; 1.0 without a scaler.
            fingerprint: Digest of the batch.
            checked: True if the loss was already checked on this batch.
        """
        reason = reason_in_records(result.records, logs_in(result.records, self.context.metrics))
        if reason is None and self.may_change_schedule:
            reason = reason_in_fingerprints(
                [run for record in result.records for run in record["fingerprints"]]
            )
        doubt = reason or doubt_about_batch(
            result.records, result.sizes, checks_gradients=scale == 1.0
        )
        # An operation that no checked step has used may make the loss inexact.
        operations = {kind for record in result.records for kind in record["operations"]}
        has_unchecked_operations = not checked and not operations <= self._checked_operations
        self._checked_operations |= operations
        if doubt is None and not has_unchecked_operations:
            return
        step.restore_metrics()
        with before.restored():
            if reason is not None:
                self._fall_back(reason)
            else:
                self._check(before.args, seed, fingerprint)
                self._false_alarms += doubt is not None
            if (
                self.loss_per_microbatch
                and self.may_change_schedule
                and self._false_alarms >= _MAX_FALSE_ALARMS
            ):
                self._fall_back(f"{doubt}, and this would need a check of every batch")

    def _check_is_due(self) -> bool:
        # Due before steps 0, 1, 2, 4, 8, ..., 64, 100, 128, 200. One check is not enough: a first
        # batch without padding may hide a difference that a later batch shows.
        steps = self._num_steps
        return steps & (steps - 1) == 0 or steps % _MOST_STEPS_BETWEEN_CHECKS == 0

    def _check(
        self, args: tuple[Any, ...], seed: int, fingerprint: int, unchecked: int = 0
    ) -> None:
        """Compute the loss of the batch both whole and per micro-batch; fall back if they differ.

        Buffers and the random state are restored. The first replica's last stage compares, and
        sends the result to all ranks, so that all decide the same.
        """
        runtime, context = self.runtime, self.context
        rewind_random_state = rng.rewinder(context.device)
        inputs = (
            LightningStep(context, args, keeps_batch=True, is_trial=True).module_inputs()
            if runtime.is_first
            else None
        )
        saved = [buffer.clone() for buffer in runtime.buffers.tensors()]
        with torch.no_grad():
            with context.precision():
                output = runtime.forward(inputs, seed, fingerprint, everywhere=False)
            if output is SKIPPED:
                rewind_random_state()
                return
            pairs = list(zip(runtime.buffers.tensors(), saved, strict=True))
            changed = [i for i, (buffer, old) in enumerate(pairs) if not torch.equal(buffer, old)]
            for buffer, old in pairs:
                buffer.copy_(old)
        # With several replicas, any buffer may change in a step: at its end the first replica's
        # buffers are copied to the others.
        self.changing_buffers = (
            list(range(len(saved))) if len(runtime.plan.replicas) > 1 else changed
        )
        rewind_random_state()
        reason = None
        source = runtime.plan.replicas[0][-1]
        if runtime.rank == source and is_unjoined(output):
            reason = (
                "what the code after the last layer takes cannot be joined to a batch, so the loss "
                "of the batch is not known"
            )
        elif runtime.rank == source:
            sizes = microbatch_sizes(samples_in(output) or 1, runtime.microbatches)
            reason = (
                reason_against_microbatches(
                    lambda: LightningStep(context, args, keeps_batch=True, is_trial=True),
                    output,
                    sizes,
                    self.may_change_schedule,
                )
                if len(sizes) > 1
                else None
            )
        runtime.share_record(reason, [source])
        (reason,) = runtime.gather_records(reason, [source])
        if reason is not None:
            since = f"; so it may have been since the last check, {unchecked} steps ago"
            self._fall_back(reason + since * (unchecked > 1))
        elif self._num_steps == 0 and self.may_change_schedule:
            self._log_rank_zero(
                f"dlres: schedule {self.schedule}: the loss is a mean over samples, so it is "
                "computed per micro-batch."
            )

    def _fall_back(self, reason: str) -> None:
        """Change the schedule to GPipe.

        Raises:
            UnsupportedStepError: If the user chose the schedule, so that it must not change.
        """
        if not self.may_change_schedule:
            # Wait until all ranks know the reason. Otherwise the first rank that raises would be
            # reported as a lost peer by the others.
            self._barrier()
            raise inexact_schedule_error(reason, self.schedule)
        self._log_rank_zero(
            f"dlres: schedule {GPipe.name} replaces {self.schedule}, so that the loss is computed "
            f"once over the whole batch: {reason}."
        )
        self._on_schedule_change(GPipe.name)
        self.schedule = GPipe.name

    def _apply_effects(
        self, step: LightningStep, result: TrainResult
    ) -> tuple[Tensor | None, dict[str, Any] | None]:
        """Apply the step's side effects to this rank; return the loss and the step's other
        outputs."""
        per_microbatch = self.loss_per_microbatch and bool(result.sizes)
        loss = step.apply(result.records, result.sizes if per_microbatch else None)
        self._log_unsendable_values(result.records[0])
        return loss, result.records[0]["extra"]

    def _log_unsendable_values(self, record: Tree) -> None:
        for path, kind in unsendable_values(record["attributes"]).items():
            if path not in self._reported_attributes:
                self._reported_attributes.add(path)
                self._log_rank_zero(
                    f"dlres: training_step sets self.{path} to a {kind}, which cannot be sent to "
                    "other ranks: only the last stage has it."
                )


class _StateBeforeStep:
    """State from before a step with a loss per micro-batch, for a check or a rerun of the step.

    It holds the batch, the layers' buffers and the random state. The step changes these before its
    records are known.

    Args:
        runner: Runner of the step.
        args: Arguments of `training_step`; the first is the batch.

    Attributes:
        args: The arguments, with a copy of the batch on ranks that run user code, which may change
            the batch in place.
    """

    def __init__(self, runner: StepRunner, args: tuple[Any, ...]) -> None:
        runtime = runner.runtime
        runs_user_code = runtime.is_first or runtime.is_last
        batch = map_tensors(Tensor.clone, args[0]) if runs_user_code else args[0]
        self.args = (batch, *args[1:])
        self._runner = runner
        self._saved_buffers = [buffer.clone() for buffer in self._changing_buffers()]
        self._rewind_random_state = rng.rewinder(runner.context.device)

    @contextmanager
    def restored(self) -> Iterator[None]:
        """Context manager that restores the state from before the step.

        At its end the state from after the step is set again. If the schedule has changed to a loss
        over the whole batch, it is not, because the step runs again.
        """
        device = self._runner.context.device
        buffers_after_step = [buffer.clone() for buffer in self._changing_buffers()]
        set_random_state_after_step = rng.rewinder(device)
        self._set_buffers(self._saved_buffers)
        self._rewind_random_state()
        yield
        if self._runner.loss_per_microbatch:
            self._set_buffers(buffers_after_step)
            set_random_state_after_step()

    def _set_buffers(self, values: Sequence[Tensor]) -> None:
        with torch.no_grad():
            for buffer, value in zip(self._changing_buffers(), values, strict=True):
                buffer.copy_(value)

    def _changing_buffers(self) -> list[Tensor]:
        if not self._runner.changing_buffers:
            return []
        tensors = self._runner.runtime.buffers.tensors()
        return [tensors[index] for index in self._runner.changing_buffers]
