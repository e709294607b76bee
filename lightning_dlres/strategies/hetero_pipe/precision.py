"""Gradient norms and overflows of a precision plugin, computed over all stages.

The plugin's class is not replaced, because its name is a key in checkpoints. One method of the
instance is replaced during the run.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from lightning.pytorch.plugins.precision import Precision
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_dlres.pipeline.execute.partition import Owners

# Function that returns True on all ranks if its argument is True on any.
AnyRank = Callable[[bool], bool]


@contextmanager
def clipping_over_stages(
    precision: Precision, owners: Owners, stage: int, sum_over_stages: Callable[[float], float]
) -> Iterator[None]:
    """Context manager that makes `precision.clip_grad_by_norm` clip by the norm of the whole model.

    Args:
        precision: Precision plugin of the Trainer.
        owners: Stages that hold each parameter. Only the first stage counts its gradient.
        stage: Stage of this rank.
        sum_over_stages: Returns the sum of its argument over the stages of a replica. The result
            must be bitwise equal on all ranks; otherwise replicas diverge.
    """

    def clip_grad_by_norm(optimizer: Optimizer, clip_val: int | float) -> None:
        parameters = [p for p in precision.main_params(optimizer) if p.grad is not None]
        # What `overflow_shared` adds for the scaler belongs to no stage.
        held = [p for p in parameters if owners.get(p, (None,))[0] == stage]
        own = [p.grad for p in held if p.grad is not None]
        stage_norm = float(torch.nn.utils.get_total_norm(own)) if own else 0.0
        total_norm = math.sqrt(sum_over_stages(stage_norm * stage_norm))
        if parameters:
            grad = parameters[0].grad
            assert grad is not None
            # The norm of complex gradients is a real number.
            norm = grad.new_tensor(total_norm, dtype=grad.real.dtype)
            torch.nn.utils.clip_grads_with_norm_(parameters, float(clip_val), norm)

    precision.__dict__["clip_grad_by_norm"] = clip_grad_by_norm
    try:
        yield
    finally:
        precision.__dict__.pop("clip_grad_by_norm", None)


def enabled_scaler(precision: Precision) -> torch.amp.GradScaler | None:
    """Return the gradient scaler; None without one, or if it is disabled and skips no step."""
    scaler = getattr(precision, "scaler", None)
    return scaler if scaler is not None and scaler.is_enabled() else None


def loss_scale(precision: Precision) -> float:
    """Return the factor by which the gradient scaler multiplies the loss; 1.0 without a scaler."""
    scaler = enabled_scaler(precision)
    return float(scaler.get_scale()) if scaler is not None else 1.0


@contextmanager
def overflow_shared(
    optimizer: Optimizer, closure: Callable[[], Any], any_rank: AnyRank, device: torch.device
) -> Iterator[Callable[[], Any]]:
    """Context manager that yields a closure, which spreads an overflow on one rank to all ranks.

    After an overflow on any rank, the closure gives one parameter of every other rank an infinite
    gradient. Every rank's scaler then detects an overflow, and all ranks skip the same step.
    Without an overflow, a rank that has no gradient in this step gets a zero gradient: torch's
    scaler refuses a step for which it has checked no gradient, and only this rank would fail. If
    the optimizer has no parameter on this rank, it gets one. The original gradient is restored, and
    that parameter removed, before the optimizer steps, and at exit.

    Args:
        optimizer: Optimizer, which steps within the context.
        closure: Closure of the optimizer step, which computes the gradients.
        any_rank: Returns True on all ranks if its argument is True on any.
        device: Device of this rank's gradients.
    """
    placeholder = nn.Parameter(torch.zeros(1, device=device))
    first_parameters = optimizer.param_groups[0]["params"]
    originals: list[tuple[nn.Parameter, Tensor | None]] = []

    def substitute_gradient(parameters: Sequence[nn.Parameter], value: float) -> None:
        # A new tensor, since a gradient may have any memory format. The smallest costs least. A
        # stage whose parameters were all frozen during the run has only frozen ones.
        parameter = min(parameters, key=lambda p: (not p.requires_grad, p.numel()))
        originals.append((parameter, parameter.grad))
        parameter.grad = torch.full_like(parameter, value, requires_grad=False)

    def restore_gradient(*_: Any) -> None:
        while originals:
            parameter, gradient = originals.pop()
            parameter.grad = gradient
            if parameter is placeholder:
                # The last one: nothing else is added between.
                first_parameters.pop()

    def closure_with_shared_overflow() -> Any:
        result = closure()
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        gradients = [p.grad for p in parameters if p.grad is not None]
        overflow = any(_has_overflow(gradient) for gradient in gradients)
        # Parameters of other stages are on the meta device.
        own = [p for p in parameters if _takes_overflow(p) and not p.is_meta]
        overflow_elsewhere = any_rank(overflow) and not overflow
        if overflow_elsewhere or not gradients:
            if not own:
                first_parameters.append(placeholder)
                own = [placeholder]
            substitute_gradient(own, math.inf if overflow_elsewhere else 0.0)
        return result

    hook = optimizer.register_step_pre_hook(restore_gradient)
    try:
        yield closure_with_shared_overflow
    finally:
        hook.remove()
        restore_gradient()


def _takes_overflow(parameter: Tensor) -> bool:
    """Return True if a parameter may get an infinite gradient; frozen integers may not."""
    return bool(parameter.numel()) and (parameter.is_floating_point() or parameter.is_complex())


def _has_overflow(gradient: Tensor) -> bool:
    """Return True if the gradient has an infinite value or a NaN."""
    if gradient.is_sparse:
        # A float16 sum of values with the same index may overflow, and the scaler checks the sum.
        summed = gradient.coalesce() if gradient.dtype == torch.float16 else gradient
        gradient = summed._values()
    return not bool(torch.isfinite(gradient).all())
