"""Delivery of the schedule's gradients through the backward of the loss that a step returns.

Lightning zeroes gradients between the step and its backward, divides the loss for accumulation,
scales it for mixed precision, and runs hooks. An autograd function between the loss and the
parameters leaves all of this as it is.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_dlres.core.errors import UnsupportedStepError
from lightning_dlres.pipeline.stage.gradient_buffer import Gradients


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
                "backward must run once on the loss of a step, got a second call (retain_graph?): "
                "the schedule computes the gradients only once. Scale the loss instead, or return "
                "a sum of losses."
            )
        factor = float(grad_output) / ctx.scale
        if factor != 1.0:
            gradients = [gradient * factor for gradient in gradients]
        return None, None, None, None, *gradients


def with_gradients(loss: Tensor, gradients: Gradients, scale: float) -> Tensor:
    """Return a loss of the same value whose backward adds `gradients` to the parameters' `.grad`.

    Args:
        loss: Loss, a scalar tensor.
        gradients: Gradient of `scale * loss` for every parameter of this rank.
        scale: Factor in the gradients. Backward divides them by it, and multiplies them by the
            gradient of the loss that autograd passes.
    """
    # The anchor makes the loss require a gradient on a stage that has no trainable parameter.
    anchor = torch.zeros((), requires_grad=True)
    return _Deliver.apply(loss.detach(), anchor, list(gradients.values()), scale, *gradients)  # type: ignore[no-untyped-call, no-any-return]


class _NoGradients(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, output: Tensor, anchor: Tensor, *inputs: Tensor) -> Tensor:
        return output.clone()

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        raise UnsupportedStepError(
            "Gradients of the pipelined module are available in training_step only: elsewhere the "
            "pipeline runs it forward only. Compute gradients in training_step, or validate on a "
            "single device: Trainer(devices=1)."
        )


def without_gradients(output: Tensor, inputs: Sequence[Tensor]) -> Tensor:
    """Return a module output that requires gradients, as in plain training, but whose backward
    raises.

    Args:
        output: Output of the pipelined module; returned as it is if it cannot have a gradient.
        inputs: Inputs of the module; a gradient for any of them raises, too.
    """
    if not (output.is_floating_point() or output.is_complex()):
        return output
    anchor = torch.zeros((), requires_grad=True)
    return _NoGradients.apply(output, anchor, *inputs)  # type: ignore[no-untyped-call, no-any-return]
