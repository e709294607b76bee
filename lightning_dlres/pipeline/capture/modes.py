"""Modes in which a module runs, and trial runs that leave no trace."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from lightning_dlres.core._compat import storage_key
from lightning_dlres.core.rng import forked, seed_all_devices
from lightning_dlres.core.wire.nested import tensors_in
from lightning_dlres.core.wire.tree import Tree, tensors_of
from lightning_dlres.pipeline.capture.operations import operation_name, written_by
from lightning_dlres.pipeline.stage.attribute_state import AttributeState
from lightning_dlres.pipeline.stage.module_attributes import MANAGED_ATTRIBUTES

# `training` of a module, and if gradients are recorded: code may ask for both.
Mode = tuple[bool, bool]
TRAINING: Mode = (True, True)
EVALUATION: Mode = (False, False)
# Training of a module that the user has put into `eval()` mode, such as to freeze BatchNorm.
FINE_TUNING: Mode = (False, True)
MODES = TRAINING, EVALUATION, FINE_TUNING


def mode_of(module: nn.Module) -> Mode:
    """Return the mode in which a module would run now."""
    if module.training:
        # Sampling with dropout records no gradients.
        return TRAINING
    return FINE_TUNING if torch.is_grad_enabled() else EVALUATION


def seed_layer(layer: int) -> None:
    """Seed torch's generators before a layer of a trial run."""
    seed_all_devices(layer)


def device_of(inputs: Tree) -> torch.device:
    """Return the device of the first tensor of a tree."""
    tensors = tensors_of(inputs)
    return tensors[0].device if tensors else torch.device("cpu")


@contextmanager
def trial(module: nn.Module, mode: Mode, device: torch.device) -> Iterator[None]:
    """Context manager in which a module is in a mode, and which restores all that a run changes.

    Args:
        module: The module.
        mode: The mode.
        device: Device on which the module runs.
    """
    is_training, records_gradients = mode
    modes = [(m, m.training) for m in module.modules()]
    # A layer that sets itself up in its first call must do so again. A forward may be replaced
    # during the trial.
    attributes = AttributeState(module.modules(), MANAGED_ATTRIBUTES | {"forward"})
    buffers = [(b, b.detach().clone()) for b in module.buffers() if not b.is_meta]
    if module.training != is_training:
        module.train(is_training)
    try:
        with (
            forked(device),
            torch.set_grad_enabled(records_gradients),
            parameters_restored(module),
        ):
            yield
    finally:
        for m, training in modes:
            m.training = training
        attributes.restore()
        for buffer, before in buffers:
            buffer.data.copy_(before)


@contextmanager
def parameters_restored(module: nn.Module) -> Iterator[None]:
    """Context manager that gives a module's parameters the values that they had before."""
    kept = _KeptParameters(module)
    try:
        with kept:
            yield
    finally:
        kept.restore()


class _KeptParameters(TorchFunctionMode):
    """Mode that keeps the values of parameters that operations are about to change in place.

    A step may do that to a teacher, which follows the weights of a student. Copies of all
    parameters would take as much memory as the model.

    Args:
        module: The module with the parameters.
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self._aliases = [(p, p.detach()) for p in module.parameters() if not p.is_meta]
        self._of_storage: dict[int, list[Tensor]] = {}
        for _, alias in self._aliases:
            self._of_storage.setdefault(storage_key(alias), []).append(alias)
        self._kept: dict[int, list[tuple[Tensor, Tensor]]] = {}

    def __torch_function__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        for tensor in tensors_in(written_by(operation_name(function), args, kwargs)):
            key = storage_key(tensor)
            if key in self._of_storage and key not in self._kept:
                self._kept[key] = [(alias, alias.clone()) for alias in self._of_storage[key]]
        return function(*args, **kwargs)

    def restore(self) -> None:
        """Give all parameters the tensors and values that they had."""
        for pairs in self._kept.values():
            for alias, before in pairs:
                alias.copy_(before)
        for parameter, alias in self._aliases:
            if storage_key(parameter) != storage_key(alias):
                parameter.data = alias
