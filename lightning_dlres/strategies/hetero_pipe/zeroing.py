"""May a step's old gradients go before its new ones are computed?

Lightning zeroes gradients between `training_step` and backward. The schedule computes the new ones
within `training_step`, so a rank would hold both: for AdamW a quarter more than a plain Trainer."""

from __future__ import annotations

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities.model_helpers import is_overridden


def zeroes_every_step(trainer: Trainer, module: LightningModule) -> bool:
    """Return whether Lightning is about to zero the gradients in every step, and nobody looks at
    them before: no accumulation, and no hooks of the user's around zeroing."""
    return (
        trainer.accumulate_grad_batches == 1
        and not is_overridden("optimizer_zero_grad", module)
        and not is_overridden("on_before_zero_grad", module)
        and not any(
            is_overridden("on_before_zero_grad", callback, parent=Callback)
            for callback in trainer.callbacks  # type: ignore[attr-defined]
        )
    )
