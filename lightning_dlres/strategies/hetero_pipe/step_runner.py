"""Steps of a run, one after the other: which schedule, what every rank logs, and what the step
returns to Lightning."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from lightning_dlres.core import rng
from lightning_dlres.core.rng import derive_seed
from lightning_dlres.core.wire.tree import Tree, map_tensors, tensors_of
from lightning_dlres.pipeline.execute.digest import digest
from lightning_dlres.pipeline.execute.runtime import Runtime
from lightning_dlres.pipeline.execute.training import TrainingStep, TrainResult
from lightning_dlres.pipeline.plan.schedules.gpipe import GPipe
from lightning_dlres.pipeline.plan.schedules.registry import (
    AUTO,
    initial_schedule,
    schedule_named,
)
from lightning_dlres.pipeline.stage.microbatch import microbatch_sizes, samples_in
from lightning_dlres.strategies.hetero_pipe.checks.loss_check import (
    inexact_schedule_error,
    reason_against_microbatches,
    reason_in_fingerprints,
    reason_in_records,
)
from lightning_dlres.strategies.hetero_pipe.gradient_delivery import (
    with_gradients,
    without_gradients,
)
from lightning_dlres.strategies.hetero_pipe.replay.attribute_changes import unsendable_values
from lightning_dlres.strategies.hetero_pipe.replay.logs import logs_in
from lightning_dlres.strategies.hetero_pipe.step.normalisers import doubt_about_batch
from lightning_dlres.strategies.hetero_pipe.step.parameter_guard import PipelinedWeightGuard
from lightning_dlres.strategies.hetero_pipe.step.user_step import LightningStep, StepContext

_EVALUATION = 1
# After this many batches that only looked wrong, a loss over the whole batch costs less than
# checking each batch.
_MOST_DOUBTS = 3


class StepRunner:
    """Runs training and evaluation steps on one rank.

    Args:
        context: what all steps share.
        runtime: this rank's part of the pipeline.
        schedule: "auto", or the name of a registered schedule.
        seed: base seed of what is random in the layers.
        barrier: Waits for all ranks.
        log_rank_zero: Logs a line on rank 0.
        on_schedule_change: Called with the name of the schedule to which the run changes.
        drops_old_gradients: Returns True if the gradients of the step before may be dropped when a
            step begins; see `gradient_zeroing`.
        follow_freezing: Called before every training step, to follow changes of `requires_grad`.
    """

    def __init__(
        self,
        context: StepContext,
        runtime: Runtime,
        *,
        schedule: str,
        seed: int,
        barrier: Callable[[], None],
        log_rank_zero: Callable[[str], None],
        on_schedule_change: Callable[[str], None],
        drops_old_gradients: Callable[[], bool],
        follow_freezing: Callable[[], None],
    ) -> None:
        self.context, self.runtime, self.seed = context, runtime, seed
        self._barrier, self._log_rank_zero = barrier, log_rank_zero
        self._on_schedule_change = on_schedule_change
        self._drops_old_gradients = drops_old_gradients
        self._follow_freezing = follow_freezing
        self.may_change = schedule == AUTO
        self.schedule = initial_schedule(schedule).name
        self.changing: list[int] = []
        self._steps = 0
        self._not_sent: set[str] = set()
        self._doubts = 0
        self._checked_operations: set[str] = set()
        self._evaluations = 0

    @property
    def loss_by_parts(self) -> bool:
        """Whether the schedule computes the loss per micro-batch, which only a mean allows."""
        return not schedule_named(self.schedule).whole_batch_loss

    def train(self, args: tuple[Any, ...], batch: int, scale: float) -> Tensor | dict[str, Any]:
        """Run one training step and return its loss, whose backward delivers the gradients.

        Args:
            args: arguments of `training_step`; the first is the batch.
            batch: number of the batch since the start of training; part of the random seed.
            scale: factor of the loss in mixed precision.
        """
        self._follow_freezing()
        with self.runtime.tracer.span("step", "step", batch=batch):
            return self._train(args, batch, scale)

    def _train(self, args: tuple[Any, ...], batch: int, scale: float) -> Tensor | dict[str, Any]:
        seed, fingerprint = derive_seed(self.seed, batch), digest(args[0])
        by_parts = self.loss_by_parts and self.runtime.microbatches > 1
        checked = by_parts and self._check_is_due()
        if checked:
            self._check(args, seed, fingerprint)
        self._steps += 1
        if self._drops_old_gradients():
            for parameter in (*self.runtime.stage.parameters, *self.runtime.non_pipelined):
                parameter.grad = None
        # The check may have changed the schedule.
        by_parts = by_parts and self.loss_by_parts
        before = _Before(self, args) if by_parts else None
        step, result = self._run(args, seed, scale, fingerprint)
        if before is not None and len(result.sizes) > 1:
            self._look_at(before, step, result, seed, scale, fingerprint, checked)
            if not self.loss_by_parts:
                step, result = self._run(before.args, seed, scale, fingerprint)
        loss, extra = self._conclude(step, result)
        delivered = with_gradients(loss, result.gradients, scale)
        return {"loss": delivered, **extra} if extra is not None else delivered

    def evaluate(self, hook: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        """Run a validation, test or predict step on all ranks; every call of the pipelined module
        goes through the pipeline."""
        fingerprint = digest(args[0])
        intercepted = self.context.pipelined.intercepted(
            lambda inputs: self.forward(inputs, fingerprint)
        )
        with (
            self.context.precision(),
            PipelinedWeightGuard(self.context.layer_tensors),
            intercepted,
        ):
            return hook(*args)

    def forward(self, inputs: Tree, fingerprint: int | None = None) -> Tree:
        """Run the pipelined module, without recording; called by all ranks.

        Args:
            inputs: what the module is called with, the same on all ranks.
            fingerprint: of the batch; None takes that of the inputs.
        """
        self._evaluations += 1
        seed = derive_seed(self.seed, self._evaluations, _EVALUATION)
        place = "outside of a step" if fingerprint is None else "in an evaluation step"
        fingerprint = digest(inputs) if fingerprint is None else fingerprint
        reason = (
            f"It has called {self.context.pipelined.path!r}, the pipelined module, {place}: the "
            "module must be called on all ranks or on none. Call it without a condition on the "
            "rank."
        )
        with torch.no_grad(), self.runtime.explaining(reason):
            output = self.runtime.forward(inputs, seed, fingerprint, place=place)
        output = map_tensors(lambda t: t.to(self.context.device), output)
        wants_gradients = torch.is_grad_enabled() and not torch.is_inference_mode_enabled()
        if not wants_gradients:
            return output
        given = tensors_of(inputs)
        return map_tensors(lambda t: without_gradients(t, given), output)

    def _run(
        self, args: tuple[Any, ...], seed: int, scale: float, fingerprint: int
    ) -> tuple[LightningStep, TrainResult]:
        runs_twice = self.runtime.is_first and self.runtime.is_last
        step = LightningStep(self.context, args, keeps_batch=runs_twice)
        schedule = schedule_named(self.schedule)
        training = TrainingStep(self.runtime, step, schedule, seed, scale)
        return step, training.run(fingerprint)

    def _look_at(
        self,
        before: _Before,
        step: LightningStep,
        result: TrainResult,
        seed: int,
        scale: float,
        fingerprint: int,
        checked: bool,
    ) -> None:
        """Fall back, with everything as it was before the step, if the batch that was just run by
        parts cannot be. All ranks have the same records, and decide alike."""
        reason = reason_in_records(result.records, logs_in(result.records, self.context.metrics))
        if reason is None and self.may_change:
            reason = reason_in_fingerprints(
                [run for record in result.records for run in record["fingerprints"]]
            )
        doubt = reason or doubt_about_batch(
            result.records, result.sizes, checks_gradients=scale == 1.0
        )
        operations = {kind for record in result.records for kind in record["operations"]}
        is_new = not checked and not operations <= self._checked_operations
        self._checked_operations |= operations
        if doubt is None and not is_new:
            return
        step.restore_metrics()
        with before.again():
            if reason is not None:
                self._fall_back(reason)
            else:
                self._check(before.args, seed, fingerprint)
                self._doubts += doubt is not None
            if self.loss_by_parts and self.may_change and self._doubts >= _MOST_DOUBTS:
                self._fall_back(f"{doubt}, so that every batch would have to be checked")

    def _check_is_due(self) -> bool:
        # A first batch without padding may hide what a later one shows: look again, ever more
        # rarely.
        return self._steps & (self._steps - 1) == 0

    def _check(self, args: tuple[Any, ...], seed: int, fingerprint: int) -> None:
        runtime, context = self.runtime, self.context
        rewind_random_state = rng.held(context.device)
        inputs = (
            LightningStep(context, args, keeps_batch=True, is_trial=True).module_inputs()
            if runtime.is_first
            else None
        )
        saved = [buffer.clone() for buffer in runtime.buffers.tensors()]
        with torch.no_grad():
            output = runtime.forward(inputs, seed, fingerprint, everywhere=False)
            pairs = list(zip(runtime.buffers.tensors(), saved, strict=True))
            changed = [i for i, (now, value) in enumerate(pairs) if not torch.equal(now, value)]
            for now, value in pairs:
                now.copy_(value)
        # Those of several replicas are made alike in every step.
        self.changing = list(range(len(saved))) if len(runtime.plan.replicas) > 1 else changed
        rewind_random_state()
        reason = None
        source = runtime.plan.replicas[0][-1]
        if runtime.rank == source:
            sizes = microbatch_sizes(samples_in(output) or 1, runtime.microbatches)
            reason = (
                reason_against_microbatches(
                    lambda: LightningStep(context, args, keeps_batch=True, is_trial=True),
                    output,
                    sizes,
                    self.may_change,
                )
                if len(sizes) > 1
                else None
            )
        runtime.share_record(reason, [source])
        (reason,) = runtime.gather_records(reason, [source])
        if reason is not None:
            self._fall_back(reason)
        elif self._steps == 0 and self.may_change:
            self._log_rank_zero(
                f"dlres: schedule {self.schedule}: the loss is a mean over samples, so it is "
                "computed per micro-batch."
            )

    def _fall_back(self, reason: str) -> None:
        if not self.may_change:
            # All ranks know the reason before the first one leaves, so that each gives this error.
            self._barrier()
            raise inexact_schedule_error(reason, self.schedule)
        self._log_rank_zero(
            f"dlres: schedule {GPipe.name}, which computes the loss once over the whole batch: "
            f"{reason}."
        )
        self._on_schedule_change(GPipe.name)
        self.schedule = GPipe.name

    def _conclude(
        self, step: LightningStep, result: TrainResult
    ) -> tuple[Tensor, dict[str, Any] | None]:
        """Apply the step's side effects to this rank; return the loss and the step's other
        outputs."""
        loss = step.apply(result.records, result.sizes if self.loss_by_parts else None)
        self._say_what_is_not_sent(result.records[0])
        return loss, result.records[0]["extra"]

    def _say_what_is_not_sent(self, record: Tree) -> None:
        for path, kind in unsendable_values(record["attributes"]).items():
            if path not in self._not_sent:
                self._not_sent.add(path)
                self._log_rank_zero(
                    f"dlres: training_step makes self.{path} a {kind}, which cannot be sent to "
                    "other ranks: it is on the last stage only."
                )


class _Before:
    """What a step by parts changes before its loss is known, as it was before the step.

    Attributes:
        args: arguments of `training_step`, with a copy of the batch where user code runs.
    """

    def __init__(self, runner: StepRunner, args: tuple[Any, ...]) -> None:
        runtime = runner.runtime
        runs_user_code = runtime.is_first or runtime.is_last
        batch = map_tensors(Tensor.clone, args[0]) if runs_user_code else args[0]
        self.args = (batch, *args[1:])
        self._runner = runner
        self._buffers = [buffer.clone() for buffer in self._changing()]
        self._rewind_random_state = rng.held(runner.context.device)

    @contextmanager
    def again(self) -> Iterator[None]:
        """Context manager that puts everything back; it stays so if the schedule changes inside."""
        device = self._runner.context.device
        after, redo_random_state = [b.clone() for b in self._changing()], rng.held(device)
        self._put(self._buffers)
        self._rewind_random_state()
        yield
        if self._runner.loss_by_parts:
            self._put(after)
            redo_random_state()

    def _put(self, values: Sequence[Tensor]) -> None:
        with torch.no_grad():
            for buffer, value in zip(self._changing(), values, strict=True):
                buffer.copy_(value)

    def _changing(self) -> list[Tensor]:
        if not self._runner.changing:
            return []
        tensors = self._runner.runtime.buffers.tensors()
        return [tensors[index] for index in self._runner.changing]
