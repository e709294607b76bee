"""Outputs of the pipelined module outside of `training_step`, whose backward raises."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_dlres.core.errors import UnsupportedStepError


class _RaiseInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, output: Tensor, anchor: Tensor, *inputs: Tensor) -> Tensor:
        return output.clone()

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        raise UnsupportedStepError(
            "Gradients of the pipelined module are available in training_step only: elsewhere the "
            "pipeline runs it forward only. Compute gradients in training_step, or evaluate on the "
            "whole model: HeteroPipeStrategy(evaluation='whole')."
        )


def raising_in_backward(output: Tensor, inputs: Sequence[Tensor]) -> Tensor:
    """Return a module output that requires gradients, as in plain training, but whose backward
    raises.

    Args:
        output: Output of the pipelined module; returned as it is if it cannot have a gradient.
        inputs: Inputs of the module; a gradient for any of them raises, too.
    """
    if not (output.is_floating_point() or output.is_complex()):
        return output
    # The anchor makes the output require gradients even if no input does.
    anchor = torch.zeros((), requires_grad=True)
    return _RaiseInBackward.apply(output, anchor, *inputs)  # type: ignore[no-untyped-call, no-any-return]
