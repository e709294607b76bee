"""Parameters that other code changes: an error where servers hold them, and allowed elsewhere."""

from __future__ import annotations

import copy
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import BackboneFinetuning, StochasticWeightAveraging
from torch import nn

from lightning_dlres.core.errors import ConfigError
from lightning_dlres.paramserver.execute.worker.edited_parameters import (
    EditedParameters,
    digest_of,
)
from lightning_dlres.strategies.parameter_server.trainer_checks import refuse_callbacks
from tests.strategies.parameter_server.test_training import Regression, distance, fit
from tests.support.rank_pool import RankContext, RankFailure, RankPool

ARGUMENTS: dict[str, Any] = {"model": {"optimizer": "sgd"}, "ranks": 2}


class ClampWeights(Callback):
    """Callback that clamps weights after each step, in a way that leaves no trace."""

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *args: Any) -> None:
        pl_module.net[0].weight.data.clamp_(-0.01, 0.01)


class Teacher(Callback):
    """Callback that lets the frozen layer, which the optimizer has, follow another one."""

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *args: Any) -> None:
        with torch.no_grad():
            pl_module.frozen.bias.lerp_(pl_module.net[-1].bias, 0.2)


class AverageWeights(StochasticWeightAveraging):
    """Weight averaging over the last epochs."""

    def __init__(self) -> None:
        super().__init__(swa_lrs=0.1, swa_epoch_start=2, annealing_epochs=1)


class Unfreeze(Callback):
    """Callback that trains the frozen layer from the second epoch on, after it was changed."""

    def __init__(self) -> None:
        self.changes = False

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        if trainer.current_epoch == 1:
            pl_module.frozen.requires_grad_(True)
            if self.changes:
                pl_module.frozen.bias.data.add_(1.0)


class ChangeAndUnfreeze(Unfreeze):
    """The same for a layer that was changed."""

    def __init__(self) -> None:
        self.changes = True


@pytest.mark.parametrize("callback", [ClampWeights, ChangeAndUnfreeze])
def test_a_change_that_would_be_lost_is_an_error(pool: RankPool, callback: Any) -> None:
    with pytest.raises(RankFailure, match="the change would be lost"):
        pool.run(fit, 2, {}, callbacks=(callback,), max_epochs=2, **ARGUMENTS)


@pytest.mark.parametrize("callback", [Teacher, AverageWeights, Unfreeze])
def test_other_changes_are_those_of_plain_training(pool: RankPool, callback: Any) -> None:
    arguments = {"callbacks": (callback,), "max_epochs": 4, **ARGUMENTS}
    (plain,) = pool.run(fit, 1, None, **arguments)
    for rank in pool.run(fit, 2, {}, **arguments):
        assert distance(rank["weights"], plain["weights"]) < 2e-5


def test_all_ranks_get_the_averages_of_rank_0_where_ranks_do_not_wait(pool: RankPool) -> None:
    (result, averages), (other, _) = pool.run(fit_and_average, 2)
    assert distance(result, averages) == 0
    assert distance(other, averages) == 0


def fit_and_average(context: RankContext) -> tuple[Any, Any]:
    averages: list[Any] = []

    class Watched(AverageWeights):
        def on_train_end(self, trainer: Any, pl_module: Any) -> None:
            super().on_train_end(trainer, pl_module)
            averages.append(copy.deepcopy(pl_module.state_dict()))

    result = fit(context, {"consistency": "asp"}, callbacks=(Watched,), max_epochs=4, **ARGUMENTS)
    return result["weights"], averages[0]


def test_callbacks_that_would_fail_late_are_refused() -> None:
    trainer: Any = SimpleNamespace(callbacks=[BackboneFinetuning()])
    with pytest.raises(ConfigError, match="must not add parameters"):
        refuse_callbacks(trainer, nn.Linear(1, 1))
    trainer = SimpleNamespace(callbacks=[AverageWeights()])
    refuse_callbacks(trainer, nn.Linear(1, 1))
    with pytest.raises(ConfigError, match="with BatchNorm"):
        refuse_callbacks(trainer, nn.Sequential(nn.BatchNorm1d(1)))


@given(
    st.sampled_from([torch.float16, torch.bfloat16, torch.float32, torch.float64]),
    st.integers(1, 40),
    st.booleans(),
    st.data(),
)
def test_any_changed_element_is_seen(
    dtype: torch.dtype, count: int, is_contiguous: bool, data: st.DataObject
) -> None:
    parameter = nn.Parameter(torch.randn(2 * count).to(dtype)[:: 1 if is_contiguous else 2])
    edits = EditedParameters({"p": parameter})
    edits.remember()
    assert edits.names() == []
    index = data.draw(st.integers(0, len(parameter) - 1))
    parameter.data[index] += 1.0
    assert edits.names() == ["p"]


def test_an_empty_parameter_has_a_digest() -> None:
    assert digest_of(torch.empty(0)) == digest_of(torch.empty(0))


def test_the_model_has_a_frozen_layer_in_its_optimizer() -> None:
    model = Regression("sgd")
    (optimizer,), _ = model.configure_optimizers()
    assert any(p is model.frozen.bias for g in optimizer.param_groups for p in g["params"])
