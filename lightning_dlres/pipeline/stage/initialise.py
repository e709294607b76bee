"""Storage and initial values for parameters and buffers that were made on the meta device."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from lightning_dlres.core._compat import copy_hooks, recurrent_weights_released
from lightning_dlres.core.errors import ConfigError
from lightning_dlres.pipeline.stage.remote_parameters import class_of_own


def replace_storage(parameter: nn.Parameter, data: Tensor) -> None:
    """Give a parameter other data, on whatever device, keeping the Parameter object.

    Raises:
        ConfigError: something holds a weak reference to the parameter or a graph over it, so that
            it cannot be swapped.
    """
    replacement = nn.Parameter(data.detach(), requires_grad=parameter.requires_grad)
    # The swap exchanges class, attributes and hooks as well.
    replacement.__class__ = class_of_own(parameter)
    replacement.__dict__.update(parameter.__dict__)
    if replacement.is_floating_point() or replacement.is_complex():
        copy_hooks(parameter, replacement)
    parameter.grad = None
    try:
        torch.utils.swap_tensors(parameter, replacement)
    except RuntimeError as error:
        raise ConfigError(
            f"A parameter of shape {tuple(parameter.shape)} cannot be moved: {error}. Expected "
            "that nothing else refers to it before training. Drop other references (a compiled "
            "copy, an optimizer or a graph made by hand) first."
        ) from error


def initialise(module: nn.Module, device: torch.device, name: str) -> None:
    """Give storage and values to the meta tensors that a module holds itself (not its children).

    Raises:
        ConfigError: there are some, and the module has no `reset_parameters`.
    """
    parameters = [p for p in module.parameters(recurse=False) if p.is_meta]
    buffers = [(key, b) for key, b in module.named_buffers(recurse=False) if b.is_meta]
    if not parameters and not buffers:
        return
    reset = getattr(module, "reset_parameters", None)
    if not callable(reset):
        raise ConfigError(
            f"{name!r} ({type(module).__name__}) was made on the meta device, and has no "
            "reset_parameters(): its initial values are unknown. Give the class a "
            "reset_parameters method, or load a checkpoint that was made elsewhere into a model "
            "built on the CPU."
        )
    # A tied weight that another module has initialised keeps its values.
    known = [(p, p.detach().clone()) for p in module.parameters(recurse=False) if not p.is_meta]
    with recurrent_weights_released(module):
        for parameter in parameters:
            replace_storage(parameter, torch.empty_like(parameter, device=device))
    for key, buffer in buffers:
        setattr(module, key, torch.empty_like(buffer, device=device))
    reset()
    with torch.no_grad():
        for parameter, value in known:
            parameter.copy_(value)
