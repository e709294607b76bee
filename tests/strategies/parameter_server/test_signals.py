"""SIGTERM to one rank ends all, and ranks that need not wait for each other do not."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_dlres import ParameterServerStrategy
from tests.support.models import QUIET
from tests.support.rank_pool import RankContext, RankPool
from tests.support.waiting import wait_until

FEATURES, BATCHES = 4, 6


class Small(LightningModule):
    """Model that calls a function with the number of each batch before its forward."""

    def __init__(self, before_batch: Callable[[int], None]) -> None:
        super().__init__()
        self.layer = nn.Linear(FEATURES, 1)
        self._before_batch = before_batch

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        self._before_batch(batch_idx)
        return self.layer(batch).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.01)


def train(
    context: RankContext,
    consistency: Any,
    before_batch: Callable[[int], None],
    **options: Any,
) -> None:
    trainer = Trainer(
        accelerator="cpu",
        devices=context.world_size,
        strategy=ParameterServerStrategy(consistency=consistency, timeout=60),
        plugins=[context.environment],
        **{**QUIET, **options},
    )
    data = torch.randn(2 * BATCHES * context.world_size, FEATURES)
    trainer.fit(Small(before_batch), DataLoader(data, batch_size=2))


def terminated(context: RankContext, consistency: str, target: int) -> str:
    """Send SIGTERM to one rank amid training without an end; return what ends it."""
    is_sent = False

    def send(batch: int) -> None:
        nonlocal is_sent
        if context.rank == target and batch == 2 and not is_sent:
            is_sent = True
            os.kill(os.getpid(), signal.SIGTERM)

    try:
        train(context, consistency, send, max_epochs=100_000)
    except SystemExit as error:
        return type(error).__name__
    return "went on"


@pytest.mark.parametrize("target", [0, 1])
@pytest.mark.parametrize("consistency", ["bsp", "ssp", "asp"])
def test_sigterm_to_one_rank_ends_all(pool: RankPool, consistency: str, target: int) -> None:
    assert pool.run(terminated, 2, consistency, target) == ["SIGTERMException"] * 2


def wait_for_the_other(context: RankContext, directory: Path, waiting: int) -> None:
    """Let one rank begin its second batch only when the other begins its last one."""
    file = directory / "last"

    def wait_or_tell(batch: int) -> None:
        if context.rank == waiting and batch == 1:
            wait_until(file.exists, "the other rank begins its last batch", timeout=60)
        elif context.rank != waiting and batch == BATCHES - 1:
            file.touch()

    train(context, "asp", wait_or_tell, max_epochs=1)


@pytest.mark.parametrize("waiting", [0, 1])
def test_asynchronous_ranks_train_while_another_waits(
    pool: RankPool, tmp_path: Path, waiting: int
) -> None:
    pool.run(wait_for_the_other, 2, tmp_path, waiting)
    assert (tmp_path / "last").exists()
