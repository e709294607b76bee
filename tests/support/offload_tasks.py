"""LightningModules for the memory tests, and their training."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader

from tests.support.models import QUIET
from tests.support.networks import CASES


class Regression(LightningModule):
    """Task with one of the networks, and a loss without labels."""

    def __init__(self, name: str) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.net = CASES[name].make()
        self.losses: list[float] = []

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = self(batch).float().square().mean()
        self.losses.append(loss.item())
        self.log("loss", loss)
        return loss

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.log("val_loss", self(batch).float().square().mean())

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


class Gan(LightningModule):
    """GAN with two optimizers in manual optimization."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.automatic_optimization = False
        self.maker = nn.Sequential(nn.Linear(4, 32), nn.ReLU(), nn.Linear(32, 16))
        self.judge = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 1))

    def training_step(self, batch: Tensor, batch_idx: int) -> None:
        for_maker, for_judge = self.optimizers()  # type: ignore[misc]
        made = self.maker(torch.randn(6, 4))
        self.toggle_optimizer(for_maker)
        fooled = -self.judge(made).mean()
        for_maker.zero_grad()
        self.manual_backward(fooled)
        for_maker.step()
        self.untoggle_optimizer(for_maker)
        self.toggle_optimizer(for_judge)
        judged = self.judge(made.detach()).sigmoid().mean() - self.judge(batch).mean()
        for_judge.zero_grad()
        self.manual_backward(judged)
        for_judge.step()
        self.untoggle_optimizer(for_judge)

    def configure_optimizers(self) -> Any:
        return [torch.optim.Adam(part.parameters(), lr=1e-2) for part in (self.maker, self.judge)]


def batches(name: str, count: int = 8) -> DataLoader[Any]:
    """Return a loader of whole batches."""
    torch.manual_seed(2)
    found = [torch.randn(6, 16) if name == "gan" else CASES[name].batch() for _ in range(count)]
    return DataLoader(found, batch_size=None)  # type: ignore[arg-type]


def fit(
    task: LightningModule, loader: Any, *callbacks: Callback, **options: Any
) -> dict[str, Tensor]:
    """Train, and return the weights."""
    settings = {**QUIET, "accelerator": "cpu", "devices": 1, "max_epochs": 1, **options}
    path = settings.pop("ckpt_path", None)
    validation = settings.pop("val_dataloaders", None)
    trainer = Trainer(callbacks=list(callbacks), **settings)
    torch.manual_seed(3)
    trainer.fit(task, loader, validation, ckpt_path=path)
    return {name: value.clone() for name, value in task.state_dict().items()}


def require_same(plain: dict[str, Tensor], ours: dict[str, Tensor]) -> None:
    """Check that weights agree bit for bit."""
    assert plain.keys() == ours.keys()
    for name, value in plain.items():
        assert torch.equal(value, ours[name]), name


def checkpoint_of(directory: Path) -> Path:
    """Return the only checkpoint in a directory."""
    (found,) = directory.rglob("*.ckpt")
    return found
