"""Optimizer history in the mirror.

An optimizer makes its history in its first step, in new memory. That step is taken unit by unit,
and each unit's history moves to its place at once. So only one unit's history is outside of the
mirror at a time. Later steps are the optimizer's own, and work on the mirror in place.

Fused kernels read parameter, gradient and history as flat memory. So all three get the strides of
the parameter before each step.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from lightning_dlres.core._compat import register_first_post_hook
from lightning_dlres.mirror.execute.region import new_tensor
from lightning_dlres.mirror.profile.history import (
    history_of,
    is_per_parameter,
    planned_history,
    step_without_hooks,
    use_fused_kernels,
)
from lightning_dlres.mirror.profile.units import ParameterUnit

# Shape, strides and dtype of a tensor.
_Form = tuple[torch.Size, tuple[int, ...], torch.dtype]


class HistoryInMirror:
    """Optimizer whose history lies in the mirror.

    Args:
        optimizer: The optimizer.
        units: Units of the model.
        places: Place of each tensor of the history, by parameter and key of its state.
        wants_fused: True to use the optimizer's fused kernel, if its gradients allow it.
        before_step: Called when the gradients of a step are there, before the optimizer uses them.
        directory: Directory of files for the history of parameters that are trained later; None
            leaves it where the optimizer makes it.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        units: Sequence[ParameterUnit],
        places: Mapping[nn.Parameter, Mapping[str, Tensor]],
        *,
        wants_fused: bool,
        before_step: Callable[[], None],
        directory: Path | None = None,
    ) -> None:
        self._optimizer, self._units, self._places = optimizer, units, dict(places)
        self._directory = directory
        self._wants_fused, self._prepare = wants_fused, before_step
        self._handles: list[RemovableHandle] = []
        self._pre_hook: RemovableHandle | None = None
        # Gradients that the optimizer must not see in the step that is running.
        self._hidden: list[tuple[nn.Parameter, Tensor]] = []
        # Form of each parameter to which its state was brought.
        self._forms: dict[nn.Parameter, _Form] = {}
        self._move(places)
        if is_per_parameter(optimizer):
            self._handles = [
                # Hooks of others then see the gradients again.
                register_first_post_hook(optimizer, self._after_step),
                optimizer.register_load_state_dict_post_hook(self._after_load),
            ]
            self.come_last()

    def come_last(self) -> None:
        """Let the hook before a step be the last one; called before each step.

        It makes the step's gradients. Hooks of others expect those of the step before, and what
        they change, such as the learning rate, must count.
        """
        if self._handles:
            if self._pre_hook is not None:
                self._pre_hook.remove()
            self._pre_hook = self._optimizer.register_step_pre_hook(self._before_step)

    def close(self) -> None:
        """Remove the hooks. The history stays in the mirror."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        if self._pre_hook is not None:
            self._pre_hook.remove()

    def _before_step(
        self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """Make the gradients of the step, and update parameters without history, unit by unit."""
        # A step that failed has left these.
        self._hidden.clear()
        # The first argument is the optimizer itself.
        closure = args[1] if len(args) > 1 else kwargs.get("closure")
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
            args, kwargs = args[:1], {"closure": lambda: loss}
        self._prepare()
        if self._wants_fused:
            self._wants_fused = False
            use_fused_kernels(optimizer)
        if self._directory is not None:
            self._place_new_parameters(self._directory)
        self._hidden += self._fit_fused_kernels(optimizer.param_groups)
        if all(p in optimizer.state for p, places in self._places.items() if places):
            return args, kwargs
        for unit in self._units:
            new = [
                p
                for p in unit.parameters
                if self._places.get(p) and p not in optimizer.state and p.grad is not None
            ]
            self._hidden += [(p, p.grad) for p in new if p.grad is not None]
            self.update(new)
        return args, kwargs

    def _place_new_parameters(self, directory: Path) -> None:
        """Make places for the history of parameters that were not trained at first."""
        groups = self._optimizer.param_groups
        new = [p for g in groups for p in g["params"] if p.requires_grad and p not in self._places]
        planned = planned_history(self._optimizer) if new else {}
        for parameter in new:
            history = planned.get(parameter, {})
            self._places[parameter] = {k: new_tensor(t, directory) for k, t in history.items()}
        self._move(new)

    def update(self, parameters: Sequence[nn.Parameter]) -> None:
        """Update parameters now, and remove their gradients.

        Another thread may call it, while this one neither calls it nor uses these parameters.
        """
        own = [p for p in parameters if p in self._places and p.grad is not None]
        if own:
            self._step(own)
            self._move(own)
        for parameter in own:
            parameter.grad = None

    def _step(self, parameters: Sequence[nn.Parameter]) -> None:
        """Let a copy of the optimizer, with the same states, update some parameters.

        Hooks of the optimizer do not run.
        """
        chosen, kind = set(parameters), type(self._optimizer)
        # `copy.copy` would leave out attributes, such as the scale that a loss scaler sets.
        optimizer = kind.__new__(kind)
        vars(optimizer).update(vars(self._optimizer))
        groups = [
            {**group, "params": [p for p in group["params"] if p in chosen]}
            for group in self._optimizer.param_groups
        ]
        optimizer.param_groups = [group for group in groups if group["params"]]
        self._fit_fused_kernels(optimizer.param_groups)
        step_without_hooks(optimizer)

    def _after_step(self, *args: Any) -> None:
        # The first gradient that was hidden is the one that other code has seen.
        for parameter, gradient in reversed(self._hidden):
            parameter.grad = gradient
        self._hidden.clear()

    def _after_load(self, *args: Any) -> None:
        self._forms.clear()
        self._move(self._places)

    def _fit_fused_kernels(
        self, groups: Sequence[dict[str, Any]]
    ) -> list[tuple[nn.Parameter, Tensor]]:
        """Give gradients and states the strides of their parameters, where a fused kernel is used.

        A group goes on with plain kernels if a gradient is sparse, or a state has another shape or
        dtype than its parameter: fused kernels take no such gradient, and do not check states.

        Returns:
            Gradients that a copy has replaced, by parameter.
        """
        replaced = []
        for group in groups:
            for parameter in group["params"] if group.get("fused") else ():
                gradient = parameter.grad
                if gradient is None:
                    continue
                form = parameter.shape, parameter.stride(), parameter.dtype
                if gradient.layout is torch.strided and gradient.stride() != form[1]:
                    replaced.append((parameter, gradient))
                    strided = torch.empty_strided(*form[:2], dtype=gradient.dtype)
                    parameter.grad = strided.copy_(gradient.detach())
                if gradient.layout is not torch.strided or (
                    self._forms.get(parameter) != form and not self._fit_state(parameter, form)
                ):
                    group["fused"] = None
                    break
        return replaced

    def _fit_state(self, parameter: nn.Parameter, form: _Form) -> bool:
        """Give a parameter's state the strides of the parameter; return False if it cannot be."""
        state = self._optimizer.state.get(parameter, {})
        tensors = {k: v for k, v in state.items() if isinstance(v, Tensor) and v.dim()}
        if any((t.shape, t.dtype) != (parameter.shape, parameter.dtype) for t in tensors.values()):
            return False
        for key, tensor in tensors.items():
            if tensor.stride() != parameter.stride():
                place = self._places.get(parameter, {}).get(key)
                if place is None or (place.shape, place.stride(), place.dtype) != form:
                    place = torch.empty_strided(*form[:2], dtype=form[2])
                state[key] = place.copy_(tensor)
        self._forms[parameter] = form
        return True

    def _move(self, parameters: Any) -> None:
        """Move the history of parameters to its places, and the rest of their states to the host.

        Lightning moves states that exist before training to the device.
        """
        for parameter in parameters:
            places = self._places.get(parameter, {})
            state = self._optimizer.state.get(parameter, {})
            for key, value in state.items():
                if isinstance(value, Tensor) and value.device.type != "cpu":
                    state[key] = value.cpu()
            for key, tensor in history_of(state).items():
                place = places.get(key)
                if place is None or tensor is place:
                    continue
                if place.shape == tensor.shape and place.dtype == tensor.dtype:
                    place.copy_(tensor)
                    state[key] = place
