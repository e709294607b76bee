"""What a precision plugin decides from gradients, decided over all stages: the clipping norm, and
whether a step overflowed.

The plugin itself stays as it is (its class name is a key in checkpoints); one method of the
instance is replaced for the run.
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

AnyRank = Callable[[bool], bool]


@contextmanager
def clipping_over_stages(
    precision: Precision, owners: Owners, stage: int, sum_over_stages: Callable[[float], float]
) -> Iterator[None]:
    """While active, `precision.clip_grad_by_norm` clips by the norm of the whole model's gradient.

    Args:
        owners: stages that hold each parameter; the first counts it.
        sum_over_stages: returns the sum of its argument over the stages of a pipeline, the same
            bits on every rank.
    """

    def clip_grad_by_norm(optimizer: Optimizer, clip_val: int | float) -> None:
        parameters = [p for p in precision.main_params(optimizer) if p.grad is not None]
        counted = [p.grad for p in parameters if owners[p][0] == stage and p.grad is not None]
        local = float(torch.nn.utils.get_total_norm(counted)) if counted else 0.0
        total = math.sqrt(sum_over_stages(local * local))
        if parameters:
            grad = parameters[0].grad
            assert grad is not None
            # The norm of complex gradients is a real number.
            norm = grad.new_tensor(total, dtype=grad.real.dtype)
            torch.nn.utils.clip_grads_with_norm_(parameters, float(clip_val), norm)

    precision.__dict__["clip_grad_by_norm"] = clip_grad_by_norm
    try:
        yield
    finally:
        precision.__dict__.pop("clip_grad_by_norm", None)


def loss_scale(precision: Precision) -> float:
    """Return the factor by which a gradient scaler multiplies the loss; 1 without one."""
    scaler = getattr(precision, "scaler", None)
    return float(scaler.get_scale()) if scaler is not None and scaler.is_enabled() else 1.0


def overflow_shared(
    closure: Callable[[], Any], parameters: Sequence[nn.Parameter], any_rank: AnyRank
) -> Callable[[], Any]:
    """Return a closure after which either no rank has a gradient that is not finite, or every rank
    has one.

    The scaler of every rank then finds the overflow by itself, and all skip the same step.
    """

    def shared() -> Any:
        result = closure()
        gradients = [p.grad for p in parameters if p.grad is not None]
        overflow = any(not bool(torch.isfinite(g).all()) for g in gradients)
        if any_rank(overflow) and not overflow:
            for gradient in gradients:
                gradient.view(-1)[:1] = math.inf
                break
        return result

    return shared
