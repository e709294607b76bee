"""Features of the Lightning Trainer under a pipeline: callbacks, loops, loggers, schedulers, and
models made in `configure_model`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import EarlyStopping, LearningRateMonitor, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset

from lightning_dlres import HeteroPipeStrategy, PipelinePlan, ProfileConfig
from tests.support.models import QUIET, Samples, Task, loaders
from tests.support.parity import relative
from tests.support.rank_pool import RankContext, RankPool
from tests.support.training_cases import (
    QUICK,
    Case,
    Classifier,
    differences_in,
    no_differences_in,
)


def strategy_for(context: RankContext, **options: Any) -> dict[str, Any]:
    """Return Trainer arguments for a pipeline over the job's ranks."""
    stages = context.world_size if options.get("device_map") is None else "auto"
    return {
        "strategy": HeteroPipeStrategy(
            **{"microbatches": 4, "timeout": 60, "stages": stages, "profile": QUICK, **options}
        ),
        "accelerator": "cpu",
        "devices": context.world_size,
        "plugins": [context.environment],
    }


def with_callbacks(context: RankContext, directory: str) -> Any:
    """Fit with common callbacks and a logger; only rank 0 writes files."""
    seed_everything(3, verbose=False)
    task = Task("mlp")
    train, validation = loaders(task, 40, 8, False, 0, torch.float32)
    best = ModelCheckpoint(directory, monitor="val_loss", save_top_k=1, save_last=True)
    stop = EarlyStopping("train_loss_epoch", min_delta=100.0, patience=1)
    trainer = Trainer(
        **strategy_for(context),
        callbacks=[best, stop, LearningRateMonitor("step")],
        log_every_n_steps=1,
        max_epochs=10,
        **{**QUIET, "logger": CSVLogger(directory), "enable_checkpointing": True},
    )
    trainer.fit(task, train, validation)
    revalidated = trainer.validate(task, validation, ckpt_path="best", verbose=False)
    score = float(best.best_model_score or 0)
    return trainer.current_epoch, best.best_model_path, score, revalidated[0]


def test_callbacks_act_alike_on_all_ranks(pool: RankPool, tmp_path: Path) -> None:
    results = pool.run(with_callbacks, 3, str(tmp_path))
    assert all(outcome == results[0] for outcome in results)
    epochs, best, score, revalidated = results[0]
    assert epochs == 2, "early stopping ended the run after one epoch without improvement"
    assert Path(best).is_file()
    assert revalidated["val_loss"] == pytest.approx(score, rel=1e-5)
    (log,) = tmp_path.rglob("metrics.csv")
    assert "lr-SGD" in log.read_text()


class Contrastive(Task):
    """A task whose loss compares samples, which needs the whole batch."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        out = self.net(batch[0])
        return (out @ out.T).square().mean()


def fit_and_validate(context: RankContext) -> list[str]:
    """Return the schedule after `fit`, and after a validation that follows."""
    task = Contrastive("mlp")
    train, validation = loaders(task, 16, 8, False, 0, torch.float32)
    trainer, schedules = Trainer(**strategy_for(context), max_epochs=1, **QUIET), []
    for run in (lambda: trainer.fit(task, train), lambda: trainer.validate(task, validation)):
        run()
        schedules.append(trainer.strategy.schedule)  # type: ignore[attr-defined]
    return schedules


def test_a_validation_leaves_the_schedule_of_the_last_fit(pool: RankPool) -> None:
    assert pool.run(fit_and_validate, 2) == [["gpipe", "gpipe"]] * 2


class NormalizedSGD(torch.optim.SGD):
    """SGD by the gradients divided by their norm over all parameters."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        loss = closure()
        parameters = [p for group in self.param_groups for p in group["params"]]
        torch.nn.utils.clip_grad_norm_(parameters, 0.1)
        super().step()
        return loss


class OneStage(Classifier):
    def configure_optimizers(self) -> Any:
        return NormalizedSGD(self.parameters(), lr=0.1, momentum=0.9)


REPLICAS = {
    "one stage": Case(
        OneStage, options={"stages": 1, "plan": PipelinePlan(replicas=((0,), (1,)), split=(5,))}
    )
}


def test_replicas_of_one_stage_take_an_optimizer_over_all_parameters(pool: RankPool) -> None:
    assert pool.run(differences_in, 2, REPLICAS) == no_differences_in(REPLICAS)


def evaluate_and_predict(context: RankContext | None) -> Any:
    """Validate, test and predict without training before."""
    seed_everything(3, verbose=False)
    task = Task("gpt_list")
    _, validation = loaders(task, 8, 8, False, 0, torch.float32)
    options = strategy_for(context, stages=2) if context else {"accelerator": "cpu", "devices": 1}
    trainer = Trainer(**options, **QUIET)
    validated = trainer.validate(task, validation, verbose=False)
    tested = trainer.test(task, validation, verbose=False)
    return validated, tested, torch.cat(trainer.predict(task, validation))


def evaluate_plainly(context: RankContext) -> Any:
    return evaluate_and_predict(None)


@pytest.mark.parametrize("ranks", [2, 4])
def test_validate_test_and_predict_equal_a_single_device(pool: RankPool, ranks: int) -> None:
    ((validated, tested, predicted),) = pool.run(evaluate_plainly, 1)
    for outcome in pool.run(evaluate_and_predict, ranks):
        for results, expected in ((outcome[0], validated), (outcome[1], tested)):
            assert results[0].keys() == expected[0].keys()
            for name, value in expected[0].items():
                assert results[0][name] == pytest.approx(value, rel=1e-5)
        assert torch.equal(outcome[2], predicted)


class MadeOnMeta(Task):
    """Model that makes its network on the meta device."""

    def __init__(self) -> None:
        super().__init__("mlp", metrics=False)
        del self.net

    def configure_model(self) -> None:
        if not hasattr(self, "net"):
            with torch.device("meta"):
                self.net = nn.Sequential(
                    nn.Linear(16, 24),
                    nn.LayerNorm(24),
                    nn.Tanh(),
                    nn.Linear(24, 24),
                    nn.Linear(24, 5),
                )


def fit_made_on_meta(context: RankContext, stages: int, path: str) -> Any:
    """Train and save a model; no rank ever holds all of its parameters."""
    seed_everything(3, verbose=False)
    model = MadeOnMeta()
    strategy = strategy_for(context, stages=stages, schedule="gpipe")
    trainer = Trainer(**strategy, max_epochs=1, **QUIET)
    trainer.fit(model, loaders(model, 24, 8, False, 0, torch.float32)[0])
    held = [name for name, p in model.named_parameters() if not p.is_meta]
    trainer.save_checkpoint(path)
    return held, float(trainer.callback_metrics["train_loss"])


def load_made_on_meta(context: RankContext, path: str) -> float:
    """Resume a checkpoint of the model that was made on the meta device."""
    model = MadeOnMeta()
    trainer = Trainer(
        **strategy_for(context, stages=2),
        max_epochs=2,
        **QUIET,
    )
    trainer.fit(model, loaders(model, 24, 8, False, 0, torch.float32)[0], ckpt_path=path)
    return float(trainer.callback_metrics["train_loss"])


def test_a_model_made_on_meta_is_materialised_only_on_its_own_stages(
    pool: RankPool, tmp_path: Path
) -> None:
    first, second = pool.run(fit_made_on_meta, 2, 2, str(tmp_path / "two.ckpt"))
    assert first[0]
    assert second[0]
    assert not set(first[0]) & set(second[0])
    others = pool.run(fit_made_on_meta, 3, 3, str(tmp_path / "three.ckpt"))
    assert others[0][1] == pytest.approx(first[1], rel=1e-5), (
        "initial values do not depend on the plan"
    )
    two, three = (
        torch.load(tmp_path / f"{n}.ckpt", weights_only=False)["state_dict"]
        for n in ("two", "three")
    )
    for name, value in two.items():
        assert relative(three[name], value) <= 1e-5
    losses = pool.run(load_made_on_meta, 2, str(tmp_path / "three.ckpt"))
    assert losses[0] == losses[1] < first[1]


class Stream(IterableDataset[Any]):
    """Dataset without a length."""

    def __iter__(self) -> Any:
        source = Samples(False, 21)
        return (source[index] for index in range(len(source)))


def fit_stream(context: RankContext | None) -> Any:
    """Train from a loader of unknown length."""
    seed_everything(3, verbose=False)
    task = Task("mlp", metrics=False)
    options = strategy_for(context) if context else {"accelerator": "cpu", "devices": 1}
    trainer = Trainer(**options, max_epochs=2, **QUIET)
    trainer.fit(task, DataLoader(Stream(), batch_size=8))
    return trainer.global_step, {n: p.detach() for n, p in task.named_parameters()}


def stream_plainly(context: RankContext) -> Any:
    return fit_stream(None)


def test_training_works_with_a_loader_of_unknown_length(pool: RankPool) -> None:
    ((steps, weights),) = pool.run(stream_plainly, 1)
    for results in pool.run(fit_stream, 2):
        assert results[0] == steps
        for name, value in weights.items():
            assert relative(results[1][name], value) <= 1e-5


class Extra(Task):
    """Model whose step returns more than a loss."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return {"loss": super().training_step(batch, batch_idx), "size": len(batch[0])}


class RecordsOutputs(Callback):
    """Callback that records the outputs that `on_train_batch_end` gets."""

    def __init__(self) -> None:
        self.seen: list[Any] = []

    def on_train_batch_end(
        self, trainer: Trainer, module: LightningModule, outputs: Any, *args: Any
    ) -> None:
        self.seen.append({key: float(value) for key, value in outputs.items()})


def fast_dev_run(context: RankContext) -> Any:
    """Run one batch of every loop, without a seed, with a profiled plan."""
    task, outputs = Extra("gpt"), RecordsOutputs()
    train, validation = loaders(task, 24, 8, True, 0, torch.float32)
    trainer = Trainer(
        **strategy_for(context, schedule="gpipe", profile=ProfileConfig()),
        fast_dev_run=True,
        callbacks=[outputs],
        **QUIET,
    )
    trainer.fit(task, train, validation)
    plan = trainer.strategy.plan
    return outputs.seen, plan.to_json(), {n: p.detach() for n, p in task.named_parameters()}


def test_fast_dev_run_gives_outputs_and_a_measured_plan(pool: RankPool) -> None:
    results = pool.run(fast_dev_run, 3)
    assert all(
        seen == results[0][0] and len(seen) == 1 and seen[0]["size"] == 8.0
        for seen, _, _ in results
    )
    assert all(plan == results[0][1] for _, plan, _ in results)
    assert '"power"' in results[0][1]
    for _, _, weights in results:
        assert all(torch.equal(weights[name], value) for name, value in results[0][2].items())


def fit_measured(context: RankContext, measured: bool) -> dict[str, Tensor]:
    """Train with or without profiling before."""
    seed_everything(3, verbose=False)
    task = Task("cnn")
    options: dict[str, Any] = {"profile": ProfileConfig()}
    if not measured:
        options = {"plan": PipelinePlan(replicas=((0, 1),), split=(5, 6))}
    trainer = Trainer(
        **strategy_for(context, **options),
        max_epochs=2,
        **QUIET,
    )
    trainer.fit(task, *loaders(task, 24, 8, True, 0, torch.float32))
    return {n: p.detach() for n, p in task.named_parameters()}


def test_profiling_leaves_training_as_it_was(pool: RankPool) -> None:
    with_profile, without = pool.run(fit_measured, 2, True)[0], pool.run(fit_measured, 2, False)[0]
    for name, value in without.items():
        assert relative(with_profile[name], value) <= 1e-5, name
