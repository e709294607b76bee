"""Residuals in the checkpoints of a Trainer that uses torch's all-reduce."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_dlres.strategies import CompressedDDPStrategy
from lightning_dlres.strategies.compressed_ddp.strategy import CHECKPOINT_KEY
from tests.support.lr_search import FruitlessSearch
from tests.support.models import QUIET
from tests.support.rank_pool import RankContext, RankPool

SIZE = 80


class TwoLayers(LightningModule):
    """Model whose second layer is used by some ranks only.

    Args:
        users: Ranks that use the second layer.
    """

    def __init__(self, users: set[int]) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.lr = 0.01
        self.a, self.b, self.users = nn.Linear(SIZE, SIZE), nn.Linear(SIZE, SIZE), users

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = self.a(batch).square().mean()
        return loss + self.b(batch).square().mean() if self.global_rank in self.users else loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=self.lr)


def fit(context: RankContext, algorithm: str, users: set[int], resume: Any, target: Any) -> None:
    """Train a step, and save a checkpoint."""
    strategy = CompressedDDPStrategy(
        algorithm=algorithm,
        topology="ps",
        coordinator="none",
        min_bytes=0,
        timeout=20.0,
        find_unused_parameters=True,
    )
    trainer = Trainer(
        strategy=strategy,
        accelerator="cpu",
        devices=context.world_size,
        plugins=[context.environment],
        max_steps=1 if resume is None else 2,
        **QUIET,
    )
    data = torch.randn(40, SIZE, generator=torch.Generator().manual_seed(2))
    trainer.fit(TwoLayers(users), DataLoader(data, batch_size=4), ckpt_path=resume)
    trainer.save_checkpoint(target)


def weights_after_a_search(
    context: RankContext, algorithm: str, directory: str, is_searching: bool
) -> dict[str, Tensor]:
    """Return the weights after some steps, with a search of the learning rate before them."""
    trainer = Trainer(
        strategy=CompressedDDPStrategy(
            algorithm=algorithm, topology="ps", coordinator="none", min_bytes=0, timeout=20.0
        ),
        accelerator="cpu",
        devices=context.world_size,
        plugins=[context.environment],
        callbacks=[FruitlessSearch()] if is_searching else [],
        default_root_dir=directory,
        max_steps=4,
        **QUIET,
    )
    module = TwoLayers({0, 1})
    data = torch.randn(64, SIZE, generator=torch.Generator().manual_seed(2))
    trainer.fit(module, DataLoader(data, batch_size=4))
    return {name: value.clone() for name, value in module.state_dict().items()}


@pytest.mark.parametrize("algorithm", ["onebit", "none"])
def test_a_search_of_the_learning_rate_leaves_no_residuals(
    pool: RankPool, algorithm: str, tmp_path: Path
) -> None:
    direct = pool.run(weights_after_a_search, 2, algorithm, str(tmp_path), False)
    searched = pool.run(weights_after_a_search, 2, algorithm, str(tmp_path), True)
    for one, other in zip(direct, searched, strict=True):
        assert all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize("users", [{1}, {0}])
def test_a_checkpoint_is_saved_while_only_some_ranks_have_residuals(
    pool: RankPool, users: set[int], tmp_path: Path
) -> None:
    first, second = tmp_path / "first.ckpt", tmp_path / "second.ckpt"
    pool.run(fit, 2, "int8", {0, 1}, None, first)
    pool.run(fit, 2, "none", users, first, second)
    # The other rank has no gradient of the second layer to add its residuals to.
    (user,) = users
    states = torch.load(second, weights_only=True)[CHECKPOINT_KEY]
    names = [sorted(entry["gradient"] for entry in one["units"]) for one in states]
    assert names[user] == []
    assert names[1 - user] == ["b.bias", "b.weight"]
