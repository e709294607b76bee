"""Changes of gradients and optimizers where the strategy cannot see them: exact, or an error."""

from __future__ import annotations

import math
from collections import defaultdict
from functools import partial
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch.plugins.precision import Precision

from lightning_dlres.strategies.parameter_server.remote_update import _PushedGradient
from tests.strategies.parameter_server.test_training import distance, fit
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
