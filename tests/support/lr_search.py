"""Search of a learning rate that changes nothing, to compare trainings with it and without it."""

from __future__ import annotations

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import LearningRateFinder


class FruitlessSearch(LearningRateFinder):
    """Search of a learning rate, after which training uses the rate from before.

    The module needs an attribute `lr`.

    Args:
        steps: Steps of the search.
    """

    def __init__(self, steps: int = 5) -> None:
        super().__init__(num_training_steps=steps)

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        rates = [[g["lr"] for g in one.param_groups] for one in trainer.optimizers]
        super().on_fit_start(trainer, pl_module)
        for optimizer, before in zip(trainer.optimizers, rates, strict=True):
            for group, rate in zip(optimizer.param_groups, before, strict=True):
                group["lr"] = rate
