"""One training step of an unchanged LightningModule, run in two places: up to the module's call,
and from the call on."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor

from lightning_dlres.core import rng
from lightning_dlres.core.errors import UnsupportedStepError
from lightning_dlres.core.tree import Tree, map_tensors
from lightning_dlres.pipeline.microbatch import cut_batch
from lightning_dlres.strategies.attributes import PlainAttributes
from lightning_dlres.strategies.capture import PipelinedModule
from lightning_dlres.strategies.guard import ForeignWeightGuard
from lightning_dlres.strategies.metrics import MetricStates
from lightning_dlres.strategies.records import LogRecord, recording

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
    """

    module: LightningModule
    pipelined: PipelinedModule
    metrics: MetricStates
    device: torch.device
    precision: Callable[[], AbstractContextManager[Any]]
    split_batch: SplitBatch | None = None


@dataclass
class LightningStep:
    """A `pipeline.training.UserStep`: one call of `training_step`.

    Attributes:
        args: arguments of `training_step`; the first is the batch.
        untouched: whether the batch must stay as it is, because the step will run on it again; user
            code may change it in place.
        logs: records of every run of the step, in the order of micro-batches.
        losses: loss of every run.
        extra: what a step that returns a dict returned beside the loss; only where it ran on the
            whole batch.
    """

    context: StepContext
    args: tuple[Any, ...]
    untouched: bool = False
    logs: list[list[LogRecord]] = field(default_factory=list)
    losses: list[Tensor] = field(default_factory=list)
    extra: dict[str, Any] | None = None

    def __post_init__(self) -> None:
        self._start = rng.snapshot(self.context.device)
        self._attributes = PlainAttributes(self.context.module)
        self._attributes_before = self._attributes.snapshot()
        self._metrics_before = (
            self.context.metrics.snapshot() if self.context.metrics.metrics else {}
        )
        self._parts: Sequence[Any] | None = None
        self._buffers_before = {
            name: buffer._version for name, buffer in self._outer_buffers().items()
        }

    def module_inputs(self) -> Tree:
        """Run the step up to the module's call and return what it is called with."""

        def stop(inputs: Tree) -> Tree:
            raise _StopAtCall(inputs)

        module, path = self.context.module, self.context.pipelined.path
        with self.context.metrics.preserved(), recording(module), self.context.precision():
            try:
                with ForeignWeightGuard(), self.context.pipelined.intercepted(stop):
                    module.training_step(*self._own_args())
            except _StopAtCall as signal:
                self._attributes.restore(self._attributes_before)
                return signal.inputs
        raise UnsupportedStepError(
            f"{type(module).__name__}.training_step returned without calling {path!r}, the "
            "pipelined module. Expected exactly one call in every step. Name the module that it "
            "calls: HeteroPipeStrategy(module='...')."
        )

    def finish(self, output: Tree, microbatch: int | None, sizes: Sequence[int]) -> Tensor:
        """Run the step with `output` as the result of the module's call and return the loss."""
        rng.restore(self._start, self.context.device)
        self._attributes.restore(self._attributes_before)
        args = self._own_args() if microbatch is None else self._part_args(microbatch, sizes)
        if microbatch is not None and not self.logs:
            self.context.metrics.reset()
        module = self.context.module
        inside = (self.context.precision(), ForeignWeightGuard(), self._returning(output))
        with recording(module) as records, inside[0], inside[1], inside[2]:
            result = module.training_step(*args)
        loss = self._loss_of(result, microbatch is None)
        self.logs.append(records)
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
            "losses": [loss.clone() for loss in self.losses],
            "logs": [[record.to_tree(metrics) for record in part] for part in self.logs],
            "metrics": state,
            "buffers": self._changed_buffers(),
            "attributes": self.changed_attributes(),
            "extra": self.extra,
            "rng": rng.snapshot(self.context.device),
        }

    def changed_attributes(self) -> Tree:
        """Return which plain attributes of the module the last run has changed."""
        return self._attributes.changes_since(self._attributes_before)

    def follow(self, attributes: Tree) -> None:
        """Make the module's plain attributes those that the step left on another rank."""
        self._attributes.restore(self._attributes_before)
        self._attributes.apply(attributes)

    def undo(self) -> None:
        """Put metrics and plain attributes back to where they were before the step."""
        self._attributes.restore(self._attributes_before)
        self.undo_metrics()

    def undo_metrics(self) -> None:
        """Put the metrics back to where they were before the step."""
        if self._metrics_before:
            self.context.metrics.restore(self._metrics_before)

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
    def _returning(self, output: Tree) -> Any:
        calls = 0

        def give(inputs: Tree) -> Tree:
            nonlocal calls
            calls += 1
            if calls > 1:
                raise self._number_of_calls("more than once")
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

    def _outer_buffers(self) -> dict[str, Tensor]:
        layers = self.context.pipelined.layers
        return {n: b for n, b in layers.root.named_buffers() if layers.layer_of(n) is None}

    def _changed_buffers(self) -> dict[str, Tensor]:
        return {
            n: b.clone()
            for n, b in self._outer_buffers().items()
            if b._version != self._buffers_before.get(n)
        }
