"""Checkpoints of a model of which each rank holds a part."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lightning.pytorch import LightningModule
from lightning.pytorch.trainer.states import TrainerFn, TrainerStatus
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor, nn
from torch.optim import Optimizer
from typing_extensions import override

from lightning_dlres.core._compat import CALL
from lightning_dlres.core.comm.gathered_on_disk import gather_on_disk
from lightning_dlres.core.errors import ConfigError
from lightning_dlres.pipeline.execute.partition import has_meta_tensors, resident_parameter_bytes
from lightning_dlres.pipeline.execute.sharded_checkpoint import (
    REST,
    ShardedCheckpoint,
    is_sharded,
    save_sharded,
)
from lightning_dlres.pipeline.execute.states import with_entries
from lightning_dlres.pipeline.plan.plan import PipelinePlan
from lightning_dlres.pipeline.stage.module_attributes import copy_of_module
from lightning_dlres.strategies.connected_strategy import ConnectedStrategy
from lightning_dlres.strategies.hetero_pipe.deployment import Deployment, load_sharded_model
from lightning_dlres.strategies.hetero_pipe.step.forward_replacement import user_forward_in

# Key, in a Lightning checkpoint, of what compression between replicas has not sent yet.
CHECKPOINT_KEY = "dlres_replica_residuals"
# Key, in a loaded checkpoint, of the directory with its shards.
_SHARDS = "dlres_shards"


class PartitionedStrategy(ConnectedStrategy):
    """Strategy whose ranks hold a part of the model each, and write checkpoints of the whole.

    Args:
        saves_shards: True lets each rank write its part of a checkpoint.
        **options: Arguments of `ConnectedStrategy`.
    """

    def __init__(self, *, saves_shards: bool, **options: Any) -> None:
        super().__init__(**options)
        self._saves_shards = saves_shards
        self._deployment: Deployment | None = None
        self._saved_residuals: dict[str, Any] | None = None

    @property
    def plan(self) -> PipelinePlan | None:
        """Plan of the current or last run; None before the first."""
        return self._deployment.plan if self._deployment is not None else None

    @property
    @override
    def _has_run(self) -> bool:
        return self._deployment is not None

    @property
    def resident_parameter_bytes(self) -> int:
        """Bytes of parameters that this rank holds."""
        return resident_parameter_bytes(self._module)

    @override
    def lightning_module_state_dict(self) -> dict[str, Any]:
        state = self._module.state_dict()
        if self._deployment is None:
            return state
        if self._connection is None and self._deployment.is_whole:
            if any(isinstance(value, Tensor) and value.is_meta for value in state.values()):
                raise ConfigError(
                    "The model must be whole to be saved, got one without the layers of other "
                    "ranks, because its run has failed. Use ModelCheckpoint(save_on_exception="
                    "True), or go on from the last checkpoint."
                )
            return state
        if self._writes_shards:
            return state
        with self._short_timeout_after_failure(), self._mailbox_in_or_after_run() as mailbox:
            return self._deployment.gather_model_state(state, mailbox)

    @override
    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        optimizer = getattr(optimizer, "optimizer", optimizer)
        state = super().optimizer_state(optimizer)
        if self._deployment is None or "state" not in state or self._writes_shards:
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
        if self._writes_shards and self._deployment is not None:
            self._save_sharded(checkpoint, filepath, storage_options)
        else:
            if self.is_global_zero:
                _fill_hyperparameters(checkpoint, self._module)
            super().save_checkpoint(checkpoint, filepath, storage_options)

    @property
    def _writes_shards(self) -> bool:
        return self._saves_shards and self.world_size > 1

    def _save_sharded(
        self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any
    ) -> None:
        assert self._deployment is not None
        if storage_options is not None or "://" in str(filepath):
            raise ConfigError(
                "filepath must be a path on storage that all ranks share, without storage_options, "
                f"got {filepath} and {storage_options}. Use save_distributed_checkpoint=False."
            )
        own = self._deployment.checkpoint_entries(checkpoint, self.optimizers)
        states = [
            {key: value for key, value in state.items() if key != "state"}
            for state in checkpoint.get("optimizer_states", [])
        ]
        rest = {**checkpoint, "state_dict": with_entries(checkpoint["state_dict"], {})}
        if "optimizer_states" in checkpoint:
            rest["optimizer_states"] = states
        with self._announcing_failures():
            save_sharded(
                Path(filepath),
                own,
                rest,
                rank=self.global_rank,
                writers=self._deployment.checkpoint_writers,
                barrier=self.barrier,
            )

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
        path = Path(checkpoint_path)
        if is_sharded(path):
            checkpoint = super().load_checkpoint(path / REST, weights_only)
            checkpoint[_SHARDS] = str(path)
        else:
            checkpoint = super().load_checkpoint(checkpoint_path, weights_only)
        residuals = checkpoint.pop(CHECKPOINT_KEY, None)
        if self._module.trainer.state.fn == TrainerFn.FITTING:
            self._saved_residuals = residuals
            if self.restore_checkpoint_after_setup:
                self._load_residuals()
        return checkpoint

    def _load_residuals(self) -> None:
        """Continue from the residuals of a loaded checkpoint, if there are any."""
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
        if _SHARDS in checkpoint:
            shards = _shards_of(checkpoint)
            load_sharded_model(self._module, checkpoint["state_dict"], shards, strict)
        elif self._deployment is None or not has_meta_tensors(self._module):
            super().load_model_state_dict(checkpoint, strict)
        else:
            self._deployment.load_model_state(checkpoint["state_dict"], strict)

    @override
    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        assert self._deployment is not None
        states = checkpoint["optimizer_states"]
        for number, (optimizer, state) in enumerate(zip(self.optimizers, states, strict=False)):
            if _SHARDS in checkpoint:
                shards = _shards_of(checkpoint)
                self._deployment.load_sharded_optimizer_state(optimizer, number, state, shards)
            else:
                self._deployment.load_optimizer_state(optimizer, state)
        # A callback returns to an earlier step, as after a search of the learning rate.
        self._load_residuals()


def _shards_of(checkpoint: Mapping[str, Any]) -> ShardedCheckpoint:
    return ShardedCheckpoint(Path(checkpoint[_SHARDS]))


def _fill_hyperparameters(checkpoint: dict[str, Any], module: LightningModule) -> None:
    """Give modules among the hyperparameters of a checkpoint the weights of all ranks.

    `save_hyperparameters` keeps the modules that a constructor has got, of which this rank may hold
    no weights.
    """
    key = LightningModule.CHECKPOINT_HYPER_PARAMS_KEY
    parameters = checkpoint.get(key)
    if not isinstance(parameters, dict):
        return
    names = {id(inner): name for name, inner in module.named_modules()}
    whole = {
        name: _whole_copy(value, names[id(value)], checkpoint["state_dict"])
        for name, value in parameters.items()
        if id(value) in names and has_meta_tensors(value)
    }
    if whole:
        checkpoint[key] = copy.copy(parameters)
        checkpoint[key].update(whole)


def _whole_copy(module: nn.Module, name: str, state: Mapping[str, Any]) -> nn.Module:
    """Return a copy of a module, with values from the model's state dict."""
    prefix = f"{name}." if name else ""
    memo: dict[int, Any] = {
        id(p): nn.Parameter(state[prefix + key], p.requires_grad)
        for key, p in module.named_parameters(remove_duplicate=False)
        if prefix + key in state
    }
    for key, buffer in module.named_buffers(remove_duplicate=False):
        memo[id(buffer)] = state.get(prefix + key, buffer)
    copied = copy_of_module(module, memo)
    for inner, of_copy in zip(module.modules(), copied.modules(), strict=True):
        for attribute in ("forward", CALL):
            replaced = vars(of_copy).pop(attribute, None)
            own = user_forward_in(vars(inner).get(attribute))
            if replaced is not None and own is not None:
                vars(of_copy)[attribute] = own
    return copied
