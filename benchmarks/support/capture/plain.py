"""Process that trains a case plainly, with a Trainer on one device."""

from __future__ import annotations

import copy
import sys
from pathlib import Path

import torch

from benchmarks.support.capture.quiet import be_quiet
from benchmarks.support.capture.rank_report import reporting
from benchmarks.support.capture.task import (
    BATCH,
    MICRO_BATCHES,
    CaseModule,
    Task,
    make_loader,
    make_trainer,
)
from benchmarks.support.capture_models.case import call


class RandomForwardError(Exception):
    """The model draws random numbers, so no two runs of it are alike."""


def main() -> None:
    """Train the case of `sys.argv`."""
    be_quiet()
    task = Task.from_json(sys.argv[1])
    with reporting(Path(task.directory, "plain-0"), ()) as report:
        cut_for = (BATCH, MICRO_BATCHES) if task.is_cut else (MICRO_BATCHES,)
        module, batches = CaseModule(task.case(), cut_for=cut_for), task.batches()
        require_same_loss_twice(module, batches[0])
        report.enter("step 1")
        make_trainer(task, devices=1).fit(module, make_loader(batches))
        report.losses, report.notes = module.losses, {"reference": module.reference}
        report.save_weights(module.net.state_dict())


def require_same_loss_twice(module: CaseModule, batch: object) -> None:
    """Run a copy of the model with two seeds.

    Raises:
        RandomForwardError: If the losses differ.
    """
    losses = []
    for seed in range(2):
        net = copy.deepcopy(module.net)
        torch.manual_seed(seed)
        losses.append(float(module.case.loss(call(net, batch))))  # type: ignore[arg-type]
    if losses[0] != losses[1]:
        raise RandomForwardError(f"losses {losses[0]} and {losses[1]} with two seeds")
