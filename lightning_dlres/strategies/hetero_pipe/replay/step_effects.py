"""Side effects of one training step: isolated in every run, collected, and applied on all ranks.

This rank may run a step several times: up to the call of the pipelined module, for the inputs of
that call, and from the start to the loss, once on the whole batch or once per micro-batch. The
rules are:

- Every run starts from the state before the step, and leaves nothing behind. Metrics are the
  exception: they accumulate over the runs on micro-batches. After the step, `apply` restores them
  and merges the states that the micro-batches contributed.
- All ranks get the attributes, buffers and frozen parameters that the last run on the first replica
  left. With `schedule="auto"`, runs that leave different values make the strategy fall back to one
  run on the whole batch. With a schedule that the user chose, the last run counts.
- Calls of `self.log` are recorded in every run, and merged if the runs were on micro-batches.
- Calls of loggers are recorded in every run. They are made after a run on the whole batch only:
  `checks.loss_check` refuses them in a run on a micro-batch.
- Printed text is that of the first run, on the first replica, that finishes the step.
- `should_stop` is set if any run on any rank sets it.
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from io import StringIO
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import nn

from lightning_dlres.core import rng
from lightning_dlres.core.wire.tree import Tree
from lightning_dlres.pipeline.execute.digest import digest
from lightning_dlres.pipeline.execute.layer_tensors import LayerTensors
from lightning_dlres.pipeline.execute.partition import ModelLayers
from lightning_dlres.strategies.hetero_pipe.replay.buffers import NonPipelinedBuffers
from lightning_dlres.strategies.hetero_pipe.replay.frozen_parameters import (
    NonPipelinedFrozenParameters,
)
from lightning_dlres.strategies.hetero_pipe.replay.loggers import LoggerCall, isolated_loggers
from lightning_dlres.strategies.hetero_pipe.replay.logs import (
    LogRecord,
    isolated_log_calls,
    logs_in,
    merge_parts,
)
from lightning_dlres.strategies.hetero_pipe.replay.metrics import MetricStates
from lightning_dlres.strategies.hetero_pipe.replay.printing import PRINTED, isolated_output
from lightning_dlres.strategies.hetero_pipe.replay.user_state.attribute_changes import (
    changed_collections,
    fingerprints,
    unsendable_values,
)
from lightning_dlres.strategies.hetero_pipe.replay.user_state.attributes import (
    IsolatedState,
    UserState,
)


@dataclass(frozen=True)
class IsolatedRun:
    """One run of the step, and the side effects that it has had so far.

    Attributes:
        state: The user's attributes, with copies in place of tensors and arrays.
        logs: Calls of `self.log`.
        logger_calls: Calls of the loggers' own methods.
        output: Printed text.
    """

    state: IsolatedState
    logs: list[LogRecord]
    logger_calls: list[LoggerCall]
    output: StringIO


class StepEffects:
    """The side effects of one step on this rank. Make an instance before the step's first run.

    Args:
        module: The LightningModule.
        layers: Its pipelined layers.
        state: The user's state, read anew for every run.
        metrics: States of the model's metrics.
        device: Device of this rank.

    Attributes:
        logs: Calls of `self.log` of every collected run, in the order of micro-batches.
        logger_calls: Calls of loggers of every collected run.
        fingerprints: For every collected run, hashes of its changes by path, and of its printed
            text by `PRINTED`.
    """

    def __init__(
        self,
        module: LightningModule,
        layers: ModelLayers,
        state: UserState,
        metrics: MetricStates,
        device: torch.device,
    ) -> None:
        self._trainer, self._module = module.trainer, module
        self._state, self._metrics, self._device = state, metrics, device
        self._buffers = NonPipelinedBuffers(layers, device)
        self._buffers_before = self._buffers.snapshot()
        self._parameters = NonPipelinedFrozenParameters(layers)
        self._metrics_before = metrics.snapshot() if metrics.metrics else {}
        self._last_state: IsolatedState | None = None
        self._keeps_changes = False
        self.logs: list[list[LogRecord]] = []
        self.logger_calls: list[list[LoggerCall]] = []
        self.fingerprints: list[dict[str, int]] = []
        self._changes: Tree = {
            "attributes": {},
            "buffers": {},
            "parameters": {},
            "should_stop": False,
        }
        # Objects of the last collected run that cannot be sent. This rank applies its own ones.
        self._unsendable: dict[tuple[str, Any], Any] = {}
        # Names of changes that a step per micro-batch must not make, over all runs: a micro-batch
        # before the last may be the only one that makes them.
        self._once_per_batch: dict[str, set[str]] = {
            "collections": set(),
            "buffers": set(),
            "unsendable": set(),
        }
        self._printed = ""

    @property
    def changed_attributes(self) -> Tree:
        """Changes of the user's state in the last collected run."""
        return self._changes["attributes"]

    @property
    def changed_buffers(self) -> list[str]:
        """Names of the buffers and frozen parameters outside of the layers that the last collected
        run changed."""
        return sorted([*self._changes["buffers"], *self._changes["parameters"]])

    @contextmanager
    def isolated(
        self,
        old_layer_tensors: LayerTensors,
        new_layer_tensors: LayerTensors | None = None,
        shows_logging: bool = False,
    ) -> Iterator[IsolatedRun]:
        """Context manager that undoes all that user code changes, logs and prints in one run.

        Metrics are not isolated here, since they accumulate over the runs on micro-batches.

        Args:
            old_layer_tensors: Tensors that layers made before the run. They are not copied, so that
                a use of them is noticed.
            new_layer_tensors: Tensors that layers make in this run. An attribute that holds one
                keeps it after the run, so that a later use is noticed.
            shows_logging: Whether messages of Python's `logging` appear, and breakpoints stop.

        Yields:
            The run. Call `collect` with it before the end to keep its side effects.
        """
        should_stop = self._trainer.should_stop
        buffers = [b.tensor for b in self._buffers_before.values() if b.tensor is not None]
        state = self._state.isolate(old_layer_tensors, self._last_state, buffers)
        self._buffers.isolate(self._buffers_before, state.shared_copy)
        self._parameters.isolate()
        try:
            with self._recorded(state, shows_logging) as run:
                yield run
        finally:
            state.restore(new_layer_tensors)
            self._last_state = state
            self._buffers.restore(self._buffers_before)
            self._parameters.restore()
            self._trainer.should_stop = should_stop

    @contextmanager
    def observed(self) -> Iterator[IsolatedRun]:
        """Context manager that records all that user code changes, logs and prints in one run, and
        undoes no change of it. `apply` then changes nothing on this rank a second time.

        Yields:
            The run. Call `collect` with it before the end to keep its side effects.
        """
        self._keeps_changes = True
        self._buffers_before = self._buffers.observe(self._buffers_before)
        state = self._state.observe()
        with self._recorded(state, shows_logging=True) as run:
            yield run

    @contextmanager
    def _recorded(self, state: IsolatedState, shows_logging: bool) -> Iterator[IsolatedRun]:
        """Context manager that records logs, calls of loggers and printed text."""
        with (
            isolated_loggers(self._trainer.loggers) as logger_calls,
            isolated_output(shows_logging) as output,
            isolated_log_calls(self._module) as logs,
        ):
            yield IsolatedRun(state, logs, logger_calls, output)

    @contextmanager
    def undone(self, old_layer_tensors: LayerTensors) -> Iterator[IsolatedRun]:
        """Context manager for one run that also restores the metrics; it yields the run."""
        with self._metrics.isolated(), self.isolated(old_layer_tensors) as run:
            yield run

    def tensors_changed_in(self, modules: Collection[nn.Module]) -> list[str]:
        """Return the names of the buffers and frozen parameters of some modules outside of the
        layers that the current run has changed so far."""
        changed = self._buffers.changed_in(modules, self._buffers_before)
        return [*changed, *self._parameters.changed_in(modules)]

    def collect(self, run: IsolatedRun) -> None:
        """Keep the side effects of a run. Called inside `isolated`, whose end undoes them."""
        attributes = run.state.diff()
        self._changes = {
            "attributes": attributes,
            "buffers": self._buffers.diff(self._buffers_before),
            "parameters": self._parameters.diff(),
            "should_stop": self._changes["should_stop"] or bool(self._trainer.should_stop),
        }
        self._once_per_batch["collections"].update(changed_collections(attributes))
        self._once_per_batch["buffers"].update(self.changed_buffers)
        self._once_per_batch["unsendable"].update(unsendable_values(attributes))
        text = run.output.getvalue()
        self.fingerprints.append(
            fingerprints(attributes) | ({PRINTED: digest(text)} if text else {})
        )
        if not self.logs:
            self._printed = text
        self._unsendable = run.state.unsendable
        self.logs.append(run.logs)
        self.logger_calls.append(run.logger_calls)

    def to_tree(self, by_parts: bool) -> Tree:
        """Return the collected side effects as plain data, for all ranks; called after the last
        run.

        Args:
            by_parts: Whether the runs were on micro-batches, so that the metrics' states are
                partial.
        """
        metrics: Tree = {}
        if self._metrics.metrics:
            metrics = (
                self._metrics.partial_states()
                if by_parts
                else self._metrics.diff(self._metrics_before)
            )
        return {
            "logs": [[record.to_tree(self._metrics) for record in run] for run in self.logs],
            "logger": [call.to_tree() for calls in self.logger_calls for call in calls],
            "metrics": metrics,
            **self._changes,
            "printed": self._printed,
            "fingerprints": self.fingerprints,
            "once_per_batch": {kind: sorted(names) for kind, names in self._once_per_batch.items()},
            "rng": rng.snapshot(self._device),
        }

    def apply(self, records: Sequence[Tree], part_sizes: Sequence[int] | None) -> None:
        """Apply the side effects of the step to this rank.

        Called once on every rank, also on the ranks that ran the step, because each run was undone
        unless it was `observed`.
        Attributes, buffers, random state and printed text come from the first record. Only a run on
        the whole batch may have calls of loggers, and there is one record then.

        Args:
            records: Results of `to_tree` of the ranks that ran the step, the same on all ranks.
            part_sizes: Samples of every micro-batch, if the step ran per micro-batch; None after a
                run on the whole batch.
        """
        first, logs = records[0], logs_in(records, self._metrics)
        # Metrics come before the logs: `self.log` reads the value of a metric that it gets.
        if part_sizes is not None:
            self.restore_metrics()
            self._metrics.merge([record["metrics"] for record in records])
        elif not self.logs:
            # A rank that ran the step on the whole batch has updated its metrics itself.
            self._metrics.apply(first["metrics"])
        if not self._keeps_changes:
            self._state.apply(first["attributes"], self._unsendable)
            self._buffers.apply(first["buffers"])
            self._parameters.apply(first["parameters"])
        if any(record["should_stop"] for record in records):
            self._trainer.should_stop = True
        rng.restore(first["rng"], self._device)
        for log in logs[0] if part_sizes is None else merge_parts(logs, part_sizes):
            log.replay(self._module)
        # A process without a terminal may have no standard output.
        if self._trainer.is_global_zero and sys.stdout is not None:
            sys.stdout.write(first["printed"])
        for call in records[-1]["logger"]:
            LoggerCall.replay(call, self._trainer.loggers)

    def restore_metrics(self) -> None:
        """Put the metrics back to their state before the step."""
        if self._metrics_before:
            self._metrics.restore(self._metrics_before)
