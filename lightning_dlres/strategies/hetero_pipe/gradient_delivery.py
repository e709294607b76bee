"""Gradients that the schedule has computed, delivered through the backward of the loss that the
step returns.

Lightning zeroes gradients between the step and its backward, divides the loss for accumulation,
scales it for mixed precision and runs hooks. An autograd function between the loss and the
parameters lets all of this happen as it always does.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_dlres.core.errors import UnsupportedStepError
from lightning_dlres.pipeline.stage.stage import Gradients


class _Deliver(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        loss: Tensor,
        anchor: Tensor,
        gradients: list[Tensor],
        scale: float,
        *parameters: Tensor,
    ) -> Tensor:
        ctx.gradients, ctx.scale = gradients, scale
        return loss.clone()

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        gradients, ctx.gradients = ctx.gradients, None
        if gradients is None:
            raise UnsupportedStepError(
                "backward ran twice on the loss of one step (retain_graph=True?): the gradients "
                "were computed by the schedule, once. Scale the loss instead, or return a sum of "
                "losses."
            )
        factor = float(grad_output) / ctx.scale
        if factor != 1.0:
            gradients = [gradient * factor for gradient in gradients]
        return None, None, None, None, *gradients


def with_gradients(loss: Tensor, gradients: Gradients, scale: float) -> Tensor:
    """Return a loss of the same value whose backward adds `gradients` to the parameters' `.grad`.

    Args:
        loss: a scalar.
        gradients: gradient of scale * loss for every parameter held here.
        scale: what the gradients were multiplied by; they are divided by it, and multiplied by what
            arrives in backward.
    """
    # The anchor makes the loss ask for a backward on a stage that has nothing to train.
    anchor = torch.zeros((), requires_grad=True)
    return _Deliver.apply(loss.detach(), anchor, list(gradients.values()), scale, *gradients)  # type: ignore[no-untyped-call, no-any-return]


class _NoGradients(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, output: Tensor, anchor: Tensor, *inputs: Tensor) -> Tensor:
        return output.clone()

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        raise UnsupportedStepError(
            "A gradient was asked of the pipelined module outside of training_step, where the "
            "pipeline runs it forward only. Compute gradients in training_step, or validate on a "
            "single device: Trainer(devices=1)."
        )


def without_gradients(output: Tensor, inputs: Sequence[Tensor]) -> Tensor:
    """Return an output of the module that asks for gradients, as in plain training, and whose
    backward, to any of the inputs, says why there are none."""
    if not (output.is_floating_point() or output.is_complex()):
        return output
    anchor = torch.zeros((), requires_grad=True)
    return _NoGradients.apply(output, anchor, *inputs)  # type: ignore[no-untyped-call, no-any-return]
