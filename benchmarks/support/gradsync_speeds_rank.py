"""Rank of benchmarks/gradsync.py with hosts of different speed: it runs the Trainer."""

from __future__ import annotations

import logging
import time
import warnings
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.support.rpc import Message, RankRpc
from lightning_dlres import CompressedDDPStrategy

# Samples of a rank in a step with equal shares, and elements of a sample.
_SAMPLES, _WIDTH = 64, 64
# Warm-up steps, in which the shares settle, and steps that count.
_SETTLING, _COUNTED = 40, 30


class EmulatedModel(LightningModule):
    """Small model whose step sleeps some time for every sample.

    Args:
        sample_seconds: Emulated seconds of computation for a sample.
    """

    def __init__(self, sample_seconds: float) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(_WIDTH, _WIDTH), nn.ReLU(), nn.Linear(_WIDTH, 1))
        self._sample_seconds = sample_seconds

    def training_step(self, batch: list[Tensor], batch_index: int) -> Tensor:
        """Return the loss."""
        time.sleep(len(batch[0]) * self._sample_seconds)
        loss: Tensor = self.layers(batch[0]).square().mean()
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return the optimizer."""
        return torch.optim.SGD(self.parameters(), lr=1e-3)


class Stopwatch(Callback):
    """Callback that measures the steps after the shares have settled.

    Attributes:
        samples: Samples of this rank in all counted steps.
        seconds: Seconds of all counted steps together.
    """

    def __init__(self) -> None:
        self.samples, self.seconds, self._start = 0, 0.0, 0.0

    def on_train_batch_end(
        self, trainer: Trainer, module: LightningModule, outputs: Any, batch: Any, index: int
    ) -> None:
        """Count the batch."""
        now = time.perf_counter()
        if index + 1 == _SETTLING:
            self._start = now
        elif index >= _SETTLING:
            self.samples += len(batch[0])
            self.seconds = now - self._start


def main(rpc: RankRpc) -> None:
    """Follow orders until the benchmark ends."""
    for order in rpc.orders():
        rpc.reply(follow(order, rpc.rank, rpc.world_size))


def follow(order: Message, rank: int, world_size: int) -> Message:
    """Train, with the other ranks or alone.

    Args:
        order: "sample_ms", the emulated milliseconds of a sample on each rank; and "share_samples",
            the strategy's argument. None trains this rank alone.
        rank: This rank.
        world_size: Number of ranks.

    Returns:
        "samples" of this rank in the counted steps, and the "seconds" of these steps.
    """
    warnings.simplefilter("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    stopwatch = Stopwatch()
    options: dict[str, Any] = {"devices": 1, "strategy": "auto"}
    ranks = 1
    if order["share_samples"] is not None:
        strategy = CompressedDDPStrategy(algorithm="fp16", share_samples=order["share_samples"])
        options = {"devices": 1, "num_nodes": world_size, "strategy": strategy}
        ranks = world_size
    else:
        options["plugins"] = [_single_process_environment()]
    steps = _SETTLING + _COUNTED
    rows = torch.randn(steps * ranks * _SAMPLES, _WIDTH)
    trainer = Trainer(
        accelerator="cpu",
        max_steps=steps,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[stopwatch],
        **options,
    )
    model = EmulatedModel(order["sample_ms"][rank] / 1e3)
    trainer.fit(model, DataLoader(TensorDataset(rows), batch_size=_SAMPLES))
    return {"samples": stopwatch.samples, "seconds": stopwatch.seconds}


def _single_process_environment() -> Any:
    """Return a cluster environment of one process.

    From the environment variables of torchrun, Lightning would find all ranks.
    """
    from lightning.fabric.plugins.environments import LightningEnvironment

    environment = LightningEnvironment()
    environment.world_size = lambda: 1  # type: ignore[method-assign]
    environment.global_rank = lambda: 0  # type: ignore[method-assign]
    return environment
