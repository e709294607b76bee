"""Callback that keeps parameters, gradients and optimizer states in host memory."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import Any, Literal

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import StochasticWeightAveraging
from lightning.pytorch.plugins.precision import (
    DoublePrecision,
    HalfPrecision,
    MixedPrecision,
    Precision,
)
from lightning.pytorch.strategies import SingleDeviceStrategy
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from lightning.pytorch.utilities.model_helpers import is_overridden
from typing_extensions import override

from lightning_dlres._compat import has_foreign_gradient_hooks, has_replaced_step
from lightning_dlres.callbacks.host_parameters import parameters_on_host
from lightning_dlres.callbacks.offloading import MemoryBudget
from lightning_dlres.callbacks.open_step import OpenStep, is_stepping_batch
from lightning_dlres.core.device.link_use import LinkUse
from lightning_dlres.core.errors import ConfigError
from lightning_dlres.mirror.config import LAYERWISE, MirrorConfig
from lightning_dlres.mirror.execute.construction import constructing
from lightning_dlres.mirror.mirror import Mirror
from lightning_dlres.strategies.capabilities import FetchesOptimizerStates, updates_elsewhere

# Key of training steps.
_TRAINING = "training"
# Methods of a module that replace a part of backward or of the update.
_MODULE_HOOKS = (
    "backward",
    "configure_gradient_clipping",
    "optimizer_step",
    "optimizer_zero_grad",
)
# Hooks of modules and callbacks that run between backward and the update.
_GRADIENT_HOOKS = ("on_after_backward", "on_before_optimizer_step")
# Hook that may read the gradients of the step before.
_ZEROING_HOOK = "on_before_zero_grad"


class ParameterMirror(Callback):
    """Callback that trains models whose parameters and optimizer exceed the device's memory.

    All parameters, gradients and optimizer histories lie in one region of host memory, or in a file
    on a local disk. A history is an optimizer's state of a parameter, such as its momentum.
    Optimizers update parameters and histories there, in place. The device has only a window of
    layers: the parameters of a layer come just before it runs, in forward and in backward, and its
    gradients leave as soon as they are made. The first steps learn the order of the layers and
    their times; a plan then fetches each layer ahead of its use.

    On a GPU, the region is pinned host memory, and copies run while the GPU computes. On a CPU, the
    window is memory of the process, and the region is of use as a file.

    Gradients and weights are those of plain training with the same optimizer, bitwise on a CPU. On
    a GPU they differ by rounding, since the processor updates the parameters. With the strategy
    `dlres_parameter_server`, the histories are on the servers, and new parameters arrive in the
    region.

    Args:
        window: Bytes of parameters on the device at once. "auto": the smallest window whose
            predicted step is at most 2 % longer than with all layers on the device. "min": one
            layer at a time.
        disk: Directory on a fast local disk, for a file that holds the region. None: host memory.
        update: "after_backward" lets the optimizer update all layers after backward, as plain
            training does. "layerwise" updates each layer amid backward, as soon as its gradients
            are complete, in steps without clipping, loss scaler and hooks between backward and the
            update. Layers with weights that are used outside of their module's call wait for the
            end of backward. No other code may then read gradients, or the weights of a layer that
            backward has left.
        profile_steps: Steps that are measured before a plan is made.
        fused: Let `SGD`, `Adam`, `AdamW` and `Adagrad` of torch use their fused kernels, where you
            have chosen neither `fused` nor `foreach`.

    Raises:
        ConfigError: If an argument has a bad value; when training or evaluation starts, if the
            Trainer has several mirrors, if the strategy is neither for a single device nor
            `dlres_parameter_server` on CPUs, if the device is neither a CPU nor a CUDA GPU, or if a
            parameter cannot be moved.
    """

    def __init__(
        self,
        *,
        window: int | str = "auto",
        disk: str | Path | None = None,
        update: Literal["after_backward", "layerwise"] = "after_backward",
        profile_steps: int = 2,
        fused: bool = True,
    ) -> None:
        super().__init__()
        self._config = MirrorConfig(
            window=window, disk=disk, update=update, profile_steps=profile_steps, fused=fused
        )
        self.mirror: Mirror | None = None
        self._open_step = OpenStep()
        # Context in which the model is made.
        self._construction = ExitStack()
        # Context of a run on a GPU.
        self._run = ExitStack()

    def __getstate__(self) -> dict[str, Any]:
        # The state of a run cannot be pickled, and must not reach another process.
        stacks = {"_construction": ExitStack(), "_run": ExitStack()}
        return {**self.__dict__, **stacks, "mirror": None, "_open_step": OpenStep()}

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        mirrors = sum(isinstance(one, ParameterMirror) for one in trainer.callbacks)  # type: ignore[attr-defined]
        if mirrors > 1:
            raise ConfigError(
                f"callbacks must have one ParameterMirror, got {mirrors}. Remove all but one."
            )
        strategy = trainer.strategy
        if not isinstance(strategy, SingleDeviceStrategy) and not updates_elsewhere(strategy):
            raise ConfigError(
                "the strategy must be one for a single device, or dlres_parameter_server, for "
                f"ParameterMirror, got {type(strategy).__name__}. Use Trainer(devices=1)."
            )
        kind = strategy.root_device.type
        if kind == "cuda" and isinstance(strategy, SingleDeviceStrategy):
            self._run.close()
            self._run.enter_context(parameters_on_host(strategy))
            _keep_scale_on_host(trainer)
        elif kind != "cpu":
            raise ConfigError(
                "the device must be the CPU, or a CUDA GPU in a strategy for a single device, for "
                f"ParameterMirror, got {strategy.root_device} in {type(strategy).__name__}. Use "
                'Trainer(accelerator="cpu").'
            )
        directory = self._config.directory()
        if isinstance(strategy, FetchesOptimizerStates):
            strategy.state_directory = directory
        if directory is not None:
            # `configure_model` makes the model after this hook.
            self._construction = ExitStack()
            self._construction.enter_context(constructing(directory))
        _put_before_offloading(self, trainer)

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._open(trainer, pl_module)

    # Training may begin with validation, and evaluation may run alone.
    on_sanity_check_start = on_validation_start = on_train_start
    on_test_start = on_predict_start = on_train_start

    @override
    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int
    ) -> None:
        # Other code may have exchanged the optimizers.
        self._open(trainer, pl_module)
        # True if no other code needs the gradients of this step, so that layers may be updated amid
        # backward.
        is_free = False
        if self._config.update == LAYERWISE:
            is_free = is_stepping_batch(trainer) and gradients_are_free(trainer, pl_module)
            is_free &= not updates_elsewhere(trainer.strategy)
        self._begin(_TRAINING, is_free=is_free)

    @override
    def on_train_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
    ) -> None:
        self._open_step.end()

    @override
    def on_validation_batch_start(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        self._begin(f"{trainer.state.stage} {dataloader_idx}")

    on_test_batch_start = on_predict_batch_start = on_validation_batch_start

    @override
    def on_validation_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        self._open_step.end()

    on_test_batch_end = on_predict_batch_end = on_validation_batch_end

    @override
    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        # A hook may have ended the epoch in the middle of a step, without `on_train_batch_end`.
        self._open_step.abandon()

    @override
    def on_exception(
        self, trainer: Trainer, pl_module: LightningModule, exception: BaseException
    ) -> None:
        # Lightning calls no `teardown` after an exception.
        self._close()
        self._run.close()

    @override
    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self.mirror is not None:
            rank_zero_info(self.mirror.summary())

    @override
    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self._close()
        self._run.close()

    def link_use(self) -> LinkUse:
        """Return the copies of a training step, with which `ActivationOffload` shares the link."""
        return LinkUse() if self.mirror is None else self.mirror.link_use()

    def _open(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Make the mirror of this run, unless there is one; a step that is open ends."""
        self._open_step.abandon()
        self._construction.close()
        has_optimizers = trainer.state.fn == "fit" and not updates_elsewhere(trainer.strategy)
        optimizers = trainer.optimizers if has_optimizers else []
        if self.mirror is not None and self.mirror.is_of(pl_module, optimizers):
            return
        self._close()
        # Evaluation runs in inference mode, but training may use the tensors later.
        with torch.inference_mode(False):
            self.mirror = Mirror(
                pl_module,
                optimizers,
                self._config,
                trainer.strategy.root_device,
                has_gradients=trainer.state.fn == "fit",
            )
        if self.mirror.aliased:
            names = ", ".join(self.mirror.aliased)
            rank_zero_warn(
                f"ParameterMirror: other tensors share the memory of {names}. They will not see "
                "updates. To tie parameters, register one Parameter twice."
            )

    def _close(self) -> None:
        """Leave an open step, and remove the hooks; the mirror's report stays."""
        self._open_step.abandon()
        self._construction.close()
        if self.mirror is not None:
            self.mirror.close()

    def _begin(self, key: str, is_free: bool = False) -> None:
        if self.mirror is not None:
            is_training = key == _TRAINING
            self._open_step.begin(self.mirror.step(key, is_training=is_training, is_free=is_free))


def mirror_report(trainer: Trainer) -> str | None:
    """Return the text of the Trainer's mirror for a report; None without one."""
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        if isinstance(callback, ParameterMirror) and callback.mirror is not None:
            return callback.mirror.report()
    return None


def gradients_are_free(trainer: Trainer, pl_module: LightningModule) -> bool:
    """Return True if no code needs the gradients between backward and the optimizer's update.

    Code may attach hooks at any time, so ask before each step.
    """
    hooked = any(
        is_overridden(hook, pl_module) for hook in (*_MODULE_HOOKS, *_GRADIENT_HOOKS, _ZEROING_HOOK)
    ) or any(
        is_overridden(hook, callback, parent=Callback)
        for callback in trainer.callbacks  # type: ignore[attr-defined]
        for hook in (*_GRADIENT_HOOKS, _ZEROING_HOOK)
    )
    # In its last epoch, with BatchNorm, it steps again with the gradients of the step before.
    hooked |= any(isinstance(one, StochasticWeightAveraging) for one in trainer.callbacks)  # type: ignore[attr-defined]
    hooked |= any(map(has_foreign_gradient_hooks, pl_module.parameters()))
    hooked |= any(map(has_replaced_step, trainer.optimizers))
    return (
        pl_module.automatic_optimization
        and not hooked
        and not trainer.gradient_clip_val
        and _leaves_gradients_alone(trainer.precision_plugin)
        and len(trainer.optimizers) == 1
    )


def _leaves_gradients_alone(precision: Precision) -> bool:
    """Return True if a precision neither scales the loss nor replaces the optimizer's step."""
    if type(precision) is MixedPrecision:
        return precision.scaler is None
    return type(precision) in (Precision, DoublePrecision, HalfPrecision)


def _keep_scale_on_host(trainer: Trainer) -> None:
    """Let the precision's loss scaler, if any, keep its scale where the gradients are.

    A scaler makes its scale on the device of the first tensor that it scales. It would copy one
    from the GPU to gradients in host memory, and not wait for the copy.
    """
    scaler = getattr(trainer.precision_plugin, "scaler", None)
    if isinstance(scaler, torch.amp.GradScaler):
        scaler.scale(torch.ones(()))


def _put_before_offloading(mirror: ParameterMirror, trainer: Trainer) -> None:
    """Let the mirror's hooks on saved tensors be outside of those of `ActivationOffload`.

    Autograd calls only the innermost hooks. Those of `ActivationOffload` first ask the mirror
    whether the tensor is one of its parameters (`core.saved_tensors.claimed`).
    """
    callbacks: list[Callback] = trainer.callbacks  # type: ignore[attr-defined]
    others = [index for index, one in enumerate(callbacks) if isinstance(one, MemoryBudget)]
    if others and others[0] < callbacks.index(mirror):
        callbacks.remove(mirror)
        callbacks.insert(others[0], mirror)
