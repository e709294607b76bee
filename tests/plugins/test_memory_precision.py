"""MemoryPrecision: weights equal those of Lightning's own plugin, and checkpoints fit both."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins.precision import MixedPrecision, Precision
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor

import lightning_dlres as dlres
from lightning_dlres.core.errors import ConfigError
from tests.support.networks import CASES
from tests.support.offload_tasks import Gan, Regression, batches, checkpoint_of, fit, require_same
from tests.support.rank_pool import RankContext, RankPool

KINDS = ["32-true", "bf16-mixed", "16-mixed", "bf16-true"]


def plain_options(kind: str) -> dict[str, Any]:
    # Lightning replaces "16-mixed" by bf16 on the CPU, although torch supports it by now.
    if kind == "16-mixed":
        return {"plugins": MixedPrecision("16-mixed", "cpu")}
    return {"precision": kind}


def plugin(kind: str = "32-true", **options: Any) -> dlres.MemoryPrecision:
    return dlres.MemoryPrecision(kind, **{"budget": "min", "min_size": 1, **options})  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["cnn", "gpt"])
@pytest.mark.parametrize("kind", KINDS)
def test_weights_equal_those_of_plain_training(kind: str, name: str) -> None:
    options = {"gradient_clip_val": 0.5, "accumulate_grad_batches": 2, "max_epochs": 2}
    ours = plugin(kind)
    require_same(
        fit(Regression(name), batches(name), **options, **plain_options(kind)),
        fit(Regression(name), batches(name), plugins=ours, **options),
    )
    assert ours.plan is not None
    assert ours.training_steps is not None
    assert ours.training_steps.offloader is not None
    assert ours.training_steps.offloader.measurements.mismatches == []


@pytest.mark.parametrize("name", CASES)
def test_a_saved_budget_of_one_half_is_met(name: str) -> None:
    ours = plugin(budget="1TiB", saved_budget=0.6)
    require_same(
        fit(Regression(name), batches(name)), fit(Regression(name), batches(name), plugins=ours)
    )
    assert ours.plan is not None
    assert ours.plan.saved_peak <= 0.6 * ours.plan.plain_saved_peak


def test_two_optimizers_by_hand() -> None:
    ours = plugin()
    require_same(fit(Gan(), batches("gan")), fit(Gan(), batches("gan"), plugins=ours))
    assert ours.plan is not None


class Overflows(Regression):
    """Task whose loss overflows at times: the scaler skips these steps, and grows in between."""

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        return loss * 1e30 if batch_idx == 2 else loss


@pytest.mark.parametrize("first", [True, False], ids=["from ours", "from Lightning's"])
@pytest.mark.parametrize("second", [True, False], ids=["to ours", "to Lightning's"])
def test_the_scaler_survives_a_checkpoint(tmp_path: Path, first: bool, second: bool) -> None:
    def options(with_ours: bool) -> dict[str, Any]:
        return {"plugins": plugin("16-mixed")} if with_ours else plain_options("16-mixed")

    keeper = ModelCheckpoint(tmp_path, every_n_train_steps=4)
    fit(
        Overflows("cnn"),
        batches("cnn"),
        keeper,
        enable_checkpointing=True,
        max_steps=4,
        **options(first),
    )
    path = checkpoint_of(tmp_path)
    state = torch.load(path, weights_only=True)["MixedPrecision"]
    assert state["scale"] < 65536.0
    seen: list[dict[str, Any]] = []

    class Shows(Overflows):
        def on_train_start(self) -> None:
            precision = self.trainer.precision_plugin
            seen.append(precision.scaler.state_dict())  # type: ignore[attr-defined]

    resumed = fit(Shows("cnn"), batches("cnn"), max_epochs=2, ckpt_path=path, **options(second))
    assert seen == [state]
    plain = fit(Shows("cnn"), batches("cnn"), max_epochs=2, ckpt_path=path, **options(False))
    require_same(plain, resumed)


class FailsOnce(Regression):
    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        if batch_idx == 4 and not hasattr(self, "failed"):
            self.failed = True
            raise KeyError("of the user")
        return loss


def test_another_fit_after_an_exception() -> None:
    found = []
    for options in ({}, {"plugins": plugin()}):
        task = FailsOnce("mlp")
        with pytest.raises(KeyError, match="of the user"):
            fit(task, batches("mlp"), **options)
        saved = torch.ones(3, requires_grad=True).exp()
        assert type(saved.grad_fn._saved_result) is Tensor  # type: ignore[union-attr]
        found.append(fit(task, batches("mlp"), **options))
    require_same(*found)


class SkipsSome(Regression):
    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor | None:  # type: ignore[override]
        loss = super().training_step(batch, batch_idx)
        return None if batch_idx in (1, 5) else loss


def test_steps_without_a_loss_are_skipped() -> None:
    require_same(
        fit(SkipsSome("mlp"), batches("mlp"), max_epochs=2),
        fit(SkipsSome("mlp"), batches("mlp"), max_epochs=2, plugins=plugin()),
    )


def fit_with_ddp(context: RankContext, with_ours: bool) -> dict[str, Tensor]:
    ours = [plugin("bf16-mixed")] if with_ours else []
    weights = fit(
        Regression("mlp"),
        batches("mlp"),
        devices=context.world_size,
        strategy=DDPStrategy(process_group_backend="gloo"),
        plugins=[context.environment, *ours],
        max_epochs=2,
        **({} if with_ours else {"precision": "bf16-mixed"}),
    )
    assert all(p.plan is not None for p in ours)
    return weights


def test_two_processes_with_ddp(pool: RankPool) -> None:
    plain = pool.run(fit_with_ddp, 2, False, timeout=120)
    for one, other in zip(plain, pool.run(fit_with_ddp, 2, True, timeout=120), strict=True):
        require_same(one, other)


def test_every_hook_of_a_precision_plugin_is_delegated() -> None:
    names = {
        name
        for name, member in inspect.getmembers(Precision, inspect.isfunction)
        if not name.startswith("_")
    }
    # The plugin's state is written under the name of Lightning's own plugin instead.
    assert names - {"state_dict", "load_state_dict"} <= vars(dlres.MemoryPrecision).keys()


def test_validation_and_prediction_need_no_plan() -> None:
    from lightning.pytorch import Trainer

    from tests.support.models import QUIET

    ours = plugin("bf16-mixed")
    trainer = Trainer(accelerator="cpu", devices=1, plugins=ours, **QUIET)
    trainer.validate(Regression("mlp"), batches("mlp", 2), verbose=False)
    task: LightningModule = Regression("mlp")
    trainer.predict(task, batches("mlp", 2))
    assert ours.plan is None


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"precision": "64"}, "precision must be one of '32-true'.*got '64'"),
        ({"budget": "x"}, "budget must be .*, got 'x'"),
    ],
    ids=str,
)
def test_bad_values_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        dlres.MemoryPrecision(**options)
