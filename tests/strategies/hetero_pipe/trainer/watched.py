"""Model whose hooks record what a run does, so that two runs can be compared."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from lightning.pytorch import Callback
from torch.nn import functional as F
from torch.utils.data import DataLoader

from tests.support.models import Samples
from tests.support.training_cases import Case, Classifier

# Added to what a hook records, so that hooks differ.
_VALIDATION, _EPOCH, _STEP = 1000.0, 2000.0, 3000.0


class Watched(Classifier):
    """Classifier that records its losses, validations, epochs and optimizer steps in `observed`."""

    def __init__(self) -> None:
        super().__init__()
        self.lr = 0.1

    def forward(self, x: Any) -> Any:
        return self.net(x)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = F.cross_entropy(self(batch[0]), batch[1])
        self.log("loss", loss, on_step=True, on_epoch=True, prog_bar=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val", F.cross_entropy(self(batch[0]), batch[1]), prog_bar=True)

    def train_dataloader(self) -> DataLoader[Any]:
        # A Trainer that reloads the loader in every epoch sees batches of another size.
        return DataLoader(Samples(False, 32), batch_size=8 - 2 * self.trainer.current_epoch)

    def val_dataloader(self) -> DataLoader[Any]:
        return DataLoader(Samples(False, 12), batch_size=4)

    def on_train_batch_end(self, outputs: Any, *args: Any) -> None:
        self.observed.append(float(outputs["loss"]))

    def on_validation_end(self) -> None:
        value = self.trainer.callback_metrics.get("val", 0.0)
        self.observed.append(_VALIDATION + self.global_step + float(value))

    def on_train_epoch_end(self) -> None:
        self.observed.append(_EPOCH + self.current_epoch)

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.observed.append(_STEP)

    def configure_optimizers(self) -> Any:
        # Groups of unlike layers, one of which is on both stages.
        first, middle, last = (self.net[i] for i in (0, 2, 4))
        groups = [
            {"params": [*first.parameters(), *last.parameters()], "lr": self.lr},
            {"params": middle.parameters(), "lr": self.lr / 2, "weight_decay": 0.1},
        ]
        optimizer = torch.optim.SGD(groups, lr=self.lr, momentum=0.9)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)]


def no_data() -> None:
    """Return None: the model has loaders of its own."""


def watched(
    make: Callable[[], Watched] = Watched,
    callbacks: Callable[[], list[Callback]] | None = None,
    **trainer: Any,
) -> Case:
    """Return a case of a watched model, under GPipe.

    Args:
        make: Makes the model.
        callbacks: Makes the callbacks of a run.
        **trainer: Further arguments of the Trainer.
    """
    return Case(make, "gpipe", data=no_data, trainer=trainer, callbacks=callbacks)
