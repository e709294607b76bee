"""Checkpoints of a model of which each rank holds a part."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lightning.pytorch.trainer.states import TrainerFn, TrainerStatus
from lightning.pytorch.utilities import rank_zero_warn
from torch.optim import Optimizer
from typing_extensions import override

from lightning_dlres.core.comm.gathered_on_disk import gather_on_disk
from lightning_dlres.pipeline.execute.partition import has_meta_tensors
from lightning_dlres.strategies.connected_strategy import ConnectedStrategy
from lightning_dlres.strategies.hetero_pipe.deployment import Deployment

# Key, in a Lightning checkpoint, of what compression between replicas has not sent yet.
CHECKPOINT_KEY = "dlres_replica_residuals"


class PartitionedStrategy(ConnectedStrategy):
    """Strategy whose ranks hold a part of the model each, and write checkpoints of the whole.

    For the arguments see `ConnectedStrategy`.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._deployment: Deployment | None = None
        self._saved_residuals: dict[str, Any] | None = None

    @override
    def lightning_module_state_dict(self) -> dict[str, Any]:
        state = self._module.state_dict()
        if self._deployment is None or (self._connection is None and self._deployment.is_whole):
            return state
        with self._short_timeout_after_failure(), self._mailbox_in_or_after_run() as mailbox:
            return self._deployment.gather_model_state(state, mailbox)

    @override
    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        optimizer = getattr(optimizer, "optimizer", optimizer)
        state = super().optimizer_state(optimizer)
        if self._deployment is None or "state" not in state:
            return state
        with self._short_timeout_after_failure(), self._mailbox_in_or_after_run() as mailbox:
            return self._deployment.gather_optimizer_state(optimizer, state, mailbox)

    @override
    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None
    ) -> None:
        # A checkpoint of weights alone has no optimizer states, and no residuals either.
        if "optimizer_states" in checkpoint:
            residuals = self._gathered_residuals()
            if residuals is not None:
                checkpoint[CHECKPOINT_KEY] = residuals
        super().save_checkpoint(checkpoint, filepath, storage_options)

    def _gathered_residuals(self) -> dict[str, Any] | None:
        """Return the residuals of all ranks on rank 0; None elsewhere, or if there are none."""
        if self._deployment is None or self._deployment.compression is None:
            return None
        if self._module.trainer.state.status == TrainerStatus.INTERRUPTED:
            # Compression may have been in the middle of a step.
            rank_zero_warn("The checkpoint has no residuals, because the run failed.")
            return None
        compression = self._deployment.compression
        with self._mailbox_in_or_after_run() as mailbox:
            states = gather_on_disk(compression.state_dict(), mailbox, "its residuals")
        return None if states is None else compression.merge(states)

    @override
    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> Any:
        checkpoint = super().load_checkpoint(checkpoint_path, weights_only)
        residuals = checkpoint.pop(CHECKPOINT_KEY, None)
        if self._module.trainer.state.fn == TrainerFn.FITTING:
            self._saved_residuals = residuals
            if self.restore_checkpoint_after_setup:
                self._load_residuals()
        return checkpoint

    def _load_residuals(self) -> None:
        """Continue from the residuals of a loaded checkpoint, if any, before the first step."""
        saved, self._saved_residuals = self._saved_residuals, None
        if saved is None:
            return
        assert self._deployment is not None
        if self._deployment.compression is not None:
            device = self._deployment.context.device
            self._deployment.compression.load_states(saved, device)
        elif any(replica["units"] for replica in saved["replicas"]):
            rank_zero_warn(
                "The checkpoint's residuals of compressed gradients were dropped, because this run "
                "does not compress gradients. Use several replicas and the gradient_codec of the "
                "earlier run to keep them."
            )

    @override
    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        if self._deployment is None or not has_meta_tensors(self._module):
            super().load_model_state_dict(checkpoint, strict)
        else:
            self._deployment.load_model_state(checkpoint["state_dict"], strict)

    @override
    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        assert self._deployment is not None
        states = checkpoint["optimizer_states"]
        for optimizer, state in zip(self.optimizers, states, strict=False):
            self._deployment.load_optimizer_state(optimizer, state)
