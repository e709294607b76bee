"""Layout of the optimizer's history: the tensors that an optimizer keeps for each parameter.

Optimizers make them in their first step. A copy of the optimizer takes that step with parameters
without memory, so their sizes are known before.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn, optim
from torch.optim import Optimizer

# Optimizers that update each parameter by itself, and keep nothing else than a state for each.
PER_PARAMETER: tuple[type[Optimizer], ...] = (
    optim.SGD,
    optim.Adam,
    optim.AdamW,
    optim.Adamax,
    optim.NAdam,
    optim.RAdam,
    optim.Adagrad,
    optim.Adadelta,
    optim.RMSprop,
    optim.ASGD,
    optim.Rprop,
)
# Optimizers with a fused kernel for the CPU.
_FUSED: tuple[type[Optimizer], ...] = (optim.SGD, optim.Adam, optim.AdamW, optim.Adagrad)
# Options that choose a kernel. Only the plain one runs without memory.
_KERNELS = ("fused", "foreach", "capturable", "differentiable")
# Smaller tensors, such as a count of steps, stay where the optimizer has made them.
_LEAST_BYTES = 1024


def is_per_parameter(optimizer: Optimizer) -> bool:
    """Return True if the parameters may be updated one after the other."""
    return type(optimizer) in PER_PARAMETER


def history_of(state: Mapping[str, Any]) -> dict[str, Tensor]:
    """Return the tensors of a parameter's state that belong in the mirror, by key."""
    return {
        key: value
        for key, value in state.items()
        if isinstance(value, Tensor)
        and value.layout is torch.strided
        and value.numel() * value.element_size() >= _LEAST_BYTES
    }


def planned_history(optimizer: Optimizer) -> dict[nn.Parameter, dict[str, Tensor]]:
    """Return tensors without memory that are like the history of each parameter.

    A state that exists, such as that of a loaded checkpoint, shows its own tensors.

    Args:
        optimizer: Optimizer; one that is not `is_per_parameter` has no planned history.
    """
    if not is_per_parameter(optimizer):
        return {}
    layout = {}
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            state = optimizer.state.get(parameter)
            if state is None and not parameter.requires_grad:
                continue
            if state:
                layout[parameter] = _layout(state)
            else:
                layout[parameter] = _layout_after_a_step(optimizer, group, parameter)
    return layout


def use_fused_kernels(optimizer: Optimizer) -> None:
    """Let an optimizer use its fused kernel for the CPU, where the user has chosen nothing else."""
    if type(optimizer) not in _FUSED:
        return
    for group in optimizer.param_groups:
        is_free = group.get("fused") is None and group.get("foreach") is None
        is_plain = not group.get("differentiable") and not group.get("capturable")
        is_dense = all(p.is_floating_point() for p in group["params"])
        if is_free and is_plain and is_dense and not isinstance(group["lr"], Tensor):
            group["fused"] = True


def _layout(state: Mapping[str, Any]) -> dict[str, Tensor]:
    """Return tensors without memory that are like the history in a parameter's state."""
    return {
        key: torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
        for key, tensor in history_of(state).items()
    }


def _layout_after_a_step(
    optimizer: Optimizer, group: Mapping[str, Any], parameter: nn.Parameter
) -> dict[str, Tensor]:
    """Return the layout after a step of a new optimizer with one parameter without memory."""
    bare = nn.Parameter(torch.empty_like(parameter, device="meta"))
    bare.grad = torch.empty_like(bare)
    plain = {name: False for name in _KERNELS if name in group}
    trial = type(optimizer)([{**group, **plain, "params": [bare]}])  # type: ignore[call-arg]
    # A step that needs a value fails, but only after the history was made.
    with contextlib.suppress(RuntimeError):
        trial.step()
    return _layout(trial.state[bare])
