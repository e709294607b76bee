"""Steps that return None, before and after the module's call: the batch is skipped, as in plain
training."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.plugins.precision import MixedPrecision
from torch import nn
from torch.amp import GradScaler
from torch.nn import functional as F
from torch.utils.data import DataLoader

from lightning_dlres import HeteroPipeStrategy, PipelinePlan, UnsupportedStepError
from lightning_dlres.core.wire.tree import tensors_of
from lightning_dlres.pipeline.execute.digest import digest
from tests.support.models import QUIET, Samples
from tests.support.rank_pool import RankContext, RankPool
from tests.support.training_cases import (
    Case,
    Classifier,
    batches,
    differences_in,
    fit,
    no_differences_in,
    trainer_for,
)


class SkipsBefore(Classifier):
    """Model that skips batches before it calls its network, and counts and logs them."""

    skipped_batches: tuple[int, ...] = (0, 2)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if batch_idx in self.skipped_batches:
            self.observed.append(float(batch_idx))
            self.log("skipped", float(batch_idx))
            torch.rand(1)
            return None
        return super().training_step(batch, batch_idx)


class SkipsAfter(Classifier):
    """Model that skips batches after its network has run, with a layer that counts batches."""

    def __init__(self) -> None:
        super().__init__()
        self.net[1] = nn.BatchNorm1d(12, affine=False)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        return None if batch_idx in (1, 3) else loss


class SkipsLastOfWindow(SkipsBefore):
    """Model that skips the last batch of an accumulation window."""

    skipped_batches = (1, 3)


class CountsSteps(Callback):
    """Callback that records the outputs and the gradients that hooks see."""

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, *args: Any) -> None:
        module.observed.append(float(outputs["loss"]) if outputs else -1.0)

    def on_before_optimizer_step(self, trainer: Any, module: Any, optimizer: Any) -> None:
        module.observed.append(-2.0)


class BadSamples(Samples):
    """Samples of which one is not finite."""

    def __getitem__(self, index: int) -> Any:
        x, y = super().__getitem__(index)
        return (x * float("nan") if index == 17 else x), y


def bad_batches() -> DataLoader[Any]:
    return DataLoader(BadSamples(False, 32), batch_size=8)


class SkipsNaN(Classifier):
    """Model that skips batches whose loss is not finite."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = F.cross_entropy(self.net(batch[0]), batch[1])
        return None if loss.isnan() else loss


def watched(**trainer: Any) -> dict[str, Any]:
    return {"callbacks": [CountsSteps()], **trainer}


ONE_MICROBATCH = {"microbatches": 1}
CASES = {
    "before, 1f1b": Case(SkipsBefore, "1f1b", "1f1b", trainer=watched()),
    "after, gpipe": Case(SkipsAfter, "gpipe", options=ONE_MICROBATCH, trainer=watched()),
    "nan, auto": Case(SkipsNaN, "auto", "gpipe", data=bad_batches, trainer=watched()),
}
MORE_CASES = {
    "before, gpipe": Case(SkipsBefore, "gpipe", trainer=watched()),
    "window": Case(SkipsLastOfWindow, "gpipe", trainer=watched(accumulate_grad_batches=2)),
    "after, 1f1b": Case(SkipsAfter, "1f1b", options=ONE_MICROBATCH, trainer=watched()),
    "nan, gpipe": Case(SkipsNaN, "gpipe", data=bad_batches, trainer=watched()),
    "before, measured": Case(SkipsBefore, options={"plan": None}, trainer=watched()),
    "after, measured": Case(
        SkipsAfter, "gpipe", options={"plan": None, **ONE_MICROBATCH}, trainer=watched()
    ),
}


def compare(context: RankContext, cases: dict[str, Case]) -> dict[str, list[str]]:
    return differences_in(context, cases)


def test_a_step_that_returns_none_skips_the_batch(pool: RankPool) -> None:
    assert pool.run(compare, 2, CASES) == no_differences_in(CASES)


@pytest.mark.exhaustive
@pytest.mark.parametrize("ranks", [2, 4])
def test_batches_are_skipped_under_every_schedule(pool: RankPool, ranks: int) -> None:
    cases = {**CASES, **MORE_CASES}
    assert pool.run(compare, ranks, cases) == no_differences_in(cases, ranks)


ONE_DEVICE = {
    "one device": Case(
        SkipsBefore,
        "gpipe",
        options={"plan": None, "stages": 1, "microbatches": 2},
        trainer=watched(),
    )
}


@pytest.mark.exhaustive
def test_one_device_with_micro_batches_skips_batches(pool: RankPool) -> None:
    assert pool.run(compare, 1, ONE_DEVICE) == no_differences_in(ONE_DEVICE, 1)


class Wide(Classifier):
    """Model whose gradients are large enough to be compressed; it skips the second batch."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(16, 260), nn.Tanh(), nn.Linear(260, 20))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        return None if batch_idx == 1 else loss


class RecordsResiduals(Callback):
    """Callback that records the residuals of compression after each batch."""

    def __init__(self) -> None:
        self.residuals: list[Any] = []

    def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
        state = trainer.strategy._deployment.compression.state_dict()
        self.residuals.append(state["units"])


def residuals_of_steps(context: RankContext, schedule: str) -> list[bool]:
    """Return for the second and the third batch: True if the residuals are still the same."""
    callback = RecordsResiduals()
    plan = PipelinePlan(replicas=((0,), (1,)), split=(3,))
    trainer = Trainer(
        strategy=HeteroPipeStrategy(
            plan=plan, schedule=schedule, gradient_codec="int8", timeout=30
        ),
        accelerator="cpu",
        devices=2,
        plugins=[context.environment],
        max_epochs=1,
        callbacks=[callback],
        **QUIET,
    )
    trainer.fit(Wide(), batches())
    assert tensors_of(callback.residuals)
    digests = [digest(residuals) for residuals in callback.residuals]
    return [digests[1] == digests[0], digests[2] == digests[1]]


@pytest.mark.parametrize("schedule", ["gpipe", pytest.param("auto", marks=pytest.mark.exhaustive)])
def test_residuals_of_a_skipped_batch_are_kept(pool: RankPool, schedule: str) -> None:
    assert pool.run(residuals_of_steps, 2, schedule) == [[True, False]] * 2


def refusal_of_1f1b(context: RankContext) -> str:
    with pytest.raises(UnsupportedStepError) as error:
        fit(context, Case(SkipsNaN, "1f1b", data=bad_batches))
    return str(error.value)


def test_1f1b_refuses_to_skip_a_part_of_a_batch(pool: RankPool) -> None:
    for message in pool.run(refusal_of_1f1b, 2):
        assert "schedule='1f1b' would not train this model exactly" in message
        assert "training_step returns None for only some micro-batches" in message


def steps_with_scaler(context: RankContext) -> list[tuple[float, int, float]]:
    """Return a digest of a run on one device, and of one through the pipeline."""
    results = []
    for run_context in (None, context):
        scaler = GradScaler("cpu", init_scale=1024.0, growth_interval=2)
        plugins: list[Any] = [MixedPrecision("16-mixed", "cpu", scaler)]
        if run_context is not None:
            plugins.append(run_context.environment)
        model = SkipsBefore()
        trainer = trainer_for(run_context, schedule="gpipe", plugins=plugins)
        trainer.fit(model, batches())
        weights = sum(float(p.detach().norm()) for p in model.parameters())
        results.append((scaler.get_scale(), trainer.global_step, weights))
    return results


@pytest.mark.exhaustive
def test_a_gradient_scaler_takes_no_step_for_a_skipped_batch(pool: RankPool) -> None:
    for (scale, steps, weights), actual in pool.run(steps_with_scaler, 2):
        assert actual == (scale, steps, pytest.approx(weights, rel=1e-3))
