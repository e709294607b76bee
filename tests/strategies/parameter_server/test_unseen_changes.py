"""Changes of gradients and optimizers where the strategy cannot see them: exact, or an error."""

from __future__ import annotations

import math
from collections import defaultdict
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch.plugins.precision import Precision

from lightning_dlres.paramserver.execute.worker.edited_parameters import EditedParameters
from lightning_dlres.paramserver.setup.model_keys import keys_of
from lightning_dlres.strategies.parameter_server.clipping import Clipping
from lightning_dlres.strategies.parameter_server.remote_update import (
    RemoteUpdates,
    _PushedGradient,
)
from tests.strategies.parameter_server.test_training import Regression, distance, fit
from tests.support.rank_pool import RankFailure, RankPool

ARGUMENTS: dict[str, Any] = {"model": {"optimizer": "sgd"}, "ranks": 2}


class HalvingPlugin(Precision):
    """Plugin that halves gradients, in a way that leaves no trace."""

    def optimizer_step(self, optimizer: Any, model: Any, closure: Any, **kwargs: Any) -> Any:  # type: ignore[override]
        def halved() -> Any:
            loss = closure()
            for parameter in model.parameters():
                if parameter.grad is not None:
                    parameter.grad.data.mul_(0.5)
            return loss

        return optimizer.step(closure=halved, **kwargs)


class HalvingHooks(Callback):
    """Hooks that halve gradients, attached when training has begun."""

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        def halve(parameter: Any) -> None:
            parameter.grad.data.mul_(0.5)

        for parameter in pl_module.net.parameters():
            parameter.register_post_accumulate_grad_hook(halve)


class FreezeBeforeStep(Callback):
    """The network is frozen between backward and the step, as some code for GANs does."""

    def on_train_batch_start(self, trainer: Any, pl_module: Any, *args: Any) -> None:
        pl_module.net.requires_grad_(True)

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        pl_module.net.requires_grad_(False)

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        pl_module.net.requires_grad_(True)


class LateStepHook(Callback):
    """Hook of the optimizer's step that changes options, attached in training."""

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        def change(optimizer: Any, *args: Any) -> None:
            for group in optimizer.param_groups:
                group["lr"] *= 0.9

        trainer.optimizers[0].register_step_pre_hook(change)


class LateAlias(Callback):
    """Two weights with equal values share their memory from some batch on."""

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        pl_module.net[0].bias.requires_grad_(False)
        pl_module.net[1].bias.requires_grad_(False)
        for layer in pl_module.net[:2]:
            layer.bias.data.zero_()

    def on_train_batch_start(self, trainer: Any, pl_module: Any, *args: Any) -> None:
        if trainer.global_step == 2:
            first, second = pl_module.net[0].bias, pl_module.net[1].bias
            second.data = first.data
            first.requires_grad_(True)
            second.requires_grad_(True)


class NewOptimizer(Callback):
    """The optimizer is replaced in training."""

    def on_train_batch_start(self, trainer: Any, pl_module: Any, *args: Any) -> None:
        if trainer.global_step == 2:
            trainer.strategy.optimizers = [torch.optim.SGD(pl_module.parameters(), lr=0.1)]


class LoadedState(Callback):
    """The optimizer gets a state in training."""

    def on_train_batch_start(self, trainer: Any, pl_module: Any, *args: Any) -> None:
        if trainer.global_step == 2:
            parameters = [p for g in trainer.optimizers[0].param_groups for p in g["params"]]
            state = trainer.optimizers[0].state_dict()
            state["state"] = {
                index: {"momentum_buffer": torch.zeros_like(parameter)}
                for index, parameter in enumerate(parameters)
            }
            trainer.optimizers[0].load_state_dict(state)


class ClearedState(Callback):
    """Momentum begins anew in training.

    Args:
        replaces: Whether the state is replaced, and not cleared.
    """

    def __init__(self, replaces: bool) -> None:
        self._replaces = replaces

    def on_train_batch_start(self, trainer: Any, pl_module: Any, *args: Any) -> None:
        if trainer.global_step == 2:
            if self._replaces:
                trainer.optimizers[0].state = defaultdict(dict)
            else:
                trainer.optimizers[0].state.clear()


@pytest.mark.parametrize(
    "arguments",
    [
        {"precision_plugin": HalvingPlugin},
        {"callbacks": (HalvingHooks,)},
        {"callbacks": (FreezeBeforeStep,)},
        {"callbacks": (LateStepHook,)},
    ],
    ids=["plugin", "hooks", "freeze", "step"],
)
def test_late_changes_count_as_in_plain_training(pool: RankPool, arguments: dict[str, Any]) -> None:
    arguments = {**ARGUMENTS, **arguments}
    (plain,) = pool.run(fit, 1, None, **arguments)
    for rank in pool.run(fit, 2, {}, **arguments):
        assert distance(rank["weights"], plain["weights"]) < 2e-5


@pytest.mark.parametrize(
    ("callback", "message"),
    [
        (NewOptimizer, "optimizers must stay those of the start of fit, got another SGD"),
        (LoadedState, "optimizer.state must be empty on a rank"),
        (LateAlias, "memory of their own for a parameter server"),
        (partial(ClearedState, True), "optimizer.state must be empty on a rank"),
        (partial(ClearedState, False), "optimizer.state must stay as it is in fit"),
    ],
)
def test_what_would_be_lost_is_an_error(pool: RankPool, callback: Any, message: str) -> None:
    with pytest.raises(RankFailure, match=message):
        pool.run(fit, 2, {}, callbacks=(callback,), **ARGUMENTS)


@pytest.mark.parametrize("shape", [(), (0,), (3,), (40, 50), (2, 3, 8, 8)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_writes_to_data_are_noticed(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    gradient = torch.ones(shape, dtype=dtype)
    if gradient.dim() == 4:
        gradient = gradient.to(memory_format=torch.channels_last)
    pushed = _PushedGradient(gradient)
    assert not pushed.has_changed(gradient)
    assert pushed.has_changed(None)
    assert pushed.has_changed(gradient.clone())
    gradient.data.mul_(0.5)
    assert pushed.has_changed(gradient) == (gradient.numel() > 0)


def test_nan_is_no_change() -> None:
    gradient = torch.full((5,), math.nan)
    pushed = _PushedGradient(gradient)
    assert not pushed.has_changed(gradient)


class RawSteps(Regression):
    """Manual optimization that steps torch's optimizer, and not Lightning's wrapper.

    Args:
        optimizer: Name of the optimizer.
        by_trainer: Whether the optimizer is that of the Trainer.
    """

    def __init__(self, optimizer: str, *, by_trainer: bool) -> None:
        super().__init__(optimizer, manual=True)
        self._by_trainer = by_trainer

    def optimizers(self, use_pl_optimizer: bool = True) -> Any:
        if self._by_trainer:
            return self.trainer.optimizers[0]
        return super().optimizers(use_pl_optimizer=False)


@pytest.mark.parametrize("by_trainer", [True, False])
def test_a_raw_optimizer_updates_on_the_servers(pool: RankPool, by_trainer: bool) -> None:
    arguments: dict[str, Any] = {"model": {"optimizer": "sgd", "by_trainer": by_trainer}}
    (plain,) = pool.run(fit, 1, None, kind=RawSteps, ranks=1, **arguments)
    ours = pool.run(fit, 2, {}, kind=RawSteps, ranks=2, **arguments)
    assert all(distance(rank["weights"], plain["weights"]) < 2e-5 for rank in ours)


class ClipsAlways(Regression):
    """Manual optimization that clips in each step; in some, rank 1 has no gradient.

    Args:
        optimizer: Name of the optimizer.
    """

    def __init__(self, optimizer: str) -> None:
        super().__init__(optimizer, manual=True)

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        loss = torch.nn.functional.mse_loss(self.net(batch[0]), batch[1])
        skips = self.trainer.world_size == 2 and batch_idx % 3 == 1
        if self.trainer.world_size == 1 and batch_idx % 3 == 1:
            # The first half of the joint batch counts, and the other one is of rank 1.
            half = len(batch[0]) // 2
            loss = torch.nn.functional.mse_loss(self.net(batch[0][:half]), batch[1][:half]) / 2
        if not skips or self.trainer.global_rank == 0:
            self.manual_backward(loss)
        self.clip_gradients(optimizer, 0.05, "norm")
        optimizer.step()


def test_a_rank_without_gradients_clips_like_the_others(pool: RankPool) -> None:
    arguments: dict[str, Any] = {"model": {"optimizer": "sgd"}, "kind": ClipsAlways}
    (plain,) = pool.run(fit, 1, None, ranks=1, **arguments)
    for rank in pool.run(fit, 2, {}, ranks=2, **arguments):
        assert distance(rank["weights"], plain["weights"]) < 2e-5


def test_values_that_land_in_a_frozen_layer_are_no_change() -> None:
    """A checkpoint may bring late pushes of other ranks to a layer that is frozen since."""
    model = torch.nn.Linear(3, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    kept: list[Any] = []

    def refresh(*, without: Any) -> None:
        kept.extend(without)
        model.weight.data.add_(1.0)

    session: Any = SimpleNamespace(refresh=refresh)
    keys = keys_of(model, [optimizer], 1, 64 << 10)
    updates = RemoteUpdates(session, keys, [optimizer], Clipping(), lambda: False)
    model.requires_grad_(False)
    model.bias.data.add_(1.0)
    updates.refresh()
    # Other code has changed the bias, and the change is its own when the layer is trained again.
    assert kept == ["bias"]
    model.weight.requires_grad_(True)
    assert not updates.are_edited()
    model.bias.requires_grad_(True)
    assert updates.are_edited()


def test_an_alias_that_is_trained_later_is_noticed() -> None:
    parameter = torch.nn.Parameter(torch.zeros(3))
    alias = torch.nn.Parameter(parameter.data, requires_grad=False)
    edits = EditedParameters({"p": parameter, "alias": alias})
    assert edits.have_moved()
    assert not edits.have_moved()
    alias.requires_grad_(True)
    assert edits.have_moved()


class OtherClipping(Callback):
    """The Trainer's bound of the norm changes in training.

    Args:
        first, then: Bounds before and after the fourth batch.
    """

    def __init__(self, first: float | None, then: float | None) -> None:
        self._first, self._then = first, then

    def on_train_batch_start(
        self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int
    ) -> None:
        trainer.gradient_clip_val = self._first if batch_idx < 4 else self._then


@pytest.mark.parametrize("bounds", [(None, 0.02), (0.02, None), (0.5, 0.02)])
@pytest.mark.parametrize("overlap", [True, False])
def test_the_trainers_bound_may_change(pool: RankPool, bounds: Any, overlap: bool) -> None:
    arguments: dict[str, Any] = {**ARGUMENTS, "callbacks": (partial(OtherClipping, *bounds),)}
    (plain,) = pool.run(fit, 1, None, **arguments)
    for rank in pool.run(fit, 2, {"overlap": overlap}, **arguments):
        assert distance(rank["weights"], plain["weights"]) < 2e-5


class FreezeOnce(Callback):
    """The network is frozen after one backward, and trained again from the next epoch on."""

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        if trainer.global_step == 3:
            pl_module.net.requires_grad_(False)

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        pl_module.net.requires_grad_(True)


def test_a_layer_may_be_frozen_before_its_step_and_trained_later(pool: RankPool) -> None:
    arguments: dict[str, Any] = {**ARGUMENTS, "callbacks": (FreezeOnce,), "max_epochs": 2}
    arguments["model"] = {"optimizer": "sgd", "trains_all": True}
    (plain,) = pool.run(fit, 1, None, kind=PartlyFrozen, **arguments)
    for rank in pool.run(fit, 2, {}, kind=PartlyFrozen, **arguments):
        assert distance(rank["weights"], plain["weights"]) < 2e-5


class PartlyFrozen(Regression):
    """Network whose last layer stays trained while the others are frozen."""

    def __init__(self, optimizer: str, *, trains_all: bool) -> None:
        super().__init__(optimizer)
        self.frozen.requires_grad_(trains_all)


@pytest.mark.parametrize("is_contiguous", [True, False])
def test_permuted_weights_have_changed(is_contiguous: bool) -> None:
    parameter = torch.nn.Parameter(torch.randn(6, 8)[:, :: 1 if is_contiguous else 2])
    edits = EditedParameters({"p": parameter})
    edits.remember()
    with torch.no_grad():
        parameter.copy_(parameter.roll(1, 0))
    assert edits.names() == ["p"]


class OtherGroups(Callback):
    """Groups of the optimizer change before the fourth batch.

    Args:
        change: Which change: "emptied", "moved" or "deleted".
    """

    def __init__(self, change: str) -> None:
        self._change = change

    def on_train_batch_start(
        self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int
    ) -> None:
        groups = trainer.optimizers[0].param_groups
        if batch_idx != 4:
            return
        if self._change == "emptied":
            groups[0]["params"] = []
        elif self._change == "deleted":
            del groups[0]
        else:
            groups[1]["params"].append(groups[0]["params"].pop())


class TwoRates(Regression):
    """Network whose optimizer has two groups with different rates."""

    def configure_optimizers(self) -> Any:
        first = [*self.net[0].parameters(), *self.net[1].parameters()]
        groups = [
            {"params": first, "lr": 0.05},
            {"params": list(self.net[3].parameters()), "lr": 0.01},
        ]
        return torch.optim.SGD(groups, momentum=0.9)


@pytest.mark.parametrize("change", ["emptied", "moved", "deleted"])
def test_groups_may_change_between_steps(pool: RankPool, change: str, tmp_path: Path) -> None:
    arguments: dict[str, Any] = {**ARGUMENTS, "kind": TwoRates}
    arguments["callbacks"] = (partial(OtherGroups, change),)
    path = str(tmp_path / "groups.ckpt")
    (plain,) = pool.run(fit, 1, None, **arguments)
    for rank in pool.run(fit, 2, {}, save=path, **arguments):
        assert distance(rank["weights"], plain["weights"]) < 2e-5
    saved = torch.load(path, weights_only=True)["optimizer_states"][0]
    indices = {index for group in saved["param_groups"] for index in group["params"]}
    assert saved["state"].keys() == indices
