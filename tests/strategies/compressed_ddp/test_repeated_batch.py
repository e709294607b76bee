"""What a rank repeats after its loader has ended counts nowhere."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset
from torchmetrics import CatMetric, MeanMetric, MetricCollection, SumMetric
from torchmetrics.classification import BinaryPrecision, BinaryRecall

from lightning_dlres.strategies import CompressedDDPStrategy
from tests.support.models import QUIET
from tests.support.rank_pool import RankContext, RankPool

SAMPLES = (6, 15)
BATCH = 3


class Numbers(IterableDataset[Tensor]):
    """The numbers 1, 2, ... as samples.

    Args:
        count: Number of samples.
        last: Value in the place of the last number.
    """

    def __init__(self, count: int, last: float) -> None:
        self.values = [*map(float, range(1, count)), last]

    def __iter__(self) -> Iterator[Tensor]:
        return (torch.tensor([value]) for value in self.values)


class Counting(LightningModule):
    """Model that logs, and has metrics and buffers.

    Args:
        manual: True trains with manual optimization.
        batches: Batches of this rank.

    Attributes:
        after_data: Buffers after the last batch with data.
        has_finite_gradients: For every batch, whether all gradients were finite.
    """

    def __init__(self, batches: int, *, manual: bool = False) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.net = nn.Sequential(nn.Linear(1, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
        self.register_buffer("replaced", torch.zeros(1))
        self.seen, self.mean, self.all = SumMetric(), MeanMetric(), CatMetric()
        # Both metrics share their states.
        self.shares = MetricCollection([BinaryPrecision(), BinaryRecall()])
        self.automatic_optimization, self.batches = not manual, batches
        self.after_data: dict[str, Tensor] = {}
        self.has_finite_gradients: list[bool] = []

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor | None:
        self.replaced = self.replaced + batch.sum()
        for metric in (self.seen, self.mean, self.all):
            metric(batch)
        self.shares((batch > 3).float().flatten() * 0.9, (batch > 2).long().flatten())
        epoch: dict[str, Any] = {"on_step": False, "on_epoch": True}
        self.log("seen", self.seen, **epoch)
        self.log("default mean", batch.mean(), **epoch)
        self.log("mean", batch.mean(), batch_size=BATCH, on_step=True, on_epoch=True)
        self.log("synced sum", batch.sum(), reduce_fx="sum", sync_dist=True, **epoch)
        self.log("synced mean", batch.mean(), sync_dist=True, **epoch)
        self.log("max", batch.sum() + 10 * batch_idx, reduce_fx="max", **epoch)
        loss = (self.net(batch) * batch).mean()
        if self.automatic_optimization:
            return loss
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(loss)
        self.note_gradients()
        optimizer.step()
        return None

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        if self.automatic_optimization:
            self.note_gradients()

    def note_gradients(self) -> None:
        finite = all(bool(p.grad.isfinite().all()) for p in self.parameters() if p.grad is not None)
        self.has_finite_gradients.append(finite)
        if not finite:
            self.zero_grad()

    def on_train_batch_end(self, outputs: Any, batch: Tensor, batch_idx: int) -> None:
        self.log("at the end", batch.mean(), on_epoch=True, on_step=False)
        if batch_idx == self.batches - 1:
            self.after_data = copy.deepcopy(dict(self.named_buffers()))

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=1e-3)


def fit(
    context: RankContext, manual: bool, accumulate: int, algorithm: str, last: float
) -> tuple[dict[str, float], dict[str, Any], list[bool], list[Any]]:
    """Return what an epoch has logged, the metrics' states, whether the gradients of each optimizer
    step were finite, and the buffers after the last batch with data and at the end."""
    count = SAMPLES[context.rank]
    module = Counting(count // BATCH, manual=manual)
    trainer = Trainer(
        strategy=CompressedDDPStrategy(
            algorithm=algorithm, topology="ps", coordinator="none", min_bytes=0, timeout=30.0
        ),
        accelerator="cpu",
        devices=context.world_size,
        plugins=[context.environment],
        use_distributed_sampler=False,
        max_epochs=1,
        accumulate_grad_batches=accumulate,
        **QUIET,
    )
    trainer.fit(module, DataLoader(Numbers(count, last if context.rank == 0 else count), BATCH))
    logged = {name: float(value) for name, value in trainer.callback_metrics.items()}
    metrics = {
        "mean": float(module.mean.compute()),
        "all": module.all.compute().flatten().tolist(),
        "updates": [m.update_count for m in (module.mean, module.all)],
        **{name: float(value) for name, value in module.shares.compute().items()},
    }
    buffers = [module.after_data, dict(module.named_buffers())]
    return logged, metrics, module.has_finite_gradients, buffers


@pytest.mark.parametrize("algorithm", ["none", "tbq"])
@pytest.mark.parametrize(("manual", "accumulate"), [(False, 1), (False, 2), (True, 1)])
def test_repeated_batches_count_nowhere(
    pool: RankPool, manual: bool, accumulate: int, algorithm: str
) -> None:
    ranks = pool.run(fit, 2, manual, accumulate, algorithm, float(SAMPLES[0]))
    for count, (logged, metrics, _, _) in zip(SAMPLES, ranks, strict=True):
        numbers = [float(number) for number in range(1, count + 1)]
        mean = sum(numbers) / count
        # Metrics add up all ranks.
        assert logged["seen"] == 21 + 120
        assert logged["default mean"] == logged["mean_epoch"] == logged["at the end"] == mean
        assert logged["synced sum"] == 21 + 120
        assert logged["synced mean"] == pytest.approx((21 + 120) / 21)
        assert logged["max"] == sum(numbers[-BATCH:]) + 10 * (count // BATCH - 1)
        assert metrics["mean"] == pytest.approx((21 + 120) / 21)
        assert metrics["all"] == [*range(1, 7), *range(1, 16)]
        assert metrics["updates"] == [count // BATCH] * 2
        assert metrics["BinaryPrecision"] == 1.0
        assert metrics["BinaryRecall"] == pytest.approx((3 + 12) / (4 + 13))
    # Rank 0 ends first, and DistributedDataParallel gives all ranks its buffers.
    after_data, at_end = ranks[0][3]
    assert after_data["net.1.num_batches_tracked"] == 2
    assert all(torch.equal(after_data[name], at_end[name]) for name in at_end)


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("algorithm", ["none", "tbq"])
def test_a_last_batch_without_a_finite_loss_spoils_one_step(
    pool: RankPool, algorithm: str, accumulate: int
) -> None:
    # The second batch of rank 0 is repeated three times.
    for _, _, finite, _ in pool.run(fit, 2, False, accumulate, algorithm, math.inf):
        assert finite == (
            [True, False, True, True, True] if accumulate == 1 else [False, True, True]
        )
