"""Spans of each training step, and its figures for the Trainer's loggers."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import takewhile

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.utilities import rank_zero_info

from lightning_dlres.core.trace import Tracer
from lightning_dlres.gradsync.hook.ddp_state import GradientSyncState
from lightning_dlres.gradsync.report.rank_steps import BACKWARD, SYNC, WAIT, metrics, rank_steps
from lightning_dlres.gradsync.report.residual_norm import residual_norm

# Prefix of the names of logged figures.
_PREFIX = "gradient_sync/"


class StepRecorder:
    """Records each training step of one rank, logs its figures and prints new plans on rank 0.

    A step ends with a backward that synchronises gradients. Every `log_every_n_steps` steps, the
    Trainer's loggers get the means of the steps since the last entry. Their names are those of
    `gradsync.report.rank_steps.metrics` after the prefix "gradient_sync/".

    Args:
        tracer: Gets the spans.
    """

    def __init__(self, tracer: Tracer) -> None:
        self._tracer = tracer
        # Start of the current step; None between two steps.
        self._start_ns: int | None = None
        # Start of the last backward.
        self._backward_ns = 0
        # Start and end, in the last logged step, of the backward that synchronised gradients.
        self._logged_ns = (time.perf_counter_ns(),) * 2
        self._residual_norm: float | None = None
        # Number of the plan's changes that were printed.
        self._printed_changes = 0

    @contextmanager
    def forward(self) -> Iterator[None]:
        """Context manager that records a `training_step`."""
        start_ns = time.perf_counter_ns()
        if self._start_ns is None:
            self._start_ns = start_ns
        yield
        if self._backward_ns < start_ns:
            # With manual optimization, `training_step` also runs backward, which has a span of its
            # own. Its forward then has none.
            self._tracer.add("forward", "compute", start_ns, time.perf_counter_ns())

    @contextmanager
    def backward(self, state: GradientSyncState, module: LightningModule) -> Iterator[None]:
        """Context manager that records a backward, and ends the step if it synchronises gradients.

        Args:
            state: State of the synchronisation.
            module: Module whose gradients are synchronised.
        """
        start_ns = self._backward_ns = time.perf_counter_ns()
        yield
        end_ns = time.perf_counter_ns()
        self._tracer.add(BACKWARD, "compute", start_ns, end_ns)
        ready_ns = round(1e9 * state.last_ready)
        if ready_ns < start_ns:
            # Gradients are accumulated, and synchronised in a later backward.
            return
        for change in state.plan_changes[self._printed_changes :]:
            rank_zero_info(f"dlres: {change.line()}.")
        self._printed_changes = len(state.plan_changes)
        interval = module.trainer.log_every_n_steps  # type: ignore[attr-defined]
        is_logged = interval > 0 and state.steps % interval == 0
        if is_logged:
            self._residual_norm = _residual_norm_of(state, module)
        args = {} if self._residual_norm is None else {"residual_norm": self._residual_norm}
        self._tracer.add(WAIT, SYNC, ready_ns, end_ns, step=state.steps - 1, **args)
        step_start_ns = start_ns if self._start_ns is None else self._start_ns
        self._tracer.add("step", "step", step_start_ns, end_ns, step=state.steps - 1)
        self._start_ns = None
        if is_logged:
            self._log(module.trainer)

    def _log(self, trainer: Trainer) -> None:
        """Give the means of the steps since the last entry to the Trainer's loggers."""
        if not trainer.is_global_zero or not trainer.loggers:
            return
        since_ns, logged_ns = self._logged_ns
        spans = self._tracer.spans()
        # Newest first. Begin at the start of the last logged backward, not at its end: messages
        # for the step after it may have come before that end.
        recent = takewhile(lambda span: span.end_ns > since_ns, reversed(spans))
        is_truncated = self._tracer.dropped > 0 and spans[0].end_ns > since_ns
        steps = [s for s in rank_steps(recent, is_truncated=is_truncated) if s.end_ns > logged_ns]
        if not steps:
            return
        figures = {_PREFIX + name: value for name, value in metrics(steps).items()}
        for logger in trainer.loggers:
            # Lightning logs the module's own figures of this batch under the same step.
            logger.log_metrics(figures, step=trainer.global_step)
        self._logged_ns = steps[-1].start_ns, steps[-1].end_ns


def _residual_norm_of(state: GradientSyncState, module: LightningModule) -> float | None:
    if state.plan is None or state.synchroniser is None:
        return None
    return residual_norm(
        state.synchroniser.states.by_key,
        {name: parameter.grad for name, parameter in module.named_parameters()},
        world_size=state.plan.world_size,
        loss_scale=state.loss_scale,
    )
