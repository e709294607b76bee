"""Formulas of linear layers and convolutions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from lightning_dlres.memory.execute.reuse.formula import (
    BackwardCall,
    Extras,
    Params,
    bytes_but_largest_part,
    parts,
)


@dataclass(frozen=True)
class LinearFormula:
    """Formula of `torch.nn.functional.linear`."""

    extra_copies: float = 0.0

    def forward(self, x: Tensor, params: Params) -> tuple[Tensor, Extras]:
        return self.differentiable_forward(x, params), ()

    def differentiable_forward(self, x: Tensor, params: Params) -> Tensor:
        weight, bias = params
        assert weight is not None
        return functional.linear(x, weight, bias)

    def reusable_bytes(self, x: Tensor) -> int:
        return x.nbytes

    def backward(self, call: BackwardCall) -> tuple[Tensor | None, ...]:
        weight, _ = call.params
        assert weight is not None
        rows = call.gradient.reshape(-1, weight.shape[0])
        x = call.x.view(-1, weight.shape[1])
        weight_gradient = rows.t().mm(x) if call.needs_gradient[0] else None
        bias_gradient = rows.sum(0) if call.needs_gradient[1] else None
        if call.out is not None:
            torch.mm(rows, weight, out=call.out.view(-1, weight.shape[1]))
        return weight_gradient, bias_gradient


@dataclass(frozen=True)
class ConvolutionFormula:
    """Formula of `torch.nn.functional.conv1d` to `conv3d` with zero padding.

    The input's gradient is computed for a part of the batch at a time.
    """

    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int
    extra_copies: float = 2.0

    def forward(self, x: Tensor, params: Params) -> tuple[Tensor, Extras]:
        return self.differentiable_forward(x, params), ()

    def differentiable_forward(self, x: Tensor, params: Params) -> Tensor:
        weight, bias = params
        assert weight is not None
        convolve = (functional.conv1d, functional.conv2d, functional.conv3d)[len(self.stride) - 1]
        return convolve(x, weight, bias, self.stride, self.padding, self.dilation, self.groups)

    def reusable_bytes(self, x: Tensor) -> int:
        return bytes_but_largest_part(x, len(x))

    def backward(self, call: BackwardCall) -> tuple[Tensor | None, ...]:
        param_gradients: tuple[Tensor | None, ...] = (None, None)
        if any(call.needs_gradient):
            mask = (False, *call.needs_gradient)
            param_gradients = self._gradients(call.gradient, call.x, call.params, mask)[1:]
        if call.out is not None:
            only_x = (True, False, False)
            for part in parts(len(call.x)):
                x_gradient, *_ = self._gradients(
                    call.gradient[part], call.x[part], call.params, only_x
                )
                assert x_gradient is not None
                call.out[part].copy_(x_gradient)
        return param_gradients

    def _gradients(
        self, gradient: Tensor, x: Tensor, params: Params, mask: Sequence[bool]
    ) -> tuple[Tensor | None, ...]:
        weight, bias = params
        gradients = torch.ops.aten.convolution_backward(
            gradient,
            x,
            weight,
            None if bias is None else list(bias.shape),
            self.stride,
            self.padding,
            self.dilation,
            # Not transposed, so without output padding.
            False,
            [0] * len(self.stride),
            self.groups,
            mask,
        )
        return tuple(
            value if is_needed else None for value, is_needed in zip(gradients, mask, strict=True)
        )
