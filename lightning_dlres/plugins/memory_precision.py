"""Precision plugin that trains within a budget of device memory, like `ActivationOffload`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Literal, get_args

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.plugins.precision import HalfPrecision, MixedPrecision, Precision
from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor, nn
from torch.optim import Optimizer
from typing_extensions import override

from lightning_dlres.callbacks.offloading import MemoryBudget, TrainingSteps
from lightning_dlres.core.errors import ConfigError, got_expected

PrecisionName = Literal["32-true", "bf16-mixed", "16-mixed", "bf16-true", "16-true"]


class MemoryPrecision(MemoryBudget, Precision):
    """Precision plugin that keeps device memory within a budget; see `ActivationOffload`.

    `Trainer(plugins=dlres.MemoryPrecision("bf16-mixed", budget="8GiB"))` computes the same bits as
    `Trainer(precision="bf16-mixed")`, unless `exact=False` is given: every hook is passed on to
    Lightning's own plugin for that precision. Runs with and without this plugin can read each
    other's checkpoints, because the gradient scaler's state is saved under Lightning's usual key.

    Args:
        precision: "32-true", "bf16-mixed", "16-mixed", "bf16-true" or "16-true".
        **arguments: Keyword arguments of `ActivationOffload`; see `MemoryBudget.__init__`.

    Attributes:
        inner: Lightning's own plugin for the precision.

    Raises:
        ConfigError: If an argument has a bad value; when `fit` starts, if the strategy or device is
            not supported; after the measured steps, if no plan meets the budget.
    """

    def __init__(self, precision: PrecisionName = "32-true", **arguments: Any) -> None:
        super().__init__(**arguments)
        if precision not in get_args(PrecisionName):
            expected = f"one of {', '.join(map(repr, get_args(PrecisionName)))}"
            raise ConfigError(got_expected("precision", precision, expected, "'bf16-mixed'"))
        self.precision: Any = precision
        self.inner = _lightning_plugin(precision)
        self._module: LightningModule | None = None
        # Latest batch, before its transfer to the device.
        self._batch: Any = None
        # True inside `optimizer_step`, whose closure runs the training step.
        self._is_stepping = False

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_module": None, "_batch": None}

    @property
    def scaler(self) -> torch.amp.GradScaler | None:
        """Return the gradient scaler of "16-mixed"; None for other precisions."""
        return getattr(self.inner, "scaler", None)

    @override
    def convert_module(self, module: nn.Module) -> nn.Module:
        if isinstance(module, LightningModule):
            self._module = module
            strategy = module.trainer.strategy
            if isinstance(self.inner, MixedPrecision):
                _set_autocast_device(self.inner, strategy.root_device.type)
            if module.trainer.training:
                self.training_steps = TrainingSteps(
                    self._config, module.trainer, type(self).__name__
                )
        return self.inner.convert_module(module)

    @override
    def convert_input(self, data: Any) -> Any:
        self._batch = self.inner.convert_input(data)
        return self._batch

    @override
    @contextmanager
    def train_step_context(self) -> Iterator[None]:
        steps, module = self.training_steps, self._module
        if steps is None or module is None:
            with self.inner.train_step_context():
                yield
            return
        automatic = module.automatic_optimization
        steps.begin(module, self._batch, self._is_stepping or not automatic)
        with self.inner.train_step_context():
            yield
        # In manual optimization, backward and the optimizer's step run inside `training_step`.
        if not automatic:
            steps.end()

    @override
    def post_backward(  # type: ignore[override]
        self, tensor: Tensor, module: LightningModule
    ) -> Tensor:
        loss = self.inner.post_backward(tensor, module)
        # End the step here only if gradients accumulate. Otherwise `optimizer_step` ends it.
        if (
            self.training_steps is not None
            and module.automatic_optimization
            and not self._is_stepping
        ):
            self.training_steps.end()
        return loss

    @override
    def optimizer_step(  # type: ignore[override]
        self, optimizer: Any, model: LightningModule, closure: Callable[[], Any], **kwargs: Any
    ) -> Any:
        self._is_stepping = True
        try:
            result = self.inner.optimizer_step(optimizer, model, closure, **kwargs)
        finally:
            self._is_stepping = False
        if self.training_steps is not None and model.automatic_optimization:
            self.training_steps.end()
        return result

    @override
    def teardown(self) -> None:
        # The steps of an earlier `fit` are closed already, if validation or another stage ends.
        if self.training_steps is not None and not self.training_steps.is_closed:
            line = self.training_steps.summary()
            self.training_steps.close()
            if line is not None:
                rank_zero_info(line)
        # The user may keep the plugin longer than the model.
        self._module = self._batch = None
        self.inner.teardown()

    @override
    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        # Save under the key of Lightning's own plugin, so that runs without this plugin restore it.
        state = self.inner.state_dict()
        if state:
            checkpoint[type(self.inner).__qualname__] = state
        self.inner.on_save_checkpoint(checkpoint)

    @override
    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        state = checkpoint.get(type(self.inner).__qualname__)
        if state:
            self.inner.load_state_dict(state)
        self.inner.on_load_checkpoint(checkpoint)

    @override
    def connect(
        self, model: nn.Module, optimizers: list[Optimizer], lr_schedulers: list[Any]
    ) -> tuple[nn.Module, list[Optimizer], list[Any]]:
        return self.inner.connect(model, optimizers, lr_schedulers)

    @override
    def tensor_init_context(self) -> AbstractContextManager[Any]:
        return self.inner.tensor_init_context()

    @override
    def module_init_context(self) -> AbstractContextManager[Any]:
        return self.inner.module_init_context()

    @override
    def forward_context(self) -> AbstractContextManager[Any]:
        return self.inner.forward_context()

    @override
    def val_step_context(self) -> AbstractContextManager[Any]:  # type: ignore[override]
        return self.inner.val_step_context()

    @override
    def test_step_context(self) -> AbstractContextManager[Any]:  # type: ignore[override]
        return self.inner.test_step_context()

    @override
    def predict_step_context(self) -> AbstractContextManager[Any]:  # type: ignore[override]
        return self.inner.predict_step_context()

    @override
    def convert_output(self, data: Any) -> Any:
        return self.inner.convert_output(data)

    @override
    def pre_backward(  # type: ignore[override]
        self, tensor: Tensor, module: LightningModule
    ) -> Tensor:
        return self.inner.pre_backward(tensor, module)

    @override
    def backward(  # type: ignore[override]
        self, tensor: Tensor, model: LightningModule, optimizer: Any, *args: Any, **kwargs: Any
    ) -> None:
        self.inner.backward(tensor, model, optimizer, *args, **kwargs)

    @override
    def main_params(self, optimizer: Optimizer) -> Any:
        return self.inner.main_params(optimizer)

    @override
    def unscale_gradients(self, optimizer: Optimizer) -> None:
        self.inner.unscale_gradients(optimizer)

    @override
    def clip_gradients(self, optimizer: Optimizer, *args: Any, **kwargs: Any) -> None:
        self.inner.clip_gradients(optimizer, *args, **kwargs)

    @override
    def clip_grad_by_value(self, optimizer: Optimizer, clip_val: int | float) -> None:
        self.inner.clip_grad_by_value(optimizer, clip_val)

    @override
    def clip_grad_by_norm(self, optimizer: Optimizer, clip_val: int | float) -> None:
        self.inner.clip_grad_by_norm(optimizer, clip_val)


def _lightning_plugin(precision: PrecisionName) -> Precision:
    """Return Lightning's own plugin for a precision."""
    if precision in ("bf16-true", "16-true"):
        return HalfPrecision(precision)
    if precision in ("bf16-mixed", "16-mixed"):
        return MixedPrecision(precision, "cuda" if torch.cuda.is_available() else "cpu")
    return Precision()


def _set_autocast_device(inner: MixedPrecision, device: str) -> None:
    """Set the device type of autocast and of the gradient scaler.

    The plugin is made before the Trainer has chosen its device.
    """
    if inner.device != device:
        inner.device = device
        if inner.scaler is not None:
            state = inner.scaler.state_dict()
            inner.scaler = torch.amp.GradScaler(device)
            inner.scaler.load_state_dict(state)
