"""Callback that trains within a budget of device memory, with bitwise equal gradients."""

from __future__ import annotations

from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities import rank_zero_info
from typing_extensions import override

from lightning_dlres.callbacks.offloading import MemoryBudget, TrainingSteps
from lightning_dlres.callbacks.open_step import is_stepping_batch


class ActivationOffload(MemoryBudget, Callback):
    """Callback that keeps device memory within a budget: `ActivationOffload(budget="8GiB")`.

    The first steps of every batch shape are measured. They offload all saved tensors, and so fit in
    memory if any plan does. A plan then chooses an action for each saved tensor. The tensor stays,
    is compressed (zeros are left out), is offloaded to the host or a disk and prefetched, is
    overwritten by a gradient, or is recomputed. Later steps follow the plan that has the least
    predicted time within the budget.

    Gradients are bitwise equal to those of plain training, and the LightningModule stays unchanged.
    If everything fits the budget, later steps run without hooks and patches.

    One device and DDP are supported. Strategies that shard the model are refused.

    The arguments are those of `MemoryBudget.__init__`; all have defaults.

    Attributes:
        plan: Latest plan; None before the measured steps are over.
        profile: Profile that the latest plan was made from; None before the first one.

    Raises:
        ConfigError: If an argument has a bad value; when `fit` starts, if the strategy or device is
            not supported; after the measured steps, if no plan meets the budget. The message then
            names the smallest budget that can be met.
    """

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if stage == "fit":
            self.training_steps = TrainingSteps(self._config, trainer, type(self).__name__)

    @override
    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int
    ) -> None:
        if self.training_steps is not None:
            self.training_steps.begin(pl_module, batch, is_stepping_batch(trainer))

    @override
    def on_train_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
    ) -> None:
        if self.training_steps is not None:
            self.training_steps.end()

    @override
    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        # A hook may have ended the epoch in the middle of a step, without `on_train_batch_end`.
        if self.training_steps is not None:
            self.training_steps.abandon()

    @override
    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        # A step that is still open must not manage the tensors of validation.
        if self.training_steps is not None:
            self.training_steps.abandon()

    @override
    def on_exception(
        self, trainer: Trainer, pl_module: LightningModule, exception: BaseException
    ) -> None:
        # Lightning calls no `teardown` after an exception.
        if self.training_steps is not None:
            self.training_steps.close()

    @override
    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        line = self.training_steps.summary() if self.training_steps is not None else None
        if line is not None:
            rank_zero_info(line)

    @override
    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if self.training_steps is not None:
            self.training_steps.close()
