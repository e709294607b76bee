"""Modes in which a module runs, and trial runs that leave no trace."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from lightning_dlres.core.rng import forked, seed_all_devices
from lightning_dlres.core.wire.tree import Tree, tensors_of

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
    buffers = [(b, b.detach().clone()) for b in module.buffers() if not b.is_meta]
    if module.training != is_training:
        module.train(is_training)
    try:
        with forked(device), torch.set_grad_enabled(records_gradients):
            yield
    finally:
        for m, training in modes:
            m.training = training
        for buffer, before in buffers:
            buffer.data.copy_(before)
