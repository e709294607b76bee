"""Tests of MemoryPrecision: same weights and checkpoints as with Lightning's precision plugins."""

from __future__ import annotations

import gc
import inspect
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins.precision import MixedPrecision, Precision
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor

import lightning_dlres as dlres
from lightning_dlres.core.errors import ConfigError
from tests.support.examples import checkered
from tests.support.models import QUIET
from tests.support.networks import CASES
from tests.support.offload_tasks import (
    Gan,
    Regression,
    batches,
    checkpoint_of,
    fit,
    require_same_weights,
)
from tests.support.rank_pool import RankContext, RankPool

PRECISIONS = ["32-true", "bf16-mixed", "16-mixed", "bf16-true"]


def lightning_options(precision: str) -> dict[str, Any]:
    # Lightning replaces "16-mixed" by bf16 on the CPU, although torch supports it by now.
    if precision == "16-mixed":
        return {"plugins": MixedPrecision("16-mixed", "cpu")}
    return {"precision": precision}


def memory_plugin(precision: str = "32-true", **options: Any) -> dlres.MemoryPrecision:
    return dlres.MemoryPrecision(precision, **{"budget": "min", "min_size": 1, **options})  # type: ignore[arg-type]


@pytest.mark.parametrize(("precision", "name"), checkered(PRECISIONS, ["cnn", "gpt"]))
def test_weights_equal_those_of_plain_training(precision: str, name: str) -> None:
    options = {"gradient_clip_val": 0.5, "accumulate_grad_batches": 2, "max_epochs": 2}
    memory_precision = memory_plugin(precision)
    require_same_weights(
        fit(Regression(name), batches(name), **options, **lightning_options(precision)),
        fit(Regression(name), batches(name), plugins=memory_precision, **options),
    )
    assert memory_precision.plan is not None
    assert memory_precision.training_steps is not None
    assert memory_precision.training_steps.offloader is not None
    assert memory_precision.training_steps.offloader.measurements.mismatches == []


@pytest.mark.parametrize("name", CASES)
def test_a_budget_for_saved_tensors_is_met(name: str) -> None:
    memory_precision = memory_plugin(budget="1TiB", saved_budget=0.6)
    require_same_weights(
        fit(Regression(name), batches(name)),
        fit(Regression(name), batches(name), plugins=memory_precision),
    )
    assert memory_precision.plan is not None
    assert memory_precision.plan.saved_peak <= 0.6 * memory_precision.plan.plain_saved_peak


def test_manual_optimization_with_two_optimizers_gives_plain_weights() -> None:
    memory_precision = memory_plugin()
    require_same_weights(
        fit(Gan(), batches("gan")), fit(Gan(), batches("gan"), plugins=memory_precision)
    )
    assert memory_precision.plan is not None


class OverflowingTask(Regression):
    """Task whose loss overflows in one step of an epoch. The scaler skips this step,
    and grows its scale between such steps.
    """

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        return loss * 1e30 if batch_idx == 2 else loss


@pytest.mark.parametrize("saved_by_ours", [True, False], ids=["from ours", "from Lightning's"])
@pytest.mark.parametrize("resumed_by_ours", [True, False], ids=["to ours", "to Lightning's"])
def test_a_checkpoint_restores_the_scaler_of_either_plugin(
    tmp_path: Path, saved_by_ours: bool, resumed_by_ours: bool
) -> None:
    def options(with_ours: bool) -> dict[str, Any]:
        return (
            {"plugins": memory_plugin("16-mixed")} if with_ours else lightning_options("16-mixed")
        )

    checkpoint_callback = ModelCheckpoint(tmp_path, every_n_train_steps=4)
    fit(
        OverflowingTask("cnn"),
        batches("cnn"),
        checkpoint_callback,
        enable_checkpointing=True,
        max_steps=4,
        **options(saved_by_ours),
    )
    path = checkpoint_of(tmp_path)
    state = torch.load(path, weights_only=True)["MixedPrecision"]
    assert state["scale"] < 65536.0
    scaler_states: list[dict[str, Any]] = []

    class RecordingTask(OverflowingTask):
        def on_train_start(self) -> None:
            plugin_used = self.trainer.precision_plugin
            scaler_states.append(plugin_used.scaler.state_dict())  # type: ignore[attr-defined]

    resumed = fit(
        RecordingTask("cnn"),
        batches("cnn"),
        max_epochs=2,
        ckpt_path=path,
        **options(resumed_by_ours),
    )
    assert scaler_states == [state]
    plain = fit(
        RecordingTask("cnn"), batches("cnn"), max_epochs=2, ckpt_path=path, **options(False)
    )
    require_same_weights(plain, resumed)


class FailingTask(Regression):
    """Task whose step 4 fails the first time."""

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        if batch_idx == 4 and not hasattr(self, "failed"):
            self.failed = True
            raise KeyError("of the user")
        return loss


def test_fit_after_an_exception_gives_plain_weights() -> None:
    weights = []
    for options in ({}, {"plugins": memory_plugin()}):
        task = FailingTask("mlp")
        with pytest.raises(KeyError, match="of the user"):
            fit(task, batches("mlp"), **options)
        # The hooks for saved tensors are gone after the error.
        saved = torch.ones(3, requires_grad=True).exp()
        assert type(saved.grad_fn._saved_result) is Tensor  # type: ignore[union-attr]
        weights.append(fit(task, batches("mlp"), **options))
    require_same_weights(*weights)


class SkippingTask(Regression):
    """Task whose steps 1 and 5 return None."""

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor | None:  # type: ignore[override]
        loss = super().training_step(batch, batch_idx)
        return None if batch_idx in (1, 5) else loss


def test_steps_that_return_none_give_plain_weights() -> None:
    require_same_weights(
        fit(SkippingTask("mlp"), batches("mlp"), max_epochs=2),
        fit(SkippingTask("mlp"), batches("mlp"), max_epochs=2, plugins=memory_plugin()),
    )


def fit_with_ddp(context: RankContext, with_ours: bool) -> dict[str, Tensor]:
    memory_plugins = [memory_plugin("bf16-mixed")] if with_ours else []
    weights = fit(
        Regression("mlp"),
        batches("mlp"),
        devices=context.world_size,
        strategy=DDPStrategy(process_group_backend="gloo"),
        plugins=[context.environment, *memory_plugins],
        max_epochs=2,
        **({} if with_ours else {"precision": "bf16-mixed"}),
    )
    assert all(p.plan is not None for p in memory_plugins)
    return weights


def test_ddp_gives_the_weights_of_lightnings_plugin(pool: RankPool) -> None:
    plain = pool.run(fit_with_ddp, 2, False, timeout=120)
    for one, other in zip(plain, pool.run(fit_with_ddp, 2, True, timeout=120), strict=True):
        require_same_weights(one, other)


def test_the_plugin_overrides_every_hook_of_a_precision_plugin() -> None:
    names = {
        name
        for name, member in inspect.getmembers(Precision, inspect.isfunction)
        if not name.startswith("_")
    }
    # The plugin's state is written under the name of Lightning's own plugin instead.
    assert names - {"state_dict", "load_state_dict"} <= vars(dlres.MemoryPrecision).keys()


def test_validation_and_prediction_make_no_plan() -> None:
    memory_precision = memory_plugin("bf16-mixed")
    trainer = Trainer(accelerator="cpu", devices=1, plugins=memory_precision, **QUIET)
    trainer.validate(Regression("mlp"), batches("mlp", 2), verbose=False)
    task: LightningModule = Regression("mlp")
    trainer.predict(task, batches("mlp", 2))
    assert memory_precision.plan is None


@pytest.mark.parametrize("kind", [dlres.MemoryPrecision, dlres.ActivationOffload])
def test_the_summary_of_a_fit_is_logged_once(kind: Any, caplog: pytest.LogCaptureFixture) -> None:
    part = kind(budget="min", min_size=1)
    place = "plugins" if kind is dlres.MemoryPrecision else "callbacks"
    trainer = Trainer(**{**QUIET, "accelerator": "cpu", "devices": 1, "max_epochs": 1, place: part})
    task = Regression("mlp")
    with caplog.at_level("INFO"):
        trainer.fit(task, batches("mlp"))
        trainer.validate(task, batches("mlp", 2), verbose=False)
        trainer.predict(task, batches("mlp", 2))
    summary = part.training_steps.summary()
    assert [record.getMessage() for record in caplog.records].count(summary) == 1


def test_a_model_is_freed_while_the_plugin_and_the_batches_are_kept() -> None:
    part, loader, task = memory_plugin(), batches("mlp"), Regression("mlp")
    trainer = Trainer(accelerator="cpu", devices=1, max_epochs=1, plugins=part, **QUIET)
    trainer.fit(task, loader)
    freed = weakref.ref(task)
    del task, trainer
    gc.collect()
    assert freed() is None
    assert part.plan is not None


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"precision": "64"}, "precision must be one of '32-true'.*got '64'"),
        ({"budget": "x"}, "budget must be .*, got 'x'"),
    ],
    ids=str,
)
def test_invalid_arguments_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        dlres.MemoryPrecision(**options)
