"""A training step that changes learning rates, schedulers, loops, data sets or data modules leaves
the values of a single device on all ranks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch import LightningDataModule
from torch import Tensor
from torch.utils.data import DataLoader, Sampler

from tests.support.models import Samples
from tests.support.rank_pool import RankContext, RankPool
from tests.support.training_cases import Case, Classifier, differences_in, no_differences_in


class ScaledSamples(Samples):
    """A data set whose samples depend on attributes that user code changes."""

    scale = 1.0

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.levels = [0.0, 0.0]

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        x, y = super().__getitem__(index)
        return x * self.scale + sum(self.levels), y


class WeightedSampler(Sampler[int]):
    """A sampler that draws indices, one at a time, by weights that user code changes."""

    def __init__(self, samples: int) -> None:
        self.weights, self.counts = torch.ones(samples), np.zeros(samples)

    def __len__(self) -> int:
        return len(self.weights)

    def __iter__(self) -> Iterator[int]:
        for _ in range(len(self)):
            weights = self.weights + torch.from_numpy(self.counts)
            yield int(torch.multinomial(weights, 1))


class CountsSteps(LightningDataModule):
    """A data module that counts steps; the loader of an epoch depends on their number."""

    def __init__(self) -> None:
        super().__init__()
        self.steps = 0

    def train_dataloader(self) -> DataLoader[Any]:
        data = ScaledSamples(False, 32 - self.steps)
        return DataLoader(data, batch_size=8, sampler=WeightedSampler(len(data)))


class ChangesSettings(Classifier):
    """A model that changes all these settings by amounts that depend on the loss."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        value = float(loss.detach())
        self.optimizers().param_groups[0]["momentum"] = min(0.9, value / 4)  # type: ignore[union-attr]
        self.lr_schedulers().step()  # type: ignore[union-attr, call-arg]
        self.trainer.train_dataloader.dataset.scale = 1 + value  # type: ignore[union-attr]
        self.trainer.train_dataloader.dataset.levels[1] += value  # type: ignore[union-attr]
        self.lr_schedulers().base_lrs[0] += value  # type: ignore[union-attr]
        self.trainer.datamodule.steps += 1  # type: ignore[attr-defined]
        sampler = self.trainer.train_dataloader.sampler  # type: ignore[union-attr]
        sampler.weights[batch_idx] += value
        sampler.counts[-1 - batch_idx] += value
        if self.global_step == 2:
            self.trainer.fit_loop.max_epochs = 3
        return loss

    def on_train_epoch_end(self) -> None:
        sampler = self.trainer.train_dataloader.sampler  # type: ignore[union-attr]
        self.observed += [*sampler.weights.tolist(), *sampler.counts.tolist()]
        self.observed += self.trainer.train_dataloader.dataset.levels  # type: ignore[union-attr]
        self.observed += self.lr_schedulers().base_lrs  # type: ignore[union-attr]
        self.observed += self.lr_schedulers().get_last_lr()  # type: ignore[union-attr]
        self.observed.append(self.trainer.datamodule.steps)  # type: ignore[attr-defined]

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)
        return [optimizer], [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.8)]


DATA = ScaledSamples(False, 32)


class SharesMemory(Classifier):
    """A model with a data set, and with tensors and arrays that are views of one another.

    The step changes the data set by its own name, also in the trial before training.
    """

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(3))
        self.same, self.array = self.count, self.count.numpy()
        self.table = np.ones((2, 4))
        self.row, self.flat = self.table[1], torch.from_numpy(self.table.reshape(-1))
        DATA.scale = 1.0

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.array[0] += 1
        self.same[1] += self.count[0]
        self.row[:2] += 0.1
        loss = super().training_step(batch, batch_idx) * float(self.flat[4])
        self.flat[0] += float(self.row[1])
        self.count.data[2] += float(self.table[0, 0])
        DATA.scale += 0.1
        return loss * (1 + 0.1 * float(self.same[2]))

    def on_train_epoch_end(self) -> None:
        self.observed += [*self.same.tolist(), *self.array.tolist(), DATA.scale]
        self.observed += [*self.row.tolist(), *self.flat.tolist()]


def compare_with_plain_training(context: RankContext) -> dict[str, list[str]]:
    options = {"reload_dataloaders_every_n_epochs": 1}
    return differences_in(
        context,
        {name: Case(ChangesSettings, name, data=CountsSteps, trainer=options) for name in SCHEDULES}
        | {
            f"views, {name}": Case(
                SharesMemory,
                name,
                data=lambda: DataLoader(DATA, batch_size=8),
                options={"plan": None},
            )
            for name in SCHEDULES
        },
    )


SCHEDULES = ("gpipe", "auto")


@pytest.mark.parametrize("ranks", [2])
def test_settings_equal_a_single_device(pool: RankPool, ranks: int) -> None:
    names = [*SCHEDULES, *(f"views, {name}" for name in SCHEDULES)]
    expected = no_differences_in(dict.fromkeys(names), ranks)  # type: ignore[arg-type]
    assert pool.run(compare_with_plain_training, ranks) == expected
