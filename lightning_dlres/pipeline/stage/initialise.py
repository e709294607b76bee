"""Storage and initial values of parameters and buffers that were made on the meta device."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from lightning_dlres.core._compat import recurrent_weights_released, share_gradient_hooks
from lightning_dlres.core.errors import ConfigError
from lightning_dlres.core.rng import forked
from lightning_dlres.pipeline.deferred.values import (
    deferred_values,
    forget_deferred,
    is_deferred,
    share_deferred,
    stand_in_values,
)
from lightning_dlres.pipeline.stage.module_attributes import copies_of_results, copy_of_module
from lightning_dlres.pipeline.stage.remote_parameters import class_on_holder


def replace_storage(parameter: nn.Parameter, data: Tensor) -> None:
    """Give a parameter other data, on any device, and keep the Parameter object.

    Raises:
        ConfigError: If a weak reference to the parameter, or an autograd graph that uses it,
            prevents the swap.
    """
    replacement = nn.Parameter(data.detach(), requires_grad=parameter.requires_grad)
    # The swap exchanges class, attributes and hooks too, so the replacement needs the same ones.
    replacement.__class__ = class_on_holder(parameter)
    replacement.__dict__.update(parameter.__dict__)
    # Only these types can require a gradient, and so have gradient hooks.
    if replacement.is_floating_point() or replacement.is_complex():
        share_gradient_hooks(parameter, replacement)
    # The gradient belongs to the old data, on the old device.
    parameter.grad = None
    try:
        torch.utils.swap_tensors(parameter, replacement)
    except RuntimeError as error:
        raise ConfigError(
            f"A parameter of shape {tuple(parameter.shape)} cannot be moved to another device: "
            f"{error}. Drop other references to it, such as a compiled copy of the module, "
            "or an optimizer or autograd graph made by hand."
        ) from error


def initialise(module: nn.Module, device: torch.device, name: str) -> None:
    """Give storage and values to the meta tensors of one module, without those of its children.

    Deferred tensors get the values that they would have had without deferral, and others those of
    the module's `reset_parameters`.

    Args:
        module: Module; one without meta tensors stays as it is.
        device: Device of the storage.
        name: Name of the module, for the error.

    Raises:
        ConfigError: If the module has meta tensors that are not deferred, but no
            `reset_parameters`.
    """
    fill_deferred(module, device)
    parameters = [p for p in module.parameters(recurse=False) if p.is_meta]
    buffers = [(key, b) for key, b in module.named_buffers(recurse=False) if b.is_meta]
    if not parameters and not buffers:
        return
    reset = getattr(module, "reset_parameters", None)
    if not callable(reset):
        raise ConfigError(
            f"{name!r} ({type(module).__name__}) was made on the meta device and has no "
            "reset_parameters(), so its initial values are unknown. Give the class a "
            "reset_parameters method, or build the model on the CPU and load a checkpoint."
        )
    # A tied weight that another module has initialised must keep its values.
    initialised = [
        (p, p.detach().clone()) for p in module.parameters(recurse=False) if not p.is_meta
    ]
    with recurrent_weights_released(module):
        for parameter in parameters:
            replace_storage(parameter, torch.empty_like(parameter, device=device))
    for key, buffer in buffers:
        setattr(module, key, torch.empty_like(buffer, device=device))
    reset()
    with torch.no_grad():
        for parameter, value in initialised:
            parameter.copy_(value)


def initialised_copy(module: nn.Module, device: torch.device) -> nn.Module:
    """Return a copy of a module on a device, with values for its meta tensors.

    Those of deferred tensors are not their own; see `stand_in_values`. The copy serves for runs
    that measure or trace.

    Raises:
        ConfigError: If a module in it has meta tensors that are not deferred, but no
            `reset_parameters`.
    """
    module_copy = copy_of_module(module, copies_of_results(module))
    share_deferred(module, module_copy)
    with forked(device):
        for name, child in module_copy.named_modules():
            fill_deferred(child, device, stand_in_values)
            initialise(child, device, name)
    return module_copy.to(device)


def fill_deferred(
    module: nn.Module,
    device: torch.device,
    values_of: Callable[[Sequence[Tensor]], list[Tensor]] = deferred_values,
) -> None:
    """Give storage and values to a module's deferred tensors, without those of its children.

    Args:
        module: The module.
        device: Device of the storage.
        values_of: Returns the values of deferred tensors.
    """
    parameters = [p for p in module.parameters(recurse=False) if is_deferred(p)]
    buffers = [(key, b) for key, b in module.named_buffers(recurse=False) if is_deferred(b)]
    values = values_of([*parameters, *(buffer for _, buffer in buffers)])
    with recurrent_weights_released(module):
        for parameter in parameters:
            replace_storage(parameter, values.pop(0).to(device))
            forget_deferred(parameter)
    for key, _ in buffers:
        setattr(module, key, values.pop(0).to(device))
