"""Activations: GELU and SiLU, whose input's gradient is written over their input, element by
element, and ReLU, of which the signs say all that backward needs."""

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
from lightning_dlres.memory.execute.reuse.formula import Backward, Extras, Params

# Elements whose signs are packed at a time; a multiple of 8.
_AT_A_TIME = 1 << 20


@dataclass(frozen=True)
class Gelu:
    """`torch.nn.functional.gelu`."""

    approximate: str
    copies: float = 0.0

    def forward(self, x: Tensor, params: Params) -> tuple[Tensor, Extras]:
        return self.plain(x, params), ()

    def plain(self, x: Tensor, params: Params) -> Tensor:
        return functional.gelu(x, approximate=self.approximate)

    def spare(self, x: Tensor) -> int:
        return x.nbytes

    def backward(self, call: Backward) -> tuple[Tensor | None, ...]:
        if call.into is not None:
            torch.ops.aten.gelu_backward.grad_input(
                call.gradient, call.x, approximate=self.approximate, grad_input=call.into
            )
        return ()


@dataclass(frozen=True)
class Silu:
    """`torch.nn.functional.silu`."""

    copies: float = 0.0

    def forward(self, x: Tensor, params: Params) -> tuple[Tensor, Extras]:
        return self.plain(x, params), ()

    def plain(self, x: Tensor, params: Params) -> Tensor:
        return functional.silu(x)

    def spare(self, x: Tensor) -> int:
        return x.nbytes

    def backward(self, call: Backward) -> tuple[Tensor | None, ...]:
        if call.into is not None:
            torch.ops.aten.silu_backward.grad_input(call.gradient, call.x, grad_input=call.into)
        return ()


class SignedRelu(torch.autograd.Function):
    """`torch.relu`, which saves a bit for every element in the place of its output."""

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
            # The bits are constants, and what follows is differentiable.
            return torch.where(_mask(signs, ctx.shape, ctx.stride), gradient, 0.0), None
        found = torch.empty_strided(
            ctx.shape, ctx.stride, dtype=gradient.dtype, device=gradient.device
        )
        if gradient.stride() != found.stride():
            gradient = found.copy_(gradient)
        source, target = _flat(gradient), _flat(found)
        zero = gradient.new_zeros(())
        for start, mask in _masks(signs, found.numel()):
            part = slice(start, start + len(mask))
            torch.where(mask, source[part], zero, out=target[part])
        return found, None


def signs_of(tensor: Tensor) -> Tensor:
    """Return uint8[ceil(n / 8)]: a bit for every element in the order of memory, the lowest bit
    first, set unless the element is at most 0 (so also for NaN)."""
    flat, count = _flat(tensor.detach()), tensor.numel()
    found = torch.empty(-(-count // 8), dtype=torch.uint8, device=tensor.device)
    for start in range(0, count, _AT_A_TIME):
        bits = ~(flat[start : start + _AT_A_TIME] <= 0)
        target = found[start // 8 : start // 8 + -(-len(bits) // 8)]
        if bits.device.type == "cpu":
            target.copy_(torch.from_numpy(np.packbits(bits.numpy(), bitorder="little")))
        else:
            padded = functional.pad(bits, (0, -len(bits) % 8)).view(-1, 8)
            values = torch.tensor([1 << bit for bit in range(8)], dtype=torch.uint8)
            torch.sum(padded * values.to(bits.device), 1, dtype=torch.uint8, out=target)
    return found


def _masks(signs: Tensor, count: int) -> Iterator[tuple[int, Tensor]]:
    """Yield where a part of the elements begins, and bool[n] of their signs."""
    for start in range(0, count, _AT_A_TIME):
        size = min(_AT_A_TIME, count - start)
        packed = signs[start // 8 : start // 8 + -(-size // 8)]
        if signs.device.type == "cpu":
            bits = np.unpackbits(packed.numpy(), count=size, bitorder="little")
            yield start, torch.from_numpy(bits).view(torch.bool)
        else:
            shifts = torch.arange(8, dtype=torch.uint8, device=signs.device)
            unpacked = (packed[:, None] >> shifts).bitwise_and_(1)
            yield start, unpacked.view(-1)[:size].view(torch.bool)


def _mask(signs: Tensor, shape: torch.Size, stride: tuple[int, ...]) -> Tensor:
    found = torch.empty_strided(shape, stride, dtype=torch.bool, device=signs.device)
    flat = _flat(found)
    for start, mask in _masks(signs, found.numel()):
        flat[start : start + len(mask)] = mask
    return found


def _flat(tensor: Tensor) -> Tensor:
    """Return the elements in the order of memory, for a tensor that lies there without gaps."""
    return tensor.as_strided((tensor.numel(),), (1,))
