"""Refusal of what cannot work with a pipeline, before the run starts: callbacks, steps, and lazy
modules."""

from __future__ import annotations

import inspect

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import (
    BaseFinetuning,
    BatchSizeFinder,
    Callback,
    ModelPruning,
    StochasticWeightAveraging,
    WeightAveraging,
)
from lightning.pytorch.strategies import ParallelStrategy
from lightning.pytorch.trainer.states import TrainerFn
from torch import nn

from lightning_dlres import _compat
from lightning_dlres.core.errors import ConfigError
from lightning_dlres.strategies.lazy_parameters import refuse_lazy_parameters

# Name of the step that each entry point of the Trainer runs.
_STEPS = {
    TrainerFn.FITTING: "training_step",
    TrainerFn.VALIDATING: "validation_step",
    TrainerFn.TESTING: "test_step",
    TrainerFn.PREDICTING: "predict_step",
}

# Beginning of the reason for several callbacks.
_ONE_STAGE = "each rank holds the weights of one stage, and "

# Reason and fix of the error, by class of callback; "it" is the callback.
_REASON_AND_FIX: dict[type[Callback], str] = {
    BatchSizeFinder: (
        "the ranks run out of memory at different times, and it saves a file on each rank. Set "
        "the batch size yourself, and memory_limit to make the plan fit it"
    ),
    BaseFinetuning: (
        f"{_ONE_STAGE}it compares weights of all stages. Give all parameters to the optimizer, and "
        "freeze and unfreeze them by `requires_grad_` in a hook such as on_train_epoch_start"
    ),
    WeightAveraging: (
        f"{_ONE_STAGE}it averages the weights of all stages. Average the weights of checkpoints "
        "after training"
    ),
    StochasticWeightAveraging: (
        f"{_ONE_STAGE}it averages the weights of all stages. Average the weights of checkpoints "
        "after training"
    ),
    ModelPruning: f"{_ONE_STAGE}it compares weights of all stages. Prune the trained model",
}


def refuse_unsupported(trainer: Trainer, module: LightningModule, *, is_plain: bool) -> None:
    """Raise if the module or a callback cannot work with a pipeline.

    Args:
        trainer: Trainer of the run.
        module: The LightningModule.
        is_plain: True if steps need no pipeline.

    Raises:
        ConfigError: If something cannot; the message names it and an alternative.
    """
    refuse_lazy_parameters(module)
    fitting = trainer.state.fn == TrainerFn.FITTING
    if fitting and not module.automatic_optimization:
        raise ConfigError(
            f"automatic_optimization must be True for a pipeline, which schedules forward and "
            f"backward itself, got False in {type(module).__name__}. Use automatic "
            "optimization with one optimizer, or another strategy."
        )
    if fitting and not is_plain:
        refuse_callbacks(trainer)
        refuse_synced_batchnorm(trainer, module)
    if not is_plain:
        refuse_dataloader_iter(trainer, module)


def refuse_callbacks(trainer: Trainer) -> None:
    """Raise if a callback needs the whole model on one rank.

    Raises:
        ConfigError: If a callback does; the message names the callback and an alternative.
    """
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        for kind, reason_and_fix in _REASON_AND_FIX.items():
            if isinstance(callback, kind):
                raise ConfigError(
                    f"{type(callback).__name__} cannot work with a pipeline: {reason_and_fix}."
                )


def refuse_synced_batchnorm(trainer: Trainer, module: LightningModule) -> None:
    """Raise if BatchNorm is synchronised, which a pipeline cannot.

    Only the ranks of one stage would take part in its collectives, which need all ranks.

    Raises:
        ConfigError: If it does.
    """
    strategy = trainer.strategy
    if isinstance(strategy, ParallelStrategy) and _compat.syncs_batchnorm(strategy):
        raise ConfigError(
            "sync_batchnorm must be False for a pipeline, in which BatchNorm sees one micro-batch "
            "at a time, got True. Use HeteroPipeStrategy(microbatches=1), or GroupNorm."
        )
    for name, layer in module.named_modules():
        if isinstance(layer, nn.SyncBatchNorm):
            raise ConfigError(
                f"{type(module).__name__} must not have an nn.SyncBatchNorm for a pipeline, in "
                f"which only one stage runs it, got {name!r}. Use nn.BatchNorm and "
                "HeteroPipeStrategy(microbatches=1), or GroupNorm."
            )


def refuse_dataloader_iter(trainer: Trainer, module: LightningModule) -> None:
    """Raise if a step of this run fetches its own batches. A pipeline must cut each batch.

    Raises:
        ConfigError: If a step has an argument `dataloader_iter`.
    """
    steps = [_STEPS[trainer.state.fn]]  # type: ignore[index]
    if steps == ["training_step"] and trainer.enable_validation:
        steps.append("validation_step")
    for step in steps:
        if "dataloader_iter" in inspect.signature(getattr(module, step)).parameters:
            raise ConfigError(
                f"The first argument of {step} must be a batch, got dataloader_iter in "
                f"{type(module).__name__}. Write {step}(self, batch, batch_idx)."
            )
