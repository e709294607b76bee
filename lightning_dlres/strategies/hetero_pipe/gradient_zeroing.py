"""Detection of runs in which old gradients may be dropped before the new ones are computed.

Lightning zeroes gradients between `training_step` and backward, but the schedule computes the new
ones within `training_step`. A rank that kept the old ones would hold both. For AdamW it would hold
five tensors per parameter instead of four (weight, gradient and two moments).
"""

from __future__ import annotations

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities.model_helpers import is_overridden


def may_drop_old_gradients(trainer: Trainer, module: LightningModule) -> bool:
    """Return True if old gradients may be dropped when a step begins.

    This holds if Lightning zeroes gradients in every step, without accumulation, and no user hook
    runs around the zeroing: such a hook could read the old gradients.
    """
    return (
        trainer.accumulate_grad_batches == 1
        and not is_overridden("optimizer_zero_grad", module)
        and not is_overridden("on_before_zero_grad", module)
        and not any(
            is_overridden("on_before_zero_grad", callback, parent=Callback)
            for callback in trainer.callbacks  # type: ignore[attr-defined]
        )
    )
