"""Parity of batch normalisation: a pipeline equals a single device that gets the same
micro-batches."""

from __future__ import annotations

from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer, seed_everything
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

from lightning_dlres import HeteroPipeStrategy, PipelinePlan
from lightning_dlres.pipeline.plan.plan import consecutive_replicas
from tests.support.models import QUIET, Samples
from tests.support.parity import relative
from tests.support.rank_pool import RankContext, RankPool

MICROBATCHES = 4


class Centred(nn.Linear):
    """Linear layer that subtracts a running mean from its input and divides by a running scale.

    The mean is a parameter that each call writes to. The scale is a buffer that each call replaces.
    """

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(inputs, outputs)
        self.centre = nn.Parameter(torch.zeros(inputs), requires_grad=False)
        self.register_buffer("scale", torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        out = super().forward((x - self.centre) / self.scale)
        with torch.no_grad():
            self.centre.lerp_(x.mean(0), 0.1)
            self.scale = 0.9 * self.scale + 0.1 * x.std()
        return out


class Normalised(LightningModule):
    """Network with batch normalisation.

    Args:
        in_microbatches: True to call the network once per micro-batch, on a single device.
    """

    def __init__(self, in_microbatches: bool) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.in_microbatches = in_microbatches
        self.net = nn.Sequential(
            nn.Linear(16, 12),
            nn.BatchNorm1d(12),
            nn.ReLU(),
            nn.Linear(12, 12),
            nn.BatchNorm1d(12),
            Centred(12, 5),
        )

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        parts = x.chunk(MICROBATCHES) if self.in_microbatches else [x]
        return F.cross_entropy(torch.cat([self.net(part) for part in parts]), y)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def fit(context: RankContext | None, replicas: int, schedule: str) -> dict[str, Tensor]:
    """Train and return the state dict."""
    seed_everything(3, verbose=False)
    model = Normalised(in_microbatches=context is None)
    plan = PipelinePlan(replicas=consecutive_replicas(2 * replicas, 2), split=(2, 4))
    trainer = Trainer(
        strategy=HeteroPipeStrategy(plan=plan, microbatches=MICROBATCHES, schedule=schedule)
        if context
        else "auto",  # type: ignore[arg-type]
        accelerator="cpu",
        devices=2 * replicas if context else 1,
        plugins=[context.environment] if context else [],
        max_epochs=2,
        **QUIET,
    )
    trainer.fit(model, DataLoader(Samples(False, 48), batch_size=16))
    return {name: value.clone() for name, value in model.state_dict().items()}


def fit_plainly(context: RankContext) -> dict[str, Tensor]:
    return fit(None, 1, "gpipe")


def test_training_equals_a_single_device_that_gets_the_same_microbatches(pool: RankPool) -> None:
    (expected,) = pool.run(fit_plainly, 1)
    for schedule in ("gpipe", "1f1b"):
        for actual in pool.run(fit, 2, 1, schedule):
            for name, value in expected.items():
                assert relative(actual[name].float(), value.float()) <= 1e-5, (schedule, name)


def test_replicas_end_with_the_same_statistics(pool: RankPool) -> None:
    first, *others = pool.run(fit, 4, 2, "gpipe")
    for other in others:
        for name, value in first.items():
            assert torch.equal(other[name], value), name
