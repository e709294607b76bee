"""Old gradients are dropped before new ones are computed, unless hooks may read them. A step
leaves no tensors that only the garbage collector for cycles would free."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, Trainer
from torch import nn
from torch.nn import functional as F
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


class HeadOutside(Classifier):
    """Model with a head outside of the pipelined module, which all ranks hold."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(5, 5)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.use_gradients(batch_idx)
        loss = F.cross_entropy(self.head(self.net(batch[0])), batch[1])
        self.log("loss", loss)
        return loss

    def use_gradients(self, batch_idx: int) -> None:
        """Use the gradients of earlier batches."""


class LogsHead(HeadOutside):
    """Model whose step logs the head's gradient of the step before."""

    def use_gradients(self, batch_idx: int) -> None:
        old = self.head.weight.grad
        norm = torch.zeros(()) if old is None else old.norm()
        self.log("old", norm, on_step=False, on_epoch=True)


class LogsHeadLate(HeadOutside):
    """Model whose step looks at the head's gradient first in the third batch."""

    def use_gradients(self, batch_idx: int) -> None:
        if batch_idx >= 2:
            self.observed.append(float(self.head.weight.grad is not None))


class ZeroesHead(HeadOutside):
    """Model whose step zeroes gradients that Lightning will zero."""

    def use_gradients(self, batch_idx: int) -> None:
        if self.head.weight.grad is not None:
            self.head.weight.grad.zero_()
        self.head.bias.grad = None
        self.zero_grad()


class ScalesHead(HeadOutside):
    def use_gradients(self, batch_idx: int) -> None:
        if self.head.weight.grad is not None:
            self.head.weight.grad *= 0.5


class ScalesDataOfHead(HeadOutside):
    def use_gradients(self, batch_idx: int) -> None:
        if self.head.weight.grad is not None:
            self.head.weight.grad.data.mul_(0.5)


class ReplacesGradientOfHead(HeadOutside):
    def use_gradients(self, batch_idx: int) -> None:
        if self.head.weight.grad is not None:
            self.head.weight.grad = self.head.weight.grad * 0.5


class DeletesGradientOfHead(HeadOutside):
    def use_gradients(self, batch_idx: int) -> None:
        del self.head.weight.grad


class ZeroesModel(HeadOutside):
    def use_gradients(self, batch_idx: int) -> None:
        self.zero_grad()


class ZeroesLayersAfterCall(Classifier):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        self.net.zero_grad(set_to_none=False)
        return loss


class RunsBackward(HeadOutside):
    """Model whose step runs a backward of its own, before the call and after it."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.head(batch[0][:, :5]).square().sum().backward()
        loss = super().training_step(batch, batch_idx)
        self.head(batch[0][:, 5:10]).square().sum().backward()
        return loss


class TrainsOnAttacks(HeadOutside):
    """Model whose step moves its inputs along a gradient of theirs."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x = batch[0].clone().requires_grad_()
        self.head(x[:, :5]).square().sum().backward(inputs=[x])
        return super().training_step([batch[0] + 0.1 * x.grad.sign(), batch[1]], batch_idx)


class MovesHead(HeadOutside):
    """Model whose step moves the head to where it is, which looks at gradients, too."""

    def use_gradients(self, batch_idx: int) -> None:
        self.head.to(self.device)


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
    "read in the step, not accumulated": Case(LogsHead),
    "read per micro-batch, not accumulated": Case(LogsHead, "1f1b", expected_schedule="1f1b"),
    "zeroed in the step, too": Case(ZeroesHead),
    "backward in the step": Case(RunsBackward, options={"module": "net"}),
    "backward per micro-batch": Case(
        RunsBackward, "1f1b", expected_schedule="1f1b", options={"module": "net"}
    ),
    "gradients of inputs": Case(TrainsOnAttacks, options={"module": "net"}),
    "gradients of inputs, accumulated": Case(
        TrainsOnAttacks, "1f1b", trainer={"accumulate_grad_batches": 3}, options={"module": "net"}
    ),
    "moved while accumulated": Case(MovesHead, trainer={"accumulate_grad_batches": 3}),
    "accumulated": Case(Classifier, trainer={"accumulate_grad_batches": 3}),
}
CHANGES = [
    ScalesHead,
    ScalesDataOfHead,
    ReplacesGradientOfHead,
    DeletesGradientOfHead,
    ZeroesModel,
    ZeroesLayersAfterCall,
    RunsBackward,
]


def compare(context: RankContext) -> dict[str, list[str]]:
    return differences_in(context, CASES)


def test_gradients_equal_those_of_a_plain_trainer(pool: RankPool) -> None:
    assert pool.run(compare, 2) == no_differences_in(CASES)


def fit_accumulated(context: RankContext, kind: type[Classifier], schedule: str) -> None:
    options = {"schedule": schedule, "module": "net", "accumulate_grad_batches": 3}
    trainer_for(context, **options).fit(kind(), batches())


@pytest.mark.parametrize("kind", CHANGES)
def test_a_step_must_not_change_accumulated_gradients(
    pool: RankPool, kind: type[Classifier]
) -> None:
    schedule = "1f1b" if CHANGES.index(kind) % 2 else "gpipe"
    outcomes = pool.run_expecting_errors(fit_accumulated, 2, kind, schedule)
    for outcome in outcomes:
        assert "training_step must not change gradients that are accumulated" in str(
            outcome.error_message
        ), outcome.output


def first_late_look(context: RankContext) -> list[float]:
    model = LogsHeadLate()
    trainer_for(context, schedule="gpipe", module="net").fit(model, batches())
    return model.observed


def test_a_late_look_at_a_dropped_gradient_is_told(pool: RankPool) -> None:
    outcomes = pool.run_expecting_errors(first_late_look, 2)
    assert [outcome.error_type for outcome in outcomes] == [None, None]
    assert [outcome.value for outcome in outcomes] == [[0.0, 1.0, 1.0, 1.0]] * 2
    told = [outcome.output.count("This step has dropped it") for outcome in outcomes]
    # Both ranks run the code before the call.
    assert told == [1, 1]


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
