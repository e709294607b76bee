"""Gradients on a device that is the CPU: they leave it as soon as backward has made them.

A gradient goes to its place in the mirror. Or, if nothing needs it any more, its layer is updated
at once and the gradient is gone.

Code may keep a gradient of an earlier backward, to compare it with a later one. Autograd makes a
new tensor for each, so a place must not be written again while such code holds a tensor over it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from lightning_dlres.core._compat import (
    StorageReference,
    accumulated_parameter,
    storage_owner_count,
    storage_reference,
)
from lightning_dlres.mirror.execute.region import over


def free_alias(place: Tensor) -> Tensor | None:
    """Return a tensor over the memory of a place; None while code holds an earlier one."""
    if storage_owner_count(place) > 1:
        return None
    return over(place.untyped_storage(), place)


def is_at(gradient: Tensor, place: Tensor) -> bool:
    """Return True if a gradient lies in a place."""
    is_strided = gradient.layout is torch.strided and gradient.device == place.device
    return is_strided and gradient.data_ptr() == place.data_ptr() and gradient.shape == place.shape


class MovedGradients(Protocol):
    """Hooks that move gradients from the device to the mirror.

    Attributes:
        is_layerwise: True if units are updated in backward, as soon as their gradients are
            complete.
    """

    is_layerwise: bool

    def attach(self, parameters: Iterable[nn.Parameter]) -> None:
        """Attach the hooks to parameters that have none yet and need gradients."""

    def settle(self, parameters: Iterable[nn.Parameter] | None = None) -> None:
        """Wait until the gradients of some parameters, or of all, are in their places."""

    def close(self) -> None:
        """Remove the hooks. Gradients stay in the mirror."""


class GradientHooks:
    """Hooks that get each gradient when backward has computed it.

    A gradient of another kind than its place (sparse, or part of a graph) stays where it is.

    Args:
        places: Place of each parameter's gradient.
        make_place: Makes the place of a gradient that has none when its hook is attached; None
            leaves such gradients where autograd makes them.
        arrived: Called with the parameter when backward has computed its gradient. It returns the
            unit whose gradients are complete, or None.
        update: Updates a unit.

    Attributes:
        is_layerwise: True if units are updated in backward, as soon as their gradients are
            complete.
    """

    def __init__(
        self,
        places: Mapping[nn.Parameter, Tensor],
        make_place: Callable[[nn.Parameter], Tensor] | None,
        arrived: Callable[[nn.Parameter], int | None],
        update: Callable[[int], None],
    ) -> None:
        self._places, self._make_place = dict(places), make_place
        self._arrived, self._update = arrived, update
        self._handles: dict[nn.Parameter, RemovableHandle] = {}
        # Memory of gradients that stayed where autograd had made them.
        self._outside: dict[nn.Parameter, StorageReference] = {}
        self.is_layerwise = False

    def attach(self, parameters: Iterable[nn.Parameter]) -> None:
        """Attach the hooks to parameters that have none yet and need gradients."""
        for parameter in parameters:
            if parameter.requires_grad and parameter not in self._handles:
                if self._make_place is not None and parameter not in self._places:
                    self._places[parameter] = self._make_place(parameter)
                handle = parameter.register_post_accumulate_grad_hook(self._receive)
                self._handles[parameter] = handle

    def settle(self, parameters: Iterable[nn.Parameter] | None = None) -> None:
        """See `MovedGradients.settle`; here, gradients are in their places at once."""

    def close(self) -> None:
        """Remove the hooks. Gradients stay in the mirror."""
        for handle in self._handles.values():
            handle.remove()
        self._handles.clear()
        # Only gradients that exist keep their memory from here on.
        self._places = {}

    def _receive(self, hooked: Tensor) -> None:
        parameter = accumulated_parameter(hooked)
        if not self.is_layerwise:
            self._move(parameter)
        unit = self._arrived(parameter)
        if unit is not None and self.is_layerwise:
            self._update(unit)

    def _move(self, parameter: nn.Parameter) -> None:
        gradient, place = parameter.grad, self._places.get(parameter)
        # Autograd adds to a gradient that is in its place already.
        if gradient is None or place is None or is_at(gradient, place):
            return
        is_plain = gradient.layout is torch.strided and not gradient.requires_grad
        # Code may have given the parameter data of another dtype or shape.
        if not is_plain or (gradient.dtype, gradient.shape) != (place.dtype, place.shape):
            return
        # Autograd adds to a gradient that had to stay where it is, too, and code may hold it.
        memory, outside = storage_reference(gradient), self._outside.get(parameter)
        stays = outside is not None and outside == memory
        alias = None if stays else free_alias(place)
        if alias is None:
            self._outside[parameter] = memory
        else:
            self._outside.pop(parameter, None)
            parameter.grad = alias.copy_(gradient)
