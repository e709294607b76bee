"""ActivationOffload: training stays within the budget, with bitwise equal weights."""

from __future__ import annotations

import copy
import gc
import pickle
import random
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.profilers import PyTorchProfiler
from lightning.pytorch.strategies import DDPStrategy, FSDPStrategy
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader

import lightning_dlres as dlres
from lightning_dlres.callbacks.offloading import require_supported
from lightning_dlres.core.errors import ConfigError
from lightning_dlres.memory.execute.actions import MemoryAction
from tests.support.examples import checkered
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

WAYS: dict[str, dict[str, Any]] = {
    "offload": {"budget": "min", "actions": ["offload"]},
    "compress": {"budget": "min", "actions": ["compress"]},
    "both": {"budget": "min", "actions": ["compress", "offload"]},
    "recompute": {"budget": "min", "actions": ["recompute"]},
    "reuse": {"budget": "min", "actions": ["reuse"]},
    "all": {"budget": "min", "actions": ["compress", "offload", "reuse", "recompute"]},
    "half": {"budget": "1TiB", "saved_budget": 0.6},
}


def ours(way: str = "all", **options: Any) -> dlres.ActivationOffload:
    return dlres.ActivationOffload(**{**WAYS[way], "min_size": 1, **options})


@cache
def trained_plainly(name: str) -> dict[str, Tensor]:
    """Return the weights of a task after an epoch without the callback."""
    return fit(Regression(name), batches(name))


@cache
def trained_ours(name: str, way: str) -> tuple[dict[str, Tensor], dlres.ActivationOffload]:
    """Return the weights of a task after an epoch with the callback, and the callback."""
    callback = ours(way)
    return fit(Regression(name), batches(name), callback), callback


@pytest.mark.parametrize(("name", "way"), checkered(CASES, WAYS))
def test_weights_equal_those_of_plain_training(name: str, way: str) -> None:
    weights, callback = trained_ours(name, way)
    require_same_weights(trained_plainly(name), weights)
    assert callback.plan is not None
    assert callback.training_steps is not None
    offloader = callback.training_steps.offloader
    assert offloader is not None
    assert offloader.measurements.steps > 0 or callback.plan.changes_nothing
    assert offloader.measurements.mismatches == []
    # Tensors with fewer zeros than in the measured step compress less than planned.
    is_bounded = way != "compress"
    limit = callback.plan.saved_peak if is_bounded else callback.plan.plain_saved_peak
    assert offloader.measurements.saved_peak <= limit
    gc.collect()
    assert offloader._engine.byte_counter.now == 0


def test_a_plan_uses_the_allowed_actions() -> None:
    seen = {}
    for way in ("offload", "recompute", "all"):
        callback = trained_ours("gpt", way)[1]
        assert callback.plan is not None
        seen[way] = callback.plan
    assert any(d.action is MemoryAction.OFFLOAD for d in seen["offload"].decisions)
    assert seen["recompute"].recompute
    # Measured memory varies a little between runs.
    assert seen["all"].peak <= 1.05 * min(seen["offload"].peak, seen["recompute"].peak)
    assert seen["all"].peak < seen["all"].plain_peak


def test_a_budget_that_holds_everything_changes_nothing() -> None:
    callback = dlres.ActivationOffload()
    weights = fit(Regression("cnn"), batches("cnn"), callback)
    require_same_weights(trained_plainly("cnn"), weights)
    assert callback.plan is not None
    assert callback.plan.changes_nothing


def test_a_budget_that_cannot_be_met_raises_an_error_with_the_smallest() -> None:
    # An integer is a number of bytes, even 1. A float up to 1.0 is a share.
    with pytest.raises(ConfigError, match=r"budget must be at least .* got 1 B"):
        fit(Regression("cnn"), batches("cnn"), ours(budget=1))


def test_two_optimizers_by_hand() -> None:
    callback = ours()
    require_same_weights(fit(Gan(), batches("gan")), fit(Gan(), batches("gan"), callback))
    assert callback.plan is not None


@pytest.mark.parametrize("way", ["all", "offload"])
def test_accumulation_and_validation_in_between(way: str) -> None:
    options = {
        "accumulate_grad_batches": 3,
        "val_check_interval": 2,
        "val_dataloaders": batches("unet", 3),
        "max_epochs": 3,
        "gradient_clip_val": 0.1,
    }
    callback = ours(way)
    require_same_weights(
        fit(Regression("unet"), batches("unet"), **options),
        fit(Regression("unet"), batches("unet"), callback, **options),
    )
    assert callback.plan is not None


def test_changing_sequence_lengths_get_a_plan_each() -> None:
    torch.manual_seed(5)
    data = [torch.randint(11, (3, length)) for length in (10, 4, 10, 4, 10, 4, 7, 10, 4, 7, 7) * 2]
    loader: DataLoader[Any] = DataLoader(data, batch_size=None)  # type: ignore[arg-type]
    callback = ours("offload")
    require_same_weights(fit(Regression("gpt"), loader), fit(Regression("gpt"), loader, callback))
    assert callback.training_steps is not None
    offloader = callback.training_steps.offloader
    assert offloader is not None
    assert offloader.measurements.steps > 0
    assert offloader.measurements.mismatches == []


class Unseen(Regression):
    """Task that saves different tensors for batches of one shape."""

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        wide = batch if batch_idx % 3 else torch.cat([batch, batch[:2].flip(0)])
        return super().training_step(wide, batch_idx)


@pytest.mark.parametrize("way", ["all", "offload", "compress"])
def test_steps_that_mismatch_the_plan_are_exact(way: str) -> None:
    callback = ours(way)
    options = {"max_epochs": 2}
    require_same_weights(
        fit(Unseen("cnn"), batches("cnn"), **options),
        fit(Unseen("cnn"), batches("cnn"), callback, **options),
    )
    assert callback.training_steps is not None
    assert callback.training_steps.offloader is not None
    assert callback.training_steps.offloader.measurements.mismatches
    assert "did not match the plan" in (callback.training_steps.summary() or "")


class Checkpointed(Regression):
    """Task with checkpointing of its own."""

    def forward(self, x: Tensor) -> Tensor:
        middle = len(self.net) // 2
        x = checkpoint(self.net[:middle], x, use_reentrant=False)
        return self.net[middle:](x)


@pytest.mark.parametrize("way", ["all", "recompute"])
def test_a_model_with_its_own_checkpointing(way: str) -> None:
    require_same_weights(
        fit(Checkpointed("mlp"), batches("mlp")),
        fit(Checkpointed("mlp"), batches("mlp"), ours(way)),
    )


def test_a_compiled_model() -> None:
    def task() -> Regression:
        compiled = Regression("mlp")
        compiled.net = torch.compile(compiled.net, backend="aot_eager")  # type: ignore[assignment]
        return compiled

    require_same_weights(fit(task(), batches("mlp")), fit(task(), batches("mlp"), ours("offload")))


class CompiledInPlace(Regression):
    """Task whose network, or whose layers, were compiled in place."""

    def __init__(self, has_whole: bool) -> None:
        super().__init__("mlp")
        for module in [self.net] if has_whole else self.net.children():
            module.compile(backend="aot_eager")


class CompiledFunction(Regression):
    """Task that calls its network in a compiled function."""

    def __init__(self) -> None:
        super().__init__("mlp")
        self.call = torch.compile(lambda x: self.net(x), backend="aot_eager")

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.call(batch).square().mean()


@pytest.mark.parametrize("way", ["offload", "all"])
@pytest.mark.parametrize(
    "make",
    [partial(CompiledInPlace, True), partial(CompiledInPlace, False), CompiledFunction],
    ids=["network", "layers", "function"],
)
def test_parts_that_were_compiled_in_place(make: Callable[[], Regression], way: str) -> None:
    torch.compiler.reset()
    plain = fit(make(), batches("mlp"))
    torch.compiler.reset()
    require_same_weights(plain, fit(make(), batches("mlp"), ours(way)))


class FailsOnce(Regression):
    """Task that raises in one forward."""

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        if batch_idx == 4 and self.trainer.current_epoch == 0 and not hasattr(self, "failed"):
            self.failed = True
            raise KeyError("of the user")
        return loss


def test_another_fit_after_an_exception() -> None:
    weights = []
    for callbacks in ([], [ours()]):
        task = FailsOnce("mlp")
        with pytest.raises(KeyError, match="of the user"):
            fit(task, batches("mlp"), *callbacks)
        assert all("forward" not in vars(module) for module in task.modules())
        # Lightning calls no `teardown` then, and the callback may outlive the model.
        assert all(c.training_steps is not None and c.training_steps.is_closed for c in callbacks)
        weights.append(fit(task, batches("mlp"), *callbacks))
    require_same_weights(*weights)


class SkipsEpoch(Regression):
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> int | None:
        return -1 if batch_idx == 5 else None


def test_an_epoch_that_ends_early() -> None:
    options = {"max_epochs": 3}
    require_same_weights(
        fit(SkipsEpoch("mlp"), batches("mlp"), **options),
        fit(SkipsEpoch("mlp"), batches("mlp"), ours(), **options),
    )


def test_training_resumes_with_and_without_the_callback(tmp_path: Path) -> None:
    for number, (first, second) in enumerate([(True, False), (False, True), (True, True)]):
        directory = tmp_path / str(number)
        keeper = ModelCheckpoint(directory, every_n_train_steps=4, save_top_k=1)
        options = {"enable_checkpointing": True, "max_epochs": 2}
        fit(
            Regression("cnn"),
            batches("cnn"),
            keeper,
            *([ours()] if first else []),
            **{**options, "max_steps": 4, "default_root_dir": directory},
        )
        path = checkpoint_of(directory)
        resumed = fit(
            Regression("cnn"),
            batches("cnn"),
            *([ours()] if second else []),
            **{**options, "ckpt_path": path, "enable_checkpointing": False},
        )
        plain = fit(
            Regression("cnn"),
            batches("cnn"),
            **{**options, "ckpt_path": path, "enable_checkpointing": False},
        )
        require_same_weights(plain, resumed)


class CopiesModel(Callback):
    """Callback that copies and pickles the model in the middle of a step."""

    def on_before_zero_grad(self, trainer: Trainer, pl_module: LightningModule, _: Any) -> None:
        assert isinstance(pl_module, Regression)
        twin = copy.deepcopy(pl_module.net)
        with torch.no_grad():
            for parameter in twin.parameters():
                parameter.zero_()
            x = batches("gpt", 1).dataset[0]
            assert bool((twin(x) == 0).all())
            assert bool((pl_module.net(x) != 0).any())


def test_a_copy_of_the_model_runs_its_own_layers() -> None:
    callback = ours("recompute", budget="1TiB", saved_budget=0.7)
    fit(Regression("gpt"), batches("gpt"), callback, CopiesModel())
    assert callback.plan is not None
    assert callback.plan.recompute


class Nested(LightningModule):
    """Task with nested batches, tied weights, a changing buffer and saved views."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.a, self.norm, self.b = nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 8)
        self.b.weight = self.a.weight

    def training_step(self, batch: dict[str, Any], batch_idx: int) -> dict[str, Tensor]:
        x, extra = batch["x"], batch["more"][0]
        y = self.norm(self.a(x))
        z = torch.relu(self.b(y.t().contiguous().t()))
        out = z[:, 2:6] * extra + z[:, :4].expand(4, 4) * self.a(extra.repeat(1, 2))[:, ::2]
        return {"loss": out.square().mean() + self.norm(z).exp().mean()}

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


@pytest.mark.parametrize("way", WAYS)
def test_structures_views_and_buffers(way: str) -> None:
    torch.manual_seed(4)
    data = [{"x": torch.randn(4, 8), "more": [torch.randn(4, 4), "text"]} for _ in range(7)]
    loader: DataLoader[Any] = DataLoader(data, batch_size=None)  # type: ignore[arg-type]
    require_same_weights(fit(Nested(), loader), fit(Nested(), loader, ours(way)))


def fit_with_ddp(context: RankContext, name: str, way: str | None) -> dict[str, Tensor]:
    options: dict[str, Any] = {
        "devices": context.world_size,
        "strategy": DDPStrategy(process_group_backend="gloo"),
        "plugins": [context.environment],
        "accumulate_grad_batches": 2,
        "max_epochs": 2,
    }
    task, callbacks = Regression(name), [ours(way)] if way else []
    weights = fit(task, batches(name, 14), *callbacks, **options)
    if callbacks:
        assert callbacks[0].plan is not None
    return weights


def compare_with_ddp(context: RankContext, name: str) -> None:
    plain = fit_with_ddp(context, name, None)
    for way in ("offload", "all"):
        require_same_weights(plain, fit_with_ddp(context, name, way))


@pytest.mark.parametrize("name", ["mlp", pytest.param("gpt", marks=pytest.mark.exhaustive)])
def test_two_processes_with_ddp(pool: RankPool, name: str) -> None:
    pool.run(compare_with_ddp, 2, name, timeout=120)


def test_strategies_that_shard_the_model_are_refused() -> None:
    for strategy in (FSDPStrategy(), dlres.HeteroPipeStrategy()):
        with pytest.raises(ConfigError, match="must keep the whole model on its device"):
            require_supported(strategy, "ActivationOffload")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"budget": "8 parsecs"}, ", got '8 parsecs'"),
        ({"budget": 0}, ", got 0"),
        ({"budget": -0.5}, ", got -0.5"),
        ({"budget": True}, ", got True"),
        ({"saved_budget": "min"}, ", got 'min'"),
        ({"host_budget": "much"}, ", got 'much'"),
        ({"min_size": "-1"}, ", got '-1'"),
        ({"actions": "offload"}, ", got 'offload'"),
        ({"actions": ["forget"]}, ", got .'forget'."),
        ({"profile_steps": 0}, ", got 0"),
        ({"exact": 1}, ", got 1"),
        ({"disk": "s3://bucket"}, ", got 's3://bucket'"),
        ({"disk": 3}, ", got 3"),
        ({"disk": ""}, ", got ''"),
        ({"actions": None}, ", got None"),
        ({"actions": [["offload"]]}, ", got .*"),
        ({"profile_steps": True}, ", got True"),
        ({"min_size": 0.5}, ", got 0.5"),
        ({"host_budget": 0.5}, ", got 0.5"),
    ],
    ids=str,
)
def test_bad_values_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        dlres.ActivationOffload(**options)


def test_a_missing_directory_is_refused_before_the_first_step(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="must be an existing directory"):
        fit(Regression("mlp"), batches("mlp"), ours(disk=tmp_path / "absent"))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("as_plugin", [False, True], ids=["callback", "plugin"])
def test_the_report_shows_the_memory_of_a_step(tmp_path: Path, as_plugin: bool) -> None:
    report = dlres.ResourceReport(tmp_path)
    limits: dict[str, Any] = {"saved_budget": 0.6, "budget": "1TiB", "min_size": 1}
    if as_plugin:
        fit(
            Regression("gpt"),
            batches("gpt"),
            report,
            plugins=dlres.MemoryPrecision("32-true", **limits),
        )
    else:
        fit(Regression("gpt"), batches("gpt"), report, dlres.ActivationOffload(**limits))
    assert (tmp_path / "memory.png").read_bytes().startswith(b"\x89PNG")
    text = (tmp_path / "report.md").read_text()
    assert "![memory](memory.png)" in text
    assert "Memory plan: peak" in text
    assert "One step:" in text
    # The next run has no plan, so its report has no picture.
    fit(Regression("gpt"), batches("gpt"), dlres.ResourceReport(tmp_path))
    assert not (tmp_path / "memory.png").exists()


def test_the_profile_has_every_layer() -> None:
    callback = trained_ours("cnn", "offload")[1]
    assert callback.profile is not None
    layers = {layer.name: layer for layer in callback.profile.layers}
    first, norm = layers["net.0"], layers["net.3"]
    assert first.kind == "Conv2d"
    assert first.parameters == first.gradients == 4 * (8 * 3 * 9 + 8)
    # AdamW's two averages, and the number of steps of each parameter.
    assert first.optimizer_state == 2 * first.parameters + 2 * 4
    assert first.feature_maps == 4 * 4 * 3 * 8 * 8
    assert first.feature_map_gradients == 4 * 4 * 8 * 8 * 8
    assert "input" in first.needs
    assert norm.after == ("net.2",)
    assert layers["net.1"].needs == ("output",)
    table = callback.profile.table()
    assert "BatchNorm2d" in table


class Remembers(nn.Module):
    """Block whose forward has a side effect, of one of several kinds."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.calls = how, 0
        self.seen: list[int] = []
        self.inner = nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 16))
        self.register_buffer("count", torch.zeros(1))
        self.register_buffer("order", torch.arange(3.0))

    def forward(self, x: Tensor) -> Tensor:
        scale = 1.0
        if self.how == "counter":
            self.calls += 1
        elif self.how == "list":
            self.seen.append(len(x))
        elif self.how == "buffer":
            self.count.add_(1)
        elif self.how == "order in a buffer":
            self.order.copy_(self.order.roll(1))
            scale = 1.0 + float(self.order[0])
        elif self.how == "python's random state":
            scale = random.random()
        elif self.how == "NumPy's random state":
            scale = float(np.random.rand())
        return self.inner(x) * scale


@pytest.mark.parametrize(
    "how",
    [
        *("counter", "list", "buffer", "order in a buffer", "python's random state"),
        *("NumPy's random state", "nothing"),
    ],
)
def test_modules_with_side_effects_are_not_recomputed(how: str) -> None:
    def train(*callbacks: Callback) -> dict[str, Tensor]:
        random.seed(0)
        np.random.seed(0)
        task = Regression("mlp")
        task.net = nn.Sequential(*(Remembers(how) for _ in range(3)))
        weights = fit(task, batches("mlp"), *callbacks)
        block = task.net[0]
        assert isinstance(block, Remembers)
        # Plain training calls each block once in each of 8 steps.
        assert block.calls == (8 if how == "counter" else 0)
        assert len(block.seen) == (8 if how == "list" else 0)
        return weights

    callback = ours("recompute", budget="1TiB", saved_budget="1TiB")
    plain = train()
    require_same_weights(plain, train(callback))
    assert callback.profile is not None
    names = {region.layer for region in callback.profile.regions}
    assert "net.0.inner" in names
    if how != "nothing":
        assert not names & {"net", "net.0", "net.1", "net.2"}
    forced = ours("all", budget="1TiB", saved_budget=0.8)
    require_same_weights(plain, train(forced))


@pytest.mark.parametrize("text", [True, False], ids=["text", "number"])
def test_budgets_can_be_shares(text: bool) -> None:
    for share in (1.0, 0.6):
        callback = ours("offload", budget="1TiB", saved_budget=str(share) if text else share)
        fit(Regression("mlp"), batches("mlp"), callback)
        assert callback.plan is not None
        assert callback.plan.saved_limit == int(share * callback.plan.plain_saved_peak)


class GradientInForward(torch.autograd.Function):
    """Loss that computes its gradient in forward."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, factor: Tensor) -> Tensor:  # type: ignore[override]
        ctx.save_for_backward(factor)
        return (weight * factor).sum()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # type: ignore[override]
        return ctx.saved_tensors[0], None


class SavedGradient(LightningModule):
    """Task whose weight gradient is a saved tensor, or a sum of two."""

    def __init__(self, size: int, saved: str = "a sum") -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size, size))
        self.other = nn.Parameter(torch.full((size, size), 2.0))
        self.factor = torch.ones(size, size)
        self._saved = saved

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        if self._saved == "a sum":
            loss = GradientInForward.apply(self.weight, self.factor)
            return loss + GradientInForward.apply(self.weight, self.factor)
        saved = {"an attribute": self.factor, "a parameter": self.other, "itself": self.weight}
        return GradientInForward.apply(self.weight, saved[self._saved])

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


# No plan can halve the saved bytes: both losses save the same storage, which backward needs whole.
@pytest.mark.parametrize("way", [None, *(way for way in WAYS if way != "half")])
@pytest.mark.parametrize("size", [4, 256])
def test_saved_tensors_do_not_become_gradients(size: int, way: str | None) -> None:
    callback = ours(way) if way else dlres.ActivationOffload()
    tasks = [SavedGradient(size), SavedGradient(size)]
    plain = fit(tasks[0], batches("mlp"), gradient_clip_val=1.0)
    require_same_weights(plain, fit(tasks[1], batches("mlp"), callback, gradient_clip_val=1.0))
    assert torch.equal(tasks[1].factor, torch.ones(size, size))


@pytest.mark.parametrize("saved", ["an attribute", "a parameter", "itself"])
def test_a_saved_tensor_that_is_a_gradient_is_not_written_to(saved: str) -> None:
    tasks = [SavedGradient(256, saved), SavedGradient(256, saved)]
    plain = fit(tasks[0], batches("mlp"), gradient_clip_val=1.0)
    require_same_weights(
        plain, fit(tasks[1], batches("mlp"), ours("offload"), gradient_clip_val=1.0)
    )
    assert torch.equal(tasks[1].factor, torch.ones(256, 256))


class ChangesInput(nn.Module):
    """Blocks whose input is changed after their use."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.blocks = nn.ModuleList(InputBlock() for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        x = x * 1
        for block in self.blocks:
            if self.how == "by keyword":
                x += block(x=x)
            elif self.how == "in a list":
                x += block(None, [x])
            else:
                x += block(x)
        return x


class InputBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)

    def forward(self, x: Tensor | None = None, xs: list[Tensor] | None = None) -> Tensor:
        value = x if xs is None else xs[0]
        assert value is not None
        return self.linear(torch.relu(value))


@pytest.mark.parametrize("how", ["by position", "by keyword", "in a list"])
def test_modules_whose_inputs_change_later_are_not_recomputed(how: str) -> None:
    def task() -> Regression:
        regression = Regression("mlp")
        torch.manual_seed(1)
        regression.net = ChangesInput(how)  # type: ignore[assignment]
        return regression

    plain = fit(task(), batches("mlp"))
    callback = ours("all", budget="1TiB", saved_budget=0.8)
    require_same_weights(plain, fit(task(), batches("mlp"), callback))
    assert callback.profile is not None
    assert not any(
        region.layer.startswith("net.blocks.")
        for region in callback.profile.regions
        if "linear" not in region.layer
    )


class Profiles(Regression):
    """Task that uses torch's profiler in a step."""

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        with torch.profiler.profile():
            return super().training_step(batch, batch_idx)


def test_other_profilers_keep_working(tmp_path: Path) -> None:
    plain = trained_plainly("mlp")
    require_same_weights(plain, fit(Profiles("mlp"), batches("mlp"), ours("offload")))
    require_same_weights(
        plain,
        fit(
            Regression("mlp"),
            batches("mlp"),
            ours("offload"),
            profiler=PyTorchProfiler(dirpath=tmp_path),
        ),
    )


def test_two_offloading_parts_are_refused() -> None:
    with pytest.raises(ConfigError, match="ActivationOffload and ActivationOffload in one Train"):
        fit(Regression("mlp"), batches("mlp"), ours(), ours())
    with pytest.raises(ConfigError, match="ActivationOffload and MemoryPrecision in one Trainer"):
        fit(Regression("mlp"), batches("mlp"), ours(), plugins=dlres.MemoryPrecision())


class Words(LightningModule):
    """Task with sparse gradients, and a module that is lazy before the first step."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.words = nn.Embedding(50, 16, sparse=True)
        self.net = nn.Sequential(nn.LazyLinear(16), nn.ReLU())

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.net(self.words(batch.abs().long().clamp(max=49))).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.01)


def test_sparse_gradients_and_lazy_modules() -> None:
    def train(*callbacks: Callback) -> dict[str, Tensor]:
        torch.manual_seed(7)
        return fit(Words(), batches("mlp"), *callbacks, accumulate_grad_batches=2)

    require_same_weights(train(), train(ours("offload")))


def test_a_callback_can_be_copied_after_training() -> None:
    callback = ours("offload")
    fit(Regression("mlp"), batches("mlp"), callback)
    twin = pickle.loads(pickle.dumps(copy.deepcopy(callback)))
    require_same_weights(trained_plainly("mlp"), fit(Regression("mlp"), batches("mlp"), twin))
