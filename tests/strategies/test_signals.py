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
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import Strategy
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_dlres import CompressedDDPStrategy, ParameterServerStrategy
from tests.support.examples import checkered
from tests.support.models import QUIET
from tests.support.rank_pool import RankContext, RankPool
from tests.support.waiting import wait_until

FEATURES, BATCHES = 4, 6
# Steps after a SIGTERM and a resume.
LATER = 3
# Strategies, and those of them whose ranks end after the same step.
TOGETHER: dict[str, Callable[[], Strategy]] = {
    "bsp": lambda: ParameterServerStrategy(timeout=60),
    "none": lambda: CompressedDDPStrategy(algorithm="none", timeout=60),
    "tbq": lambda: CompressedDDPStrategy(algorithm="tbq", min_bytes=0, timeout=60),
}
STRATEGIES: dict[str, Callable[[], Strategy]] = {
    **TOGETHER,
    "ssp": lambda: ParameterServerStrategy(consistency="ssp", timeout=60),
    "asp": lambda: ParameterServerStrategy(consistency="asp", timeout=60),
}


class Small(LightningModule):
    """Model that calls a function with the number of each batch before its forward."""

    def __init__(self, before_batch: Callable[[int], None]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(FEATURES, 1)
        self._before_batch = before_batch

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        self._before_batch(batch_idx)
        return self.layer(batch).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.01, momentum=0.9)


def train(
    context: RankContext,
    strategy: str,
    before_batch: Callable[[int], None],
    resume: Path | None = None,
    **options: Any,
) -> Tensor:
    """Train on samples that are all equal; return the weights."""
    trainer = Trainer(
        accelerator="cpu",
        devices=context.world_size,
        strategy=STRATEGIES[strategy](),
        plugins=[context.environment],
        **{**QUIET, **options},
    )
    # A loader begins anew after a resume. Equal samples make that no difference.
    data = torch.linspace(-1, 2, FEATURES).repeat(2 * BATCHES * context.world_size, 1)
    module = Small(before_batch)
    trainer.fit(module, DataLoader(data, batch_size=2), ckpt_path=resume)
    return module.layer.weight.detach().clone()


def terminated(
    context: RankContext, strategy: str, target: int, directory: Path | None = None
) -> str:
    """Send SIGTERM to one rank amid training without an end; return what ends it."""
    is_sent = False

    def send(batch: int) -> None:
        nonlocal is_sent
        if context.rank == target and batch == 2 and not is_sent:
            is_sent = True
            os.kill(os.getpid(), signal.SIGTERM)

    options: dict[str, Any] = {}
    if directory is not None:
        callback = ModelCheckpoint(directory, filename="latest", save_on_exception=True)
        options = {"callbacks": [callback], "enable_checkpointing": True}
    try:
        train(context, strategy, send, max_epochs=100_000, **options)
    except SystemExit as error:
        return type(error).__name__
    return "went on"


@pytest.mark.parametrize(("strategy", "target"), checkered(STRATEGIES, [0, 1]))
def test_sigterm_to_one_rank_ends_all(pool: RankPool, strategy: str, target: int) -> None:
    assert pool.run(terminated, 2, strategy, target) == ["SIGTERMException"] * 2


def trained(context: RankContext, strategy: str, resume: Path | None, steps: int) -> Tensor:
    """Return the weights after a number of steps in all."""
    return train(context, strategy, lambda _: None, resume, max_steps=steps, max_epochs=-1)


@pytest.mark.parametrize("strategy", TOGETHER)
def test_a_checkpoint_of_a_terminated_run_continues_exactly(
    pool: RankPool, tmp_path: Path, strategy: str
) -> None:
    pool.run(terminated, 2, strategy, 1, tmp_path)
    (path,) = tmp_path.iterdir()
    steps = torch.load(path, weights_only=True)["global_step"]
    assert steps > 0
    whole = pool.run(trained, 2, strategy, None, steps + LATER)
    resumed = pool.run(trained, 2, strategy, path, steps + LATER)
    assert all(torch.equal(whole[0], weights) for weights in (*whole, *resumed))


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
