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
        own = [p.grad for p in parameters if owners[p][0] == stage and p.grad is not None]
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
    optimizer: Optimizer, closure: Callable[[], Any], any_rank: AnyRank
) -> Iterator[Callable[[], Any]]:
    """Context manager that yields a closure, which spreads an overflow on one rank to all ranks.

    After an overflow on any rank, the closure gives one parameter of every other rank an infinite
    gradient. Every rank's scaler then detects an overflow, and all ranks skip the same step.
    Without an overflow, a rank that has no gradient in this step gets a zero gradient: torch's
    scaler refuses a step for which it has checked no gradient, and only this rank would fail. The
    original gradient is restored before the optimizer steps, and at exit.

    Args:
        optimizer: Optimizer, which steps within the context.
        closure: Closure of the optimizer step, which computes the gradients.
        any_rank: Returns True on all ranks if its argument is True on any.
    """
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

    def closure_with_shared_overflow() -> Any:
        result = closure()
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        gradients = [p.grad for p in parameters if p.grad is not None]
        overflow = any(_has_overflow(gradient) for gradient in gradients)
        # Parameters of other stages are on the meta device.
        own = [p for p in parameters if _has_infinity(p) and p.numel() and not p.is_meta]
        overflow_elsewhere = any_rank(overflow) and not overflow
        if own and (overflow_elsewhere or not gradients):
            substitute_gradient(own, math.inf if overflow_elsewhere else 0.0)
        return result

    hook = optimizer.register_step_pre_hook(restore_gradient)
    try:
        yield closure_with_shared_overflow
    finally:
        hook.remove()
        restore_gradient()


def _has_infinity(tensor: Tensor) -> bool:
    """Return True if the dtype has an infinite value; that of frozen integers has none."""
    return tensor.is_floating_point() or tensor.is_complex()


def _has_overflow(gradient: Tensor) -> bool:
    """Return True if the gradient has an infinite value or a NaN."""
    if gradient.is_sparse:
        # A float16 sum of values with the same index may overflow, and the scaler checks the sum.
        summed = gradient.coalesce() if gradient.dtype == torch.float16 else gradient
        gradient = summed._values()
    return not bool(torch.isfinite(gradient).all())
