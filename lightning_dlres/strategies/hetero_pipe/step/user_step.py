"""One training step of an unchanged LightningModule, run in two places: up to the module's call,
and from the call on."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor
from torchmetrics import Metric

from lightning_dlres.core import rng
from lightning_dlres.core.errors import UnsupportedStepError
from lightning_dlres.core.wire.tree import Tree, map_tensors, tensors_of
from lightning_dlres.pipeline.execute.digest import digest
from lightning_dlres.pipeline.execute.layer_settings import LayerSettings
from lightning_dlres.pipeline.execute.layer_tensors import LayerTensors
from lightning_dlres.pipeline.stage.microbatch import cut_batch
from lightning_dlres.strategies.hetero_pipe.replay.attributes import (
    Loan,
    UserState,
    changed_lists,
    fingerprints,
    is_data,
    not_sent,
)
from lightning_dlres.strategies.hetero_pipe.replay.buffers import NonPipelinedBuffers
from lightning_dlres.strategies.hetero_pipe.replay.loggers import LoggerCall, recording_loggers
from lightning_dlres.strategies.hetero_pipe.replay.logs import LogRecord, recording
from lightning_dlres.strategies.hetero_pipe.replay.metrics import MetricStates
from lightning_dlres.strategies.hetero_pipe.replay.outside_state import OutsideState
from lightning_dlres.strategies.hetero_pipe.replay.printing import PRINTED, printing_held
from lightning_dlres.strategies.hetero_pipe.replay.trainer_settings import settings_of
from lightning_dlres.strategies.hetero_pipe.step.normalisers import NormaliserRecorder
from lightning_dlres.strategies.hetero_pipe.step.one_device import alone
from lightning_dlres.strategies.hetero_pipe.step.parameter_guard import (
    LayerTensorGuard,
    PipelinedWeightGuard,
    leaves_of,
    weight_of_a_layer,
)
from lightning_dlres.strategies.hetero_pipe.step.pipelined_module import PipelinedModule

SplitBatch = Callable[[Any, Sequence[int]], Sequence[Any]]


class _StopAtCall(BaseException):
    """Ends the first stage's step where the pipelined module is called. Not an Exception: user code
    must not catch it."""

    def __init__(self, inputs: Tree) -> None:
        self.inputs = inputs


@dataclass
class StepContext:
    """What all steps of a run share.

    Attributes:
        module: the LightningModule.
        pipelined: the module that is cut into stages.
        metrics: its metrics.
        device: where this rank computes.
        precision: returns the context that the step runs in.
        split_batch: the user's way to cut a batch into parts of given sizes; None for the built-in
            one.
        leftovers: tensors that layers made before training, and that user code still has.
    """

    module: LightningModule
    pipelined: PipelinedModule
    metrics: MetricStates
    device: torch.device
    precision: Callable[[], AbstractContextManager[Any]]
    split_batch: SplitBatch | None = None
    leftovers: LayerTensors = field(default_factory=LayerTensors)

    def __post_init__(self) -> None:
        layers = self.pipelined.layers
        trainer = self.module.trainer
        self.settings = LayerSettings(self.module, layers.modules)
        self.state = UserState(
            layers.non_pipelined_modules,
            layers.modules,
            trainer.callbacks,  # type: ignore[attr-defined]
            lambda: settings_of(trainer),
        )

    def outside_state(self) -> OutsideState:
        """Return the state that a step may reach and that is not taken back, as it is now."""
        module, layers = self.module, self.pipelined.layers
        callbacks = module.trainer.callbacks  # type: ignore[attr-defined]
        roots = [
            ("self", module),
            *((f"trainer.callbacks[{i}]", c) for i, c in enumerate(callbacks)),
        ]
        roots += [item for item in settings_of(module.trainer).items() if is_data(item[1])]
        owners = [module, *(m for _, m in layers.non_pipelined_modules()), *callbacks]
        return OutsideState(roots, [type(owner) for owner in owners], layers.modules)

    def see_metrics(self) -> None:
        """Look for metrics that are no submodules, or new ones; user code may make them at any
        time."""
        self.metrics.add(self.state.all_metrics())

    def all_metrics(self) -> list[Metric]:
        """Return the metrics of the module, of what it refers to, and of callbacks."""
        self.see_metrics()
        return list(self.metrics.metrics.values())


@dataclass
class LightningStep:
    """A `pipeline.training.UserStep`: one call of `training_step`.

    Attributes:
        args: arguments of `training_step`; the first is the batch.
        untouched: whether the batch must stay as it is, because the step will run on it again; user
            code may change it in place.
        trial: whether nothing but its loss is asked for: what it logs and prints is left out.
        logs: records of every run of the step, in the order of micro-batches.
        losses: loss of every run.
        logger_calls: what every run gave to the loggers themselves.
        extra: what a step that returns a dict returned beside the loss; only where it ran on the
            whole batch.
        normalisers: by what every run on a micro-batch normalised its loss.
        operations: what operations every such run computed its loss with.
        finite: for every gradient of a micro-batch's output whether all of it is finite.
    """

    context: StepContext
    args: tuple[Any, ...]
    untouched: bool = False
    trial: bool = False
    logs: list[list[LogRecord]] = field(default_factory=list)
    losses: list[Tensor] = field(default_factory=list)
    logger_calls: list[list[LoggerCall]] = field(default_factory=list)
    extra: dict[str, Any] | None = None
    normalisers: list[list[float]] = field(default_factory=list)
    operations: list[str] = field(default_factory=list)
    finite: list[Tensor] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._rewind_random_state = rng.held(self.context.device)
        self.context.see_metrics()
        self._kept: dict[Any, Any] = {}
        self._buffers = NonPipelinedBuffers(self.context.pipelined.layers, self.context.device)
        self._buffers_before = self._buffers.snapshot()
        self._changes: Tree = {"attributes": {}, "buffers": {}, "should_stop": False}
        self._once: dict[str, set[str]] = {"lists": set(), "buffers": set(), "kept": set()}
        # Texts that the last run printed, and the first that finished the step. Only that is shown.
        self._text = self._printed = ""
        self._effects: list[dict[str, int]] = []
        self._metrics_before = (
            self.context.metrics.snapshot() if self.context.metrics.metrics else {}
        )
        self._parts: Sequence[Any] | None = None

    def module_inputs(self) -> Tree:
        """Run the step up to the module's call and return what it is called with."""

        def stop(inputs: Tree) -> Tree:
            raise _StopAtCall(inputs)

        module, path = self.context.module, self.context.pipelined.path
        with self.taken_back(), self._settings_kept():
            try:
                with (
                    self._inside(PipelinedWeightGuard(self.context.leftovers)),
                    self.context.pipelined.intercepted(stop),
                ):
                    module.training_step(*self._own_args())
            except _StopAtCall as signal:
                self._refuse_use_of_layers(tensors_of(signal.inputs))
                return signal.inputs
        raise UnsupportedStepError(
            f"{type(module).__name__}.training_step returned without calling {path!r}, the "
            "pipelined module. Expected exactly one call in every step. Name the module that it "
            "calls: HeteroPipeStrategy(module='...')."
        )

    @contextmanager
    def taken_back(self) -> Iterator[None]:
        """Context manager after which user code has changed, logged and printed nothing."""
        with self.context.metrics.preserved(), self._own_state(), recording(self.context.module):
            yield

    def try_out(
        self, guard: LayerTensorGuard, through: Callable[[Tree], Tree]
    ) -> tuple[Tensor, list[LogRecord]]:
        """Run the whole step with `through` as the module; return the loss and what was logged."""
        module = self.context.module
        with self._own_state(made=guard.made), recording(module) as records:
            with self._inside(guard), self._answering(through, guard):
                result = module.training_step(*self._own_args())
        return self._loss_of(result, whole=True), records

    def finish(self, output: Tree, microbatch: int | None, sizes: Sequence[int]) -> Tensor:
        """Run the step with `output` as the result of the module's call and return the loss."""
        self._rewind_random_state()
        args = self._own_args() if microbatch is None else self._part_args(microbatch, sizes)
        guard = (
            PipelinedWeightGuard(self.context.leftovers)
            if microbatch is None
            else NormaliserRecorder(self.context.leftovers)
        )
        if microbatch is not None:
            self._watch_gradients(output)
            if not self.logs:
                self.context.metrics.reset()
        module = self.context.module
        loud = not self.trial and not self.logs
        with self._own_state(loud) as (calls, loan), recording(module) as records:
            with (
                self._inside(guard),
                self._answering(lambda inputs: output, guard),
                # The first micro-batch shows a change; a trial must leave none.
                self._settings_kept() if self.trial or not self.logs else nullcontext(),
            ):
                result = module.training_step(*args)
            stops = self._changes["should_stop"] or bool(module.trainer.should_stop)
            self._changes = {
                "attributes": loan.changes(),
                "buffers": self._buffers.changes_since(self._buffers_before),
                "should_stop": stops,
            }
        # A micro-batch before the last may be the only one to change them.
        self._once["lists"].update(changed_lists(self._changes["attributes"]))
        self._once["buffers"].update(self._changes["buffers"])
        self._once["kept"].update(not_sent(self._changes["attributes"]))
        self._effects.append(fingerprints(self._changes["attributes"]))
        if self._text:
            self._effects[-1][PRINTED] = digest(self._text)
        if loud:
            self._printed = self._text
        self._kept = loan.kept
        loss = self._loss_of(result, len(sizes) == 1 or microbatch is None)
        self._refuse_use_of_layers([loss])
        if isinstance(guard, NormaliserRecorder):
            self.normalisers.append(guard.values())
            self.operations.append(guard.operations())
        self.logs.append(records)
        self.logger_calls.append(calls)
        self.losses.append(loss.detach())
        return loss

    def record(self, sizes: Sequence[int]) -> Tree:
        """Return what the other ranks must know: losses, logs, metrics, buffers outside of the
        layers, plain attributes, random state."""
        metrics = self.context.metrics
        whole = len(self.logs) == 1 and self._parts is None
        state: Tree = {}
        if metrics.metrics:
            state = metrics.changes_since(self._metrics_before) if whole else metrics.part()
        return {
            "losses": torch.stack(self.losses),
            "logs": [[record.to_tree(metrics) for record in part] for part in self.logs],
            "logger": [call.to_tree() for calls in self.logger_calls for call in calls],
            "metrics": state,
            **self._changes,
            "printed": self._printed,
            "effects": self._effects,
            "once": {kind: sorted(names) for kind, names in self._once.items()},
            "extra": self.extra,
            "normalisers": self.normalisers,
            "operations": self.operations,
            "finite": [bool(flag) for flag in self.finite],
            "rng": rng.snapshot(self.context.device),
        }

    @property
    def changed_attributes(self) -> Tree:
        """What the last run has changed of the user's state."""
        return self._changes["attributes"]

    @property
    def effects(self) -> list[dict[str, int]]:
        """For every run a number for each change of the user's state."""
        return self._effects

    @property
    def changed_buffers(self) -> list[str]:
        """Which buffers outside of the layers the last run has changed."""
        return sorted(self._changes["buffers"])

    def follow(self, records: Sequence[Tree]) -> None:
        """Make everything on the module what the step left on the ranks that recorded it."""
        self.context.state.apply(records[0]["attributes"], self._kept)
        self._buffers.apply(records[0]["buffers"])
        if any(record["should_stop"] for record in records):
            self.context.module.trainer.should_stop = True

    def undo_metrics(self) -> None:
        """Put the metrics back to where they were before the step."""
        if self._metrics_before:
            self.context.metrics.restore(self._metrics_before)

    @contextmanager
    def _settings_kept(self) -> Iterator[None]:
        """Context manager that takes back changes of layers' settings, and refuses them where this
        is no trial: then all ranks are in a step, and learn of the error."""
        settings = self.context.settings
        trainable, values = settings.trainable(), settings.values()
        try:
            yield
        finally:
            error = settings.restore(trainable, values)
        if error is not None and not self.trial:
            raise UnsupportedStepError(error)

    @contextmanager
    def _own_state(
        self, loud: bool = False, made: LayerTensors | None = None
    ) -> Iterator[tuple[list[LoggerCall], Loan]]:
        """Context manager that lets the step change copies of the user's state, and takes them
        back.

        Yields:
            What the step gives to the loggers, and what it has of the state.
        """
        trainer = self.context.module.trainer
        stopping = trainer.should_stop
        loan = self.context.state.lend(self.context.leftovers)
        self._buffers.lend(self._buffers_before)
        try:
            with recording_loggers(trainer.loggers) as calls, printing_held(loud) as text:
                yield calls, loan
            self._text = text.getvalue()
        finally:
            loan.take_back(made)
            self._buffers.restore(self._buffers_before)
            trainer.should_stop = stopping

    @contextmanager
    def _inside(self, guard: PipelinedWeightGuard) -> Iterator[None]:
        with self.context.precision(), alone("training_step"), guard:
            yield

    def _watch_gradients(self, output: Tree) -> None:
        finite = self.finite

        def note(gradient: Tensor) -> None:
            finite.append(gradient.isfinite().all())

        for tensor in tensors_of(output):
            if tensor.requires_grad:
                tensor.register_hook(note)

    def _refuse_use_of_layers(self, results: Sequence[Tensor]) -> None:
        """Raise where a gradient would flow into a layer past the pipeline: it would be lost."""
        within = self.context.pipelined.layers.layer_only_parameters
        if any(leaf in within for leaf in leaves_of(results)):
            raise weight_of_a_layer("its gradient")

    def _own_args(self) -> tuple[Any, ...]:
        """Return the step's arguments, with a copy of the batch where it must not change."""
        if not self.untouched:
            return self.args
        return (map_tensors(Tensor.clone, self.args[0]), *self.args[1:])

    def _part_args(self, microbatch: int, sizes: Sequence[int]) -> tuple[Any, ...]:
        if self._parts is None:
            split = self.context.split_batch or cut_batch
            self._parts = list(split(self._own_args()[0], sizes))
            if len(self._parts) != len(sizes):
                raise UnsupportedStepError(
                    f"split_batch returned {len(self._parts)} parts, expected {len(sizes)}."
                )
        return (self._parts[microbatch], *self.args[1:])

    @contextmanager
    def _answering(
        self, answer: Callable[[Tree], Tree], guard: PipelinedWeightGuard
    ) -> Iterator[None]:
        calls = 0

        def give(inputs: Tree) -> Tree:
            nonlocal calls
            calls += 1
            if calls > 1:
                raise self._number_of_calls("more than once")
            output = answer(inputs)
            guard.called(tensors_of(inputs), tensors_of(output))
            return output

        with self.context.pipelined.intercepted(give):
            yield
        if not calls:
            raise self._number_of_calls("not at all")

    def _number_of_calls(self, times: str) -> UnsupportedStepError:
        return UnsupportedStepError(
            f"{type(self.context.module).__name__}.training_step calls "
            f"{self.context.pipelined.path!r}, the pipelined module, {times}. Expected exactly "
            "one call in every step. Concatenate the inputs and call it once."
        )

    def _loss_of(self, result: Any, whole: bool) -> Tensor:
        loss = result.get("loss") if isinstance(result, Mapping) else result
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            raise UnsupportedStepError(
                f"training_step returned {type(result).__name__}, expected a scalar tensor or a "
                "dict with one under 'loss'. A step cannot be skipped by returning None."
            )
        if whole and isinstance(result, Mapping):
            extra = {key: value for key, value in result.items() if key != "loss"}
            self.extra = map_tensors(lambda t: t.detach().clone(), extra)
        return loss.reshape(())
