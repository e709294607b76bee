"""Old gradients are dropped before new ones are computed, unless hooks may read them. A step
leaves no tensors that only the garbage collector for cycles would free."""

from __future__ import annotations

import gc
from typing import Any

import torch
from lightning.pytorch import Callback, Trainer
from torch.optim import Optimizer

from lightning_dlres.pipeline.execute.training import TrainingStep
from lightning_dlres.pipeline.stage.gradient_buffer import GradientBuffer
from lightning_dlres.pipeline.stage.stage import Stage
from lightning_dlres.strategies.hetero_pipe.gradient_zeroing import may_drop_old_gradients
from lightning_dlres.strategies.hetero_pipe.step.user_step import LightningStep
from tests.support.models import QUIET
from tests.support.rank_pool import RankContext, RankPool
from tests.support.training_cases import (
    Case,
    Classifier,
    batches,
    differences_in,
    no_differences_in,
    trainer_for,
)


class SeesGradients(Classifier):
    """Model that reads the last step's gradients before they are zeroed.

    Each rank reads those of its stage; other parameters are on the meta device.
    """

    def on_before_zero_grad(self, optimizer: Optimizer) -> None:
        has_gradient = [p.grad is not None for p in self.parameters() if not p.is_meta]
        self.observed.append(float(any(has_gradient)))


class NeverZeroes(Classifier):
    def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: Optimizer) -> None:
        if batch_idx == 2:
            optimizer.zero_grad()


class LogsOldGradients(Classifier):
    """Model whose step reads gradients of earlier batches, between backwards of micro-batches.

    The weight belongs to the last stage, which runs this part of the step.
    """

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        old = self.net[4].weight.grad
        self.log(
            "old", torch.zeros(()) if old is None else old.norm(), on_step=False, on_epoch=True
        )
        return loss


class MayReadGradients(Callback):
    """Callback with a hook that could read old gradients."""

    def on_before_zero_grad(self, *_: Any) -> None:
        pass


CASES = {
    "seen in a hook": Case(SeesGradients),
    "zeroed now and then": Case(NeverZeroes),
    "read in the step": Case(
        LogsOldGradients, "1f1b", trainer={"accumulate_grad_batches": 3}, expected_schedule="1f1b"
    ),
    "accumulated": Case(Classifier, trainer={"accumulate_grad_batches": 3}),
}


def compare(context: RankContext) -> dict[str, list[str]]:
    return differences_in(context, CASES)


def test_gradients_equal_those_of_a_plain_trainer(pool: RankPool) -> None:
    assert pool.run(compare, 2) == no_differences_in(CASES)


def test_code_that_reads_old_gradients_keeps_them() -> None:
    assert may_drop_old_gradients(Trainer(**QUIET), Classifier())
    assert not may_drop_old_gradients(Trainer(**QUIET), SeesGradients())
    assert not may_drop_old_gradients(Trainer(**QUIET), NeverZeroes())
    assert not may_drop_old_gradients(
        Trainer(**QUIET, callbacks=[MayReadGradients()]), Classifier()
    )
    assert not may_drop_old_gradients(Trainer(**QUIET, accumulate_grad_batches=2), Classifier())


class FindsLeftovers(Callback):
    """Callback that finds objects of the previous step which should have been freed."""

    def __init__(self) -> None:
        self.leftovers: set[str] = set()

    def on_train_batch_start(self, *_: Any) -> None:
        parts = (TrainingStep, GradientBuffer, LightningStep, Stage)
        names = [type(o).__name__ for o in gc.get_objects() if issubclass(type(o), parts)]
        names.remove("Stage")  # the one that lives as long as the run
        self.leftovers.update(names)


def leftovers(context: RankContext, schedule: str) -> set[str]:
    callback = FindsLeftovers()
    trainer = trainer_for(context, schedule=schedule, callbacks=[callback])
    gc.collect()
    gc.disable()
    try:
        trainer.fit(Classifier(), batches())
    finally:
        gc.enable()
    return callback.leftovers


def test_a_step_leaves_no_tensors_in_reference_cycles(pool: RankPool) -> None:
    for schedule in ("gpipe", "1f1b"):
        assert pool.run(leftovers, 2, schedule) == [set(), set()]
