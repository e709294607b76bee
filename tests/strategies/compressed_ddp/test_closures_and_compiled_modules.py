"""Optimizers with closures and compiled modules, compared with Lightning's DDPStrategy."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer, seed_everything
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from lightning_dlres.core.errors import ConfigError
from lightning_dlres.strategies import CompressedDDPStrategy
from tests.support.models import QUIET
from tests.support.rank_pool import RankContext, RankPool


class Small(LightningModule):
    """Small network.

    Args:
        optimizer: Class in `torch.optim`.
        options: Arguments of the optimizer.
    """

    def __init__(self, optimizer: str, options: dict[str, Any]) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.net = nn.Sequential(nn.Linear(12, 32), nn.Tanh(), nn.Linear(32, 1))
        self._optimizer, self._options = optimizer, options

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return F.mse_loss(self.net(batch[0]), batch[1])

    def configure_optimizers(self) -> Any:
        return getattr(torch.optim, self._optimizer)(self.parameters(), **self._options)


def fit(
    context: RankContext,
    algorithm: str | None,
    optimizer: str,
    options: dict[str, Any],
    is_compiled: bool,
) -> dict[str, Tensor]:
    """Return the weights after two epochs.

    Args:
        context: This rank.
        algorithm: Algorithm of CompressedDDPStrategy; None trains with DDPStrategy.
        optimizer: Class in `torch.optim`.
        options: Arguments of the optimizer.
        is_compiled: True compiles the module.
    """
    seed_everything(5, verbose=False)
    x = torch.randn(48, 12)
    module: Any = Small(optimizer, options)
    trainer = Trainer(
        strategy=DDPStrategy(process_group_backend="gloo")
        if algorithm is None
        else CompressedDDPStrategy(
            algorithm=algorithm, topology="ps", coordinator="none", min_bytes=0, timeout=30.0
        ),
        accelerator="cpu",
        devices=context.world_size,
        plugins=[context.environment],
        max_epochs=2,
        **QUIET,
    )
    trained = torch.compile(module, backend="eager") if is_compiled else module
    trainer.fit(trained, DataLoader(TensorDataset(x, x.mean(1, keepdim=True)), batch_size=4))
    return copy.deepcopy(module.state_dict())


LBFGS = {"lr": 0.1, "max_iter": 4, "history_size": 4, "tolerance_change": 0}


@pytest.mark.parametrize(
    ("optimizer", "options", "is_compiled"),
    [("LBFGS", LBFGS, False), ("SGD", {"lr": 0.05, "momentum": 0.9}, True)],
)
def test_training_is_that_of_ddp(
    pool: RankPool, optimizer: str, options: dict[str, Any], is_compiled: bool
) -> None:
    plain, _ = pool.run(fit, 2, None, optimizer, options, is_compiled)
    for algorithm, tolerance in (("none", 0.0), ("raw", 1e-6), ("int8", 0.05)):
        ours, other = pool.run(fit, 2, algorithm, optimizer, options, is_compiled)
        for name, weight in plain.items():
            assert torch.equal(ours[name], other[name])
            torch.testing.assert_close(ours[name], weight, rtol=0, atol=tolerance)


def refused_options(context: RankContext, changed: dict[str, Any]) -> str:
    options = {**LBFGS, **changed}
    with pytest.raises(ConfigError) as error:
        fit(context, "raw", "LBFGS", options, False)
    return str(error.value)


def test_a_line_search_of_several_ranks_is_refused(pool: RankPool) -> None:
    """Each rank would search along its own losses, and so call backward more or less often.

    With DDPStrategy, the ranks then wait for each other, or lose their connections.
    """
    assert set(pool.run(refused_options, 2, {"line_search_fn": "strong_wolfe"})) == {
        "line_search_fn must be None with several ranks, whose losses differ, got 'strong_wolfe'. "
        "Use LBFGS(..., line_search_fn=None)."
    }
    assert set(pool.run(refused_options, 2, {"tolerance_change": 1e-9})) == {
        "tolerance_change must be 0 with several ranks, whose losses differ, got 1e-09. "
        "Use LBFGS(..., tolerance_change=0)."
    }
