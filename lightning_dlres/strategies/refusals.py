"""Callbacks of Lightning that compute with the weights of the whole model, which no rank has."""

from __future__ import annotations

from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import (
    BaseFinetuning,
    Callback,
    ModelPruning,
    StochasticWeightAveraging,
    WeightAveraging,
)

from lightning_dlres.core.errors import ConfigError

_INSTEAD: dict[type[Callback], str] = {
    BaseFinetuning: (
        "it compares weights of all stages. Give all parameters to the optimizer, and freeze and "
        "unfreeze them by `requires_grad_` in a hook such as on_train_epoch_start"
    ),
    WeightAveraging: (
        "it averages the weights of all stages. Average the weights of checkpoints after training"
    ),
    StochasticWeightAveraging: (
        "it averages the weights of all stages. Average the weights of checkpoints after training"
    ),
    ModelPruning: "it compares weights of all stages. Prune the trained model",
}


def refuse_callbacks(trainer: Trainer) -> None:
    """Raise if a callback needs the whole model's weights.

    Raises:
        ConfigError: names it, and what to do instead.
    """
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        for kind, instead in _INSTEAD.items():
            if isinstance(callback, kind):
                raise ConfigError(
                    f"{type(callback).__name__} cannot work with a pipeline: each rank holds the "
                    f"weights of one stage, and {instead}."
                )
