"""Callbacks and steps of the user's that cannot work with a pipeline, refused before the run."""

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
from lightning.pytorch.trainer.states import TrainerFn

from lightning_dlres.core.errors import ConfigError

_STEPS = {
    TrainerFn.FITTING: "training_step",
    TrainerFn.VALIDATING: "validation_step",
    TrainerFn.TESTING: "test_step",
    TrainerFn.PREDICTING: "predict_step",
}

_EACH = "each rank holds the weights of one stage, and "

_INSTEAD: dict[type[Callback], str] = {
    BatchSizeFinder: (
        "ranks run out of memory one at a time, and it saves a file on each. Set the batch size, "
        "and let memory_limit and the plan fit it"
    ),
    BaseFinetuning: (
        f"{_EACH}it compares weights of all stages. Give all parameters to the optimizer, and "
        "freeze and unfreeze them by `requires_grad_` in a hook such as on_train_epoch_start"
    ),
    WeightAveraging: (
        f"{_EACH}it averages the weights of all stages. Average the weights of checkpoints after "
        "training"
    ),
    StochasticWeightAveraging: (
        f"{_EACH}it averages the weights of all stages. Average the weights of checkpoints after "
        "training"
    ),
    ModelPruning: f"{_EACH}it compares weights of all stages. Prune the trained model",
}


def refuse_callbacks(trainer: Trainer) -> None:
    """Raise if a callback needs the whole model on one rank.

    Raises:
        ConfigError: names it, and what to do instead.
    """
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        for kind, instead in _INSTEAD.items():
            if isinstance(callback, kind):
                raise ConfigError(
                    f"{type(callback).__name__} cannot work with a pipeline: {instead}."
                )


def refuse_dataloader_iter(trainer: Trainer, module: LightningModule) -> None:
    """Raise if a step of this run reads batches itself, where a pipeline must cut each of them.

    Raises:
        ConfigError: It takes `dataloader_iter`.
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
