"""LightningModules for the memory tests, and functions that train and compare them."""

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
    """Module that trains a network of `CASES` with a loss that needs no labels."""

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
        self.generator = nn.Sequential(nn.Linear(4, 32), nn.ReLU(), nn.Linear(32, 16))
        self.discriminator = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 1))

    def training_step(self, batch: Tensor, batch_idx: int) -> None:
        generator_optimizer, discriminator_optimizer = self.optimizers()  # type: ignore[misc]
        fake_samples = self.generator(torch.randn(6, 4))
        self.toggle_optimizer(generator_optimizer)
        generator_loss = -self.discriminator(fake_samples).mean()
        generator_optimizer.zero_grad()
        self.manual_backward(generator_loss)
        generator_optimizer.step()
        self.untoggle_optimizer(generator_optimizer)
        self.toggle_optimizer(discriminator_optimizer)
        discriminator_loss = (
            self.discriminator(fake_samples.detach()).sigmoid().mean()
            - self.discriminator(batch).mean()
        )
        discriminator_optimizer.zero_grad()
        self.manual_backward(discriminator_loss)
        discriminator_optimizer.step()
        self.untoggle_optimizer(discriminator_optimizer)

    def configure_optimizers(self) -> Any:
        return [
            torch.optim.Adam(part.parameters(), lr=1e-2)
            for part in (self.generator, self.discriminator)
        ]


def batches(name: str, count: int = 8) -> DataLoader[Any]:
    """Return a loader of `count` batches for the task `name`; the same batches at each call."""
    torch.manual_seed(2)
    tensors = [torch.randn(6, 16) if name == "gan" else CASES[name].batch() for _ in range(count)]
    return DataLoader(tensors, batch_size=None)  # type: ignore[arg-type]


def fit(
    task: LightningModule, loader: Any, *callbacks: Callback, **options: Any
) -> dict[str, Tensor]:
    """Train a task and return a copy of its weights. `options` are arguments of the Trainer."""
    trainer_options = {**QUIET, "accelerator": "cpu", "devices": 1, "max_epochs": 1, **options}
    checkpoint = trainer_options.pop("ckpt_path", None)
    validation = trainer_options.pop("val_dataloaders", None)
    trainer = Trainer(callbacks=list(callbacks), **trainer_options)
    torch.manual_seed(3)
    trainer.fit(task, loader, validation, ckpt_path=checkpoint)
    return {name: value.clone() for name, value in task.state_dict().items()}


def require_same_weights(plain: dict[str, Tensor], actual: dict[str, Tensor]) -> None:
    """Check that weights agree bit for bit."""
    assert plain.keys() == actual.keys()
    for name, value in plain.items():
        assert torch.equal(value, actual[name]), name


def checkpoint_of(directory: Path) -> Path:
    """Return the only checkpoint in a directory."""
    (path,) = directory.rglob("*.ckpt")
    return path
