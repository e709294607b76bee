"""Batches other than two tensors, and the user's `split_batch`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer, seed_everything
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

from lightning_dlres import HeteroPipeStrategy
from tests.support.examples import checkered
from tests.support.models import QUIET, Samples
from tests.support.parity import relative
from tests.support.rank_pool import RankContext, RankPool
from tests.support.training_cases import QUICK


@dataclass
class Labelled:
    """Batch as a data class."""

    x: Tensor
    y: Tensor


class Named(NamedTuple):
    """Batch as a named tuple."""

    x: Tensor
    y: Tensor


def as_dict(samples: list[tuple[Tensor, Tensor]]) -> Any:
    x, y = map(torch.stack, zip(*samples, strict=True))
    return {
        "x": x,
        "y": y,
        "names": [f"sample {i}" for i in range(len(x))],
        "classes": 5,
        "nothing": None,
    }


def as_dataclass(samples: list[tuple[Tensor, Tensor]]) -> Any:
    return Labelled(*map(torch.stack, zip(*samples, strict=True)))


def as_named(samples: list[tuple[Tensor, Tensor]]) -> Any:
    return Named(*map(torch.stack, zip(*samples, strict=True)))


def flat(samples: list[tuple[Tensor, Tensor]]) -> Any:
    """Return a batch without a dimension for samples, which only `split_batch` can cut."""
    x, y = map(torch.stack, zip(*samples, strict=True))
    return {"x": x.reshape(-1), "y": y}


def split_flat(batch: Any, sizes: Sequence[int]) -> list[Any]:
    xs = batch["x"].split([16 * size for size in sizes])
    return [{"x": x, "y": y} for x, y in zip(xs, batch["y"].split(list(sizes)), strict=True)]


class AnyBatchModel(LightningModule):
    """Model for a batch of any of these kinds, with a layer that returns several tensors."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.net = nn.Sequential(nn.Linear(16, 8), Fork(), Merge(), nn.Linear(8, 5))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = (batch["x"], batch["y"]) if isinstance(batch, dict) else (batch.x, batch.y)
        if isinstance(batch, dict) and "names" in batch:
            assert len(batch["names"]) == len(y)
        # In place, as augmentations often are, while the batch is still being sent to other ranks.
        x.mul_(2.0)
        loss = F.cross_entropy(self.net(x.view(-1, 16)), y)
        self.log("loss", loss, batch_size=len(y))
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Fork(nn.Module):
    """Layer that returns a dict: a tensor that needs a gradient, one that does not, a number."""

    def forward(self, x: Tensor) -> Any:
        return {"x": x, "mask": (x.detach() > 0), "scale": 0.5}


class Merge(nn.Module):
    """Layer that computes one tensor from the dict of `Fork`, in place on its inputs."""

    def forward(self, parts: Any) -> Tensor:
        return parts["x"].mul_(parts["mask"]).mul(parts["scale"])


COLLATE = {"dict": as_dict, "dataclass": as_dataclass, "named": as_named, "flat": flat}


def fit(context: RankContext | None, kind: str, schedule: str = "gpipe") -> Any:
    """Train on one kind of batch."""
    seed_everything(3, verbose=False)
    model = AnyBatchModel()
    options: dict[str, Any] = {"strategy": "auto", "devices": 1}
    if context is not None:
        split = split_flat if kind == "flat" else None
        strategy = HeteroPipeStrategy(
            microbatches=3,
            schedule=schedule,  # type: ignore[arg-type]
            split_batch=split,
            profile=QUICK,
        )
        options = {
            "strategy": strategy,
            "devices": context.world_size,
            "plugins": [context.environment],
        }
    trainer = Trainer(
        **options,
        accelerator="cpu",
        max_epochs=1,
        **QUIET,
    )
    trainer.fit(model, DataLoader(Samples(False, 32), batch_size=8, collate_fn=COLLATE[kind]))
    return float(trainer.callback_metrics["loss"]), {
        n: p.detach() for n, p in model.named_parameters()
    }


def fit_plainly(context: RankContext, kind: str) -> Any:
    return fit(None, kind)


@pytest.mark.parametrize(
    ("kind", "ranks", "schedule"), checkered(COLLATE, [1, 2], ["gpipe", "1f1b"])
)
def test_batches_of_every_kind_train_as_on_a_single_device(
    pool: RankPool, kind: str, schedule: str, ranks: int
) -> None:
    ((loss, weights),) = pool.run(fit_plainly, 1, kind)
    for actual in pool.run(fit, ranks, kind, schedule):
        assert actual[0] == pytest.approx(loss, rel=1e-5)
        for name, value in weights.items():
            assert relative(actual[1][name], value) <= 1e-5, name
