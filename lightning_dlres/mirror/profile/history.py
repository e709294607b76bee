"""Layout of the optimizer's history: the tensors that an optimizer keeps for each parameter.

Optimizers make them in their first step. A copy of the optimizer takes that step with parameters
without memory, so their sizes are known before.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn, optim
from torch.optim import Optimizer

from lightning_dlres.core.errors import ConfigError

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
# Elements of the parameter that shows whether a fused kernel is right: several vectors and a rest.
_PROBED_ELEMENTS = 67
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
                layout[parameter] = _layout(state, parameter)
            else:
                layout[parameter] = _layout_after_a_step(optimizer, group, parameter)
    return layout


def step_without_hooks(optimizer: Optimizer) -> None:
    """Let an optimizer step, and run none of the hooks on its steps, or on those of all optimizers.

    The function below torch's wrapper calls neither hooks nor the profiler.
    """
    type(optimizer).step.__wrapped__(optimizer)  # type: ignore[attr-defined]


def use_fused_kernels(optimizer: Optimizer) -> None:
    """Let an optimizer use its fused kernel for the CPU, where the user has chosen nothing else."""
    kind: Any = type(optimizer)
    if kind not in _FUSED:
        return
    for group in optimizer.param_groups:
        is_free = group.get("fused") is None and group.get("foreach") is None
        is_plain = not group.get("differentiable") and not group.get("capturable")
        is_dense = all(p.is_floating_point() for p in group["params"])
        is_right = all(_is_right(kind, p.dtype) for p in group["params"])
        if is_free and is_plain and is_dense and is_right and not isinstance(group["lr"], Tensor):
            group["fused"] = True


def refuse_wrong_kernels(optimizer: Optimizer) -> None:
    """Check that the fused kernels that the user has chosen are right on the CPU.

    Raises:
        ConfigError: If one is wrong for a parameter's dtype in this version of torch.
    """
    kind: Any = type(optimizer)
    if kind not in _FUSED:
        return
    for group in optimizer.param_groups:
        for parameter in group["params"] if group.get("fused") else ():
            if parameter.is_floating_point() and not _is_right(kind, parameter.dtype):
                raise ConfigError(
                    f"fused must be False for {kind.__name__} with parameters of "
                    f"{parameter.dtype}, got True. The mirror updates parameters on the CPU, where "
                    f"the fused kernel of torch {torch.__version__} computes wrong values. Use "
                    "fused=False."
                )


@cache
def _is_right(kind: Any, dtype: torch.dtype) -> bool:
    """Return True if the fused kernel for the CPU makes the same steps as the plain one, but for
    rounding.

    SGD in torch 2.12 and 2.13 updates no whole vectors of float16 and bfloat16 (pytorch issue
    191763).
    """
    if not dtype.is_floating_point:
        return False
    options: dict[str, Any] = {"lr": 0.125, **({"momentum": 0.5} if kind is optim.SGD else {})}

    def after_two_steps(*, fused: bool) -> Tensor:
        parameter = nn.Parameter(torch.ones(_PROBED_ELEMENTS, dtype=dtype))
        optimizer = kind([parameter], **options, fused=fused)
        for gradient in (1.0, -0.5):
            parameter.grad = torch.full_like(parameter, gradient)
            step_without_hooks(optimizer)
        return parameter.detach().double()

    return torch.allclose(
        after_two_steps(fused=True), after_two_steps(fused=False), rtol=0, atol=0.05
    )


def _layout(state: Mapping[str, Any], parameter: nn.Parameter) -> dict[str, Tensor]:
    """Return tensors without memory that are like the history in a parameter's state.

    Tensors of the parameter's shape get its strides: fused kernels ask for equal ones.
    """
    layout = {}
    for key, tensor in history_of(state).items():
        like = parameter if tensor.shape == parameter.shape else tensor
        layout[key] = torch.empty_strided(
            tensor.shape, like.stride(), dtype=tensor.dtype, device="meta"
        )
    return layout


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
        step_without_hooks(trial)
    return _layout(trial.state[bare], bare)
