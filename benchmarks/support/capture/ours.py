"""Rank that trains a case with `HeteroPipeStrategy`."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import lightning as L

from benchmarks.support.capture.cuts import captured_layers, even_split
from benchmarks.support.capture.quiet import be_quiet
from benchmarks.support.capture.rank_report import RankReport, reporting
from benchmarks.support.capture.task import (
    CaseModule,
    Task,
    make_loader,
    make_trainer,
    microbatches,
)
from benchmarks.support.capture_models.case import Batch
from lightning_dlres import HeteroPipeStrategy
from lightning_dlres.core.errors import ConfigError, UnsupportedStepError
from lightning_dlres.pipeline.plan.plan import PipelinePlan
from lightning_dlres.pipeline.profile.config import ProfileConfig

# The plan need not be fast: the shortest profile.
_PROFILE = ProfileConfig(repeats=1, seconds=0.0)
# Time that a rank waits for another, in seconds; below the deadline of a case.
_TIMEOUT = 60.0


class StepPhases(L.Callback):
    """Callback that writes the step into the report before it runs."""

    def __init__(self, report: RankReport) -> None:
        self._report = report

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        """Write the step."""
        self._report.enter(f"step {batch_idx + 1}")


def main() -> None:
    """Train the case of `sys.argv`."""
    be_quiet()
    task, rank = Task.from_json(sys.argv[1]), int(os.environ["RANK"])
    path = Path(task.directory, f"ours-{rank}")
    with reporting(path, (ConfigError, UnsupportedStepError)) as report:
        module, batches = CaseModule(task.case()), task.batches()
        strategy = HeteroPipeStrategy(
            stages=task.stages,
            microbatches=microbatches(module.reference),
            schedule=task.schedule,  # type: ignore[arg-type]
            module="net" if task.is_named else None,
            profile=_PROFILE,
            plan=even_plan(task, batches[0]) if task.is_even else None,
            timeout=_TIMEOUT,
        )
        trainer = make_trainer(
            task, devices=task.stages, strategy=strategy, callbacks=[StepPhases(report)]
        )
        trainer.fit(module, make_loader(batches))
        report.losses = module.losses
        split = list(strategy.plan.split) if strategy.plan is not None else []
        report.notes = {"split": split, "schedule": strategy.schedule}
        if rank == 0:
            report.save_weights(module.net.state_dict())


def even_plan(task: Task, batch: Batch) -> PipelinePlan | None:
    """Return a plan with equal numbers of layers; None if the model has too few."""
    layers = captured_layers(task.case(), batch)
    if layers < task.stages:
        return None
    return PipelinePlan(
        replicas=(tuple(range(task.stages)),), split=even_split(layers, task.stages)
    )
