"""Linear layers and convolutions whose weight gradient comes first."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from lightning_dlres.memory.execute.reuse.formula import (
    Backward,
    Extras,
    Params,
    parts,
    spare_bytes,
)


@dataclass(frozen=True)
class Linear:
    """`torch.nn.functional.linear`."""

    copies: float = 0.0

    def forward(self, x: Tensor, params: Params) -> tuple[Tensor, Extras]:
        return self.plain(x, params), ()

    def plain(self, x: Tensor, params: Params) -> Tensor:
        weight, bias = params
        assert weight is not None
        return functional.linear(x, weight, bias)

    def spare(self, x: Tensor) -> int:
        return x.nbytes

    def backward(self, call: Backward) -> tuple[Tensor | None, ...]:
        weight, _ = call.params
        assert weight is not None
        rows = call.gradient.reshape(-1, weight.shape[0])
        x = call.x.view(-1, weight.shape[1])
        of_weight = rows.t().mm(x) if call.wanted[0] else None
        of_bias = rows.sum(0) if call.wanted[1] else None
        if call.into is not None:
            torch.mm(rows, weight, out=call.into.view(-1, weight.shape[1]))
        return of_weight, of_bias


@dataclass(frozen=True)
class Convolution:
    """`torch.nn.functional.conv1d` to `conv3d`, with zeros around the input. The input's gradient
    is computed for a part of the batch at a time."""

    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int
    copies: float = 2.0

    def forward(self, x: Tensor, params: Params) -> tuple[Tensor, Extras]:
        return self.plain(x, params), ()

    def plain(self, x: Tensor, params: Params) -> Tensor:
        weight, bias = params
        assert weight is not None
        convolve = (functional.conv1d, functional.conv2d, functional.conv3d)[len(self.stride) - 1]
        return convolve(x, weight, bias, self.stride, self.padding, self.dilation, self.groups)

    def spare(self, x: Tensor) -> int:
        return spare_bytes(x, len(x))

    def backward(self, call: Backward) -> tuple[Tensor | None, ...]:
        found: tuple[Tensor | None, ...] = (None, None)
        if any(call.wanted):
            found = self._gradients(call.gradient, call.x, call.params, (False, *call.wanted))[1:]
        if call.into is not None:
            only_x = (True, False, False)
            for part in parts(len(call.x)):
                some, *_ = self._gradients(call.gradient[part], call.x[part], call.params, only_x)
                assert some is not None
                call.into[part].copy_(some)
        return found

    def _gradients(
        self, gradient: Tensor, x: Tensor, params: Params, wanted: Sequence[bool]
    ) -> tuple[Tensor | None, ...]:
        weight, bias = params
        found = torch.ops.aten.convolution_backward(
            gradient,
            x,
            weight,
            None if bias is None else list(bias.shape),
            self.stride,
            self.padding,
            self.dilation,
            False,
            [0] * len(self.stride),
            self.groups,
            wanted,
        )
        return tuple(
            one if is_wanted else None for one, is_wanted in zip(found, wanted, strict=True)
        )
