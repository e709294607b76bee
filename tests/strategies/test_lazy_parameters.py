"""Lazy modules that have seen no batch are refused at the start."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_dlres import HeteroPipeStrategy, ParameterServerStrategy
from lightning_dlres.core.errors import ConfigError
from lightning_dlres.strategies.lazy_parameters import refuse_lazy_parameters
from tests.support.models import QUIET
from tests.support.rank_pool import RankContext, RankFailure, RankPool

# torch warns that lazy modules are new.
pytestmark = pytest.mark.filterwarnings("ignore:Lazy modules:UserWarning")
STRATEGIES = {"pipeline": HeteroPipeStrategy, "parameter server": ParameterServerStrategy}


class Lazy(LightningModule):
    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.net = nn.Sequential(layer, nn.Linear(4, 1))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.net(batch).square().mean()

    def train_dataloader(self) -> DataLoader[Any]:
        return DataLoader(torch.randn(4, 4), batch_size=2)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def fit(context: RankContext, kind: str, sees_batch: bool) -> None:
    model = Lazy(nn.LazyLinear(4))
    if sees_batch:
        model.net(torch.randn(2, 4))
    Trainer(
        accelerator="cpu",
        devices=1,
        strategy=STRATEGIES[kind](),
        plugins=[context.environment],
        max_epochs=1,
        **QUIET,
    ).fit(model)


@pytest.mark.parametrize("kind", STRATEGIES)
def test_a_lazy_module_is_named_before_training(pool: RankPool, kind: str) -> None:
    with pytest.raises(
        RankFailure, match=r"got 'net\.0\.weight' of a LazyLinear without one"
    ) as info:
        pool.run(fit, 1, kind, False)
    assert info.value.errors[0][0] == "ConfigError"
    pool.run(fit, 1, kind, True)


def test_buffers_count_too() -> None:
    layer = nn.LazyBatchNorm1d(affine=False)
    with pytest.raises(ConfigError, match=r"got 'net\.0\.running_mean' of a LazyBatchNorm1d"):
        refuse_lazy_parameters(Lazy(layer))
    layer(torch.randn(3, 4))
    refuse_lazy_parameters(Lazy(layer))
