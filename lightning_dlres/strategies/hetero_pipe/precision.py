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
from torch import nn
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


def loss_scale(precision: Precision) -> float:
    """Return the factor by which the gradient scaler multiplies the loss; 1.0 without a scaler."""
    scaler = getattr(precision, "scaler", None)
    return float(scaler.get_scale()) if scaler is not None and scaler.is_enabled() else 1.0


def overflow_shared(
    closure: Callable[[], Any], parameters: Sequence[nn.Parameter], any_rank: AnyRank
) -> Callable[[], Any]:
    """Return a closure that spreads an overflow on one rank to all ranks.

    After an overflow on any rank, the closure puts an infinite value into a gradient of every
    other rank. Every rank's scaler then detects an overflow, and all ranks skip the same step.

    Args:
        closure: Closure of the optimizer step, which computes the gradients.
        parameters: Parameters of the optimizer.
        any_rank: Returns True on all ranks if its argument is True on any.
    """

    def closure_with_shared_overflow() -> Any:
        result = closure()
        gradients = [p.grad for p in parameters if p.grad is not None]
        overflow = any(not bool(torch.isfinite(g).all()) for g in gradients)
        if any_rank(overflow) and not overflow:
            for gradient in gradients:
                gradient.view(-1)[:1] = math.inf
                break
        return result

    return closure_with_shared_overflow
