"""Formulas of activations.

GELU and SiLU write their input's gradient over the input, element by element. ReLU saves the signs
of its output, one bit per element, which is all that its backward needs.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx
from torch.nn import functional

from lightning_dlres.core._compat import is_wrapped
from lightning_dlres.memory.execute.reuse.formula import BackwardCall, Extras, Params

# Elements whose signs are packed at a time, which bounds the temporary memory; a multiple of 8.
_CHUNK = 1 << 20


@dataclass(frozen=True)
class GeluFormula:
    """Formula of `torch.nn.functional.gelu`."""

    approximate: str
    extra_copies: float = 0.0

    def forward(self, x: Tensor, params: Params) -> tuple[Tensor, Extras]:
        return self.differentiable_forward(x, params), ()

    def differentiable_forward(self, x: Tensor, params: Params) -> Tensor:
        return functional.gelu(x, approximate=self.approximate)

    def reusable_bytes(self, x: Tensor) -> int:
        return x.nbytes

    def backward(self, call: BackwardCall) -> tuple[Tensor | None, ...]:
        if call.out is not None:
            torch.ops.aten.gelu_backward.grad_input(
                call.gradient, call.x, approximate=self.approximate, grad_input=call.out
            )
        return ()


@dataclass(frozen=True)
class SiluFormula:
    """Formula of `torch.nn.functional.silu`."""

    extra_copies: float = 0.0

    def forward(self, x: Tensor, params: Params) -> tuple[Tensor, Extras]:
        return self.differentiable_forward(x, params), ()

    def differentiable_forward(self, x: Tensor, params: Params) -> Tensor:
        return functional.silu(x)

    def reusable_bytes(self, x: Tensor) -> int:
        return x.nbytes

    def backward(self, call: BackwardCall) -> tuple[Tensor | None, ...]:
        if call.out is not None:
            torch.ops.aten.silu_backward.grad_input(call.gradient, call.x, grad_input=call.out)
        return ()


class SignedRelu(torch.autograd.Function):
    """`torch.relu` that saves one bit per element instead of its output."""

    @staticmethod
    def forward(ctx: FunctionCtx, x: Tensor, inplace: bool) -> Tensor:
        ctx.set_materialize_grads(False)
        if inplace:
            ctx.mark_dirty(x)
        y = x.relu_() if inplace else torch.relu(x)
        ctx.save_for_backward(signs_of(y))
        ctx.shape, ctx.stride = y.shape, y.stride()  # type: ignore[attr-defined]
        return y

    @staticmethod
    def backward(ctx: Any, gradient: Tensor | None) -> tuple[Tensor | None, None]:
        if gradient is None:
            return None, None
        (signs,) = ctx.saved_tensors
        if torch.is_grad_enabled() or is_wrapped(gradient):
            # A second derivative: the signs are constants, and `where` is differentiable.
            return torch.where(_mask(signs, ctx.shape, ctx.stride), gradient, 0.0), None
        result = torch.empty_strided(
            ctx.shape, ctx.stride, dtype=gradient.dtype, device=gradient.device
        )
        if gradient.stride() != result.stride():
            gradient = result.copy_(gradient)
        source, target = _flat(gradient), _flat(result)
        zero = gradient.new_zeros(())
        for start, mask in _masks(signs, result.numel()):
            part = slice(start, start + len(mask))
            torch.where(mask, source[part], zero, out=target[part])
        return result, None


def signs_of(tensor: Tensor) -> Tensor:
    """Return the signs of a tensor, uint8[ceil(n / 8)].

    There is one bit per element in the order of memory, the lowest bit first. A bit is set if its
    element is greater than 0, or NaN.
    """
    flat, count = _flat(tensor.detach()), tensor.numel()
    signs = torch.empty(-(-count // 8), dtype=torch.uint8, device=tensor.device)
    for start in range(0, count, _CHUNK):
        bits = ~(flat[start : start + _CHUNK] <= 0)
        target = signs[start // 8 : start // 8 + -(-len(bits) // 8)]
        if bits.device.type == "cpu":
            target.copy_(torch.from_numpy(np.packbits(bits.numpy(), bitorder="little")))
        else:
            padded = functional.pad(bits, (0, -len(bits) % 8)).view(-1, 8)
            values = torch.tensor([1 << bit for bit in range(8)], dtype=torch.uint8)
            torch.sum(padded * values.to(bits.device), 1, dtype=torch.uint8, out=target)
    return signs


def _masks(signs: Tensor, count: int) -> Iterator[tuple[int, Tensor]]:
    """Yield chunks of the unpacked signs: index of the first element, and bool[n]."""
    for start in range(0, count, _CHUNK):
        size = min(_CHUNK, count - start)
        packed = signs[start // 8 : start // 8 + -(-size // 8)]
        if signs.device.type == "cpu":
            bits = np.unpackbits(packed.numpy(), count=size, bitorder="little")
            yield start, torch.from_numpy(bits).view(torch.bool)
        else:
            shifts = torch.arange(8, dtype=torch.uint8, device=signs.device)
            unpacked = (packed[:, None] >> shifts).bitwise_and_(1)
            yield start, unpacked.view(-1)[:size].view(torch.bool)


def _mask(signs: Tensor, shape: torch.Size, stride: tuple[int, ...]) -> Tensor:
    """Return all unpacked signs as a bool tensor of this shape and stride."""
    mask = torch.empty_strided(shape, stride, dtype=torch.bool, device=signs.device)
    flat = _flat(mask)
    for start, chunk in _masks(signs, mask.numel()):
        flat[start : start + len(chunk)] = chunk
    return mask


def _flat(tensor: Tensor) -> Tensor:
    """Return the elements in the order of memory. The tensor must fill its memory without gaps."""
    return tensor.as_strided((tensor.numel(),), (1,))
