"""Checks of the hooks and callbacks in a run with parameter servers."""

from __future__ import annotations

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import BaseFinetuning, StochasticWeightAveraging
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import nn

from lightning_dlres.core.errors import ConfigError

# Hooks of modules and callbacks that see gradients, or the optimizer, between backward and the
# update.
_MODULE_HOOKS = ("backward", "configure_gradient_clipping", "optimizer_step")
_GRADIENT_HOOKS = ("on_after_backward", "on_before_optimizer_step")


def refuse_callbacks(trainer: Trainer, module: nn.Module) -> None:
    """Raise at the start if a callback would fail late.

    Raises:
        ConfigError: If a callback adds parameters to an optimizer, or trains on with weights that
            it has put there.
    """
    kinds = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
    has_batch_norm = any(isinstance(m, kinds) for m in module.modules())
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        name = type(callback).__name__
        if isinstance(callback, BaseFinetuning):
            raise ConfigError(
                "callbacks must not add parameters to the optimizer with a parameter server, got "
                f"{name}. Give the optimizer all parameters, and change their requires_grad."
            )
        if isinstance(callback, StochasticWeightAveraging) and has_batch_norm:
            raise ConfigError(
                f"{name} must not be used with BatchNorm and a parameter server: its last epoch "
                "would lose the averaged weights. Use WeightAveraging."
            )


def gradients_are_seen(trainer: Trainer, module: nn.Module) -> bool:
    """Return True if code may see or change gradients between backward and the update."""
    return any(
        is_overridden(hook, module, parent=LightningModule)
        for hook in (*_MODULE_HOOKS, *_GRADIENT_HOOKS)
    ) or any(
        is_overridden(hook, callback, parent=Callback)
        for callback in trainer.callbacks  # type: ignore[attr-defined]
        for hook in _GRADIENT_HOOKS
    )
