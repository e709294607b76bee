"""Gradients on a GPU: they move to the mirror on a stream of their own while backward goes on.

A gradient that is on its way is nowhere to be seen: `parameter.grad` is None until its copy is
done. So no code can read a part of it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping
from functools import partial

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from lightning_dlres.core._compat import (
    accumulated_parameter,
    backward_number,
    call_after_backward,
    has_other_gradient_hooks,
)
from lightning_dlres.core.device.copiers import StreamCopier, StreamCopy
from lightning_dlres.mirror.execute.gradients import free_alias, is_at
from lightning_dlres.mirror.execute.parameter_reads import data_of


class GpuGradientHooks:
    """Hooks that get each gradient when backward has computed it.

    Autograd cannot add a gradient on the GPU to an earlier one in the mirror. So the earlier one
    is hidden from it, and both are added here, on the GPU.

    Args:
        places: Place of each parameter's gradient.
        make_place: Makes the place of a gradient that has none when its hook is attached; None
            leaves such gradients where autograd makes them.
        copier: Copier between the GPU and the mirror.
        device: The GPU.
        limit: Bytes of gradients that may wait on the GPU for their copies. One more gradient may
            exceed it.
        arrived: Called with the parameter when backward has computed its gradient, which may still
            be on its way to the mirror. It returns the unit whose gradients are complete, or None.
        update: Updates a unit, after it has called `settle` for its parameters.
        ended: Called at the end of each backward.

    Attributes:
        is_layerwise: True if units are updated in backward, as soon as their gradients are
            complete.
    """

    def __init__(
        self,
        places: Mapping[nn.Parameter, Tensor],
        make_place: Callable[[nn.Parameter], Tensor] | None,
        copier: StreamCopier,
        *,
        device: torch.device,
        limit: int,
        arrived: Callable[[nn.Parameter], int | None],
        update: Callable[[int], None],
        ended: Callable[[], None],
    ) -> None:
        self._places, self._make_place = dict(places), make_place
        self._copier, self._device, self._limit = copier, device, limit
        self._arrived, self._update, self._ended = arrived, update, ended
        self._handles: dict[nn.Parameter, tuple[RemovableHandle, RemovableHandle]] = {}
        # Gradients that autograd must not see.
        self._hidden: dict[nn.Parameter, Tensor] = {}
        # Copies to places, with the tensors over them, until code has waited for them.
        self._on_the_way: dict[nn.Parameter, tuple[StreamCopy, Tensor]] = {}
        # Copies that hold memory on the GPU, with its bytes.
        self._holding: deque[tuple[StreamCopy, int]] = deque()
        self._held_bytes = 0
        # Number of the backward whose end will be observed.
        self._backward = -1
        self.is_layerwise = False

    def attach(self, parameters: Iterable[nn.Parameter]) -> None:
        """See `MovedGradients.attach`."""
        for parameter in parameters:
            if parameter.requires_grad and parameter not in self._handles:
                if self._make_place is not None and parameter not in self._places:
                    self._places[parameter] = self._make_place(parameter)
                self._handles[parameter] = (
                    parameter.register_hook(partial(self._hide, parameter)),
                    parameter.register_post_accumulate_grad_hook(self._receive),
                )

    def settle(self, parameters: Iterable[nn.Parameter] | None = None) -> None:
        """See `MovedGradients.settle`."""
        for parameter in tuple(self._on_the_way) if parameters is None else parameters:
            if parameter in self._on_the_way:
                copy, gradient = self._on_the_way.pop(parameter)
                copy.synchronize()
                _set_gradient(parameter, gradient)
        # A backward that failed has left these.
        if parameters is None:
            for parameter, gradient in self._hidden.items():
                _set_gradient(parameter, gradient)
            self._hidden.clear()

    def close(self) -> None:
        """See `MovedGradients.close`."""
        self.settle()
        for handles in self._handles.values():
            for handle in handles:
                handle.remove()
        self._handles.clear()
        # Only gradients that exist keep their memory from here on.
        self._places = {}

    def _hide(self, parameter: nn.Parameter, gradient: Tensor) -> None:
        """Hide a parameter's earlier gradient before autograd adds the new one."""
        earlier = parameter.grad
        if earlier is not None:
            self._hidden[parameter] = earlier
            parameter.grad = None

    def _receive(self, hooked: Tensor) -> None:
        parameter = accumulated_parameter(hooked)
        self._observe_end()
        gradient = parameter.grad
        if gradient is not None:
            self._move(parameter, gradient)
        if has_other_gradient_hooks(parameter):
            # They come after this one, and may read the gradient.
            self.settle([parameter])
        unit = self._arrived(parameter)
        if unit is not None and self.is_layerwise:
            self._update(unit)

    def _move(self, parameter: nn.Parameter, gradient: Tensor) -> None:
        place = self._places.get(parameter)
        is_plain = (
            place is not None
            and gradient.layout is torch.strided
            and not gradient.requires_grad
            # Code may have given the parameter data of another dtype or shape.
            and (gradient.dtype, gradient.shape) == (place.dtype, place.shape)
            # Code has used the parameter in the mirror, such as in a loop over all parameters.
            and gradient.device.type == self._device.type
        )
        parameter.grad = None
        if place is None or not is_plain:
            self._add_on_host(parameter, gradient)
            return
        if parameter in self._hidden and not is_at(self._hidden[parameter], place):
            self._add_on_host(parameter, gradient)
            return
        earlier = self._hidden.pop(parameter, None)
        if parameter in self._on_the_way:
            _, earlier = self._on_the_way[parameter]
        if earlier is not None:
            gradient = gradient + self._on_gpu(earlier, place, gradient.device)
        target = _alias(earlier, place)
        if target is None:
            _set_gradient(parameter, gradient.to(place.device))
        else:
            self._send(parameter, gradient, target)

    def _add_on_host(self, parameter: nn.Parameter, gradient: Tensor) -> None:
        """Add a gradient to the earlier one in host memory, and block until it is there."""
        self.settle([parameter])
        earlier = self._hidden.pop(parameter, parameter.grad)
        gradient = gradient.to(data_of(parameter).device if earlier is None else earlier.device)
        place = self._places.get(parameter)
        if earlier is not None:
            gradient = earlier + gradient
            is_outside = place is None or not is_at(earlier, place)
            is_plain = earlier.layout is torch.strided and not gradient.requires_grad
            if is_outside and is_plain and gradient.dtype == earlier.dtype:
                # Code may hold the earlier one, and autograd would add to it.
                _set_gradient(parameter, earlier.copy_(gradient))
                return
        is_like_place = (
            place is not None and gradient.layout is place.layout and gradient.shape == place.shape
        )
        if place is not None and is_like_place and not gradient.requires_grad:
            target = _alias(earlier, place) if gradient.dtype == place.dtype else None
            gradient = gradient if target is None else target.copy_(gradient)
        _set_gradient(parameter, gradient)

    def _on_gpu(self, earlier: Tensor, place: Tensor, device: torch.device) -> Tensor:
        """Return an earlier gradient on the GPU."""
        if not is_at(earlier, place):
            return earlier.to(device)
        # If the gradient is still on its way to the place, the copier lets this copy wait for it.
        memory, copy = self._copier.to_device(_bytes_of(place), device)
        copy.wait()
        return memory.view(place.dtype).as_strided(place.shape, place.stride())

    def _send(self, parameter: nn.Parameter, gradient: Tensor, place: Tensor) -> None:
        """Start to copy a gradient to a tensor in the mirror."""
        if not place.numel():
            _set_gradient(parameter, place)
            return
        if gradient.stride() != place.stride():
            dense = torch.empty_strided(
                place.shape, place.stride(), dtype=place.dtype, device=gradient.device
            )
            gradient = dense.copy_(gradient)
        # Python runs ahead of the GPU. Without a limit, all gradients could wait there.
        while self._holding and self._held_bytes + place.nbytes > self._limit:
            copy, nbytes = self._holding.popleft()
            copy.wait()
            self._held_bytes -= nbytes
        copy = self._copier.to_tier(_bytes_of(gradient), _bytes_of(place))
        self._on_the_way[parameter] = copy, place
        self._holding.append((copy, place.nbytes))
        self._held_bytes += place.nbytes

    def _observe_end(self) -> None:
        """Let the end of the running backward be observed."""
        number = backward_number()
        if number != self._backward:
            self._backward = number
            call_after_backward(self._end)

    def _end(self) -> None:
        self._holding.clear()
        self._held_bytes = 0
        self.settle()
        self._ended()


def _alias(earlier: Tensor | None, place: Tensor) -> Tensor | None:
    """Return the tensor over a place that gets a sum of gradients; None if the place is in use.

    Args:
        earlier: Earlier gradient, which is a part of the sum; None without one.
        place: The place.
    """
    return earlier if earlier is not None and is_at(earlier, place) else free_alias(place)


def _bytes_of(tensor: Tensor) -> Tensor:
    """Return the memory of a dense tensor, uint8[nbytes]."""
    return tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8)


def _set_gradient(parameter: nn.Parameter, gradient: Tensor) -> None:
    """Set a parameter's gradient, also while the parameter's data is on another device."""
    data = data_of(parameter)
    if data.device != gradient.device:
        parameter.data = torch.empty_like(data, device=gradient.device)
    parameter.grad = gradient
    if data.device != gradient.device:
        parameter.data = data
