"""Detection of runs in which old gradients may be dropped before the new ones are computed.

Lightning zeroes gradients between `training_step` and backward, but the schedule computes the new
ones within `training_step`. A rank that kept the old ones would hold both: for AdamW a quarter more
memory than under a plain Trainer.
"""

from __future__ import annotations

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities.model_helpers import is_overridden


def zeroes_every_step(trainer: Trainer, module: LightningModule) -> bool:
    """Return True if Lightning zeroes the gradients in every step, and no user code sees them
    before: there is no accumulation, and no hook of the user around zeroing."""
    return (
        trainer.accumulate_grad_batches == 1
        and not is_overridden("optimizer_zero_grad", module)
        and not is_overridden("on_before_zero_grad", module)
        and not any(
            is_overridden("on_before_zero_grad", callback, parent=Callback)
            for callback in trainer.callbacks  # type: ignore[attr-defined]
        )
    )
