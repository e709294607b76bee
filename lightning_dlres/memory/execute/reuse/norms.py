"""Formulas of normalisation layers.

Each row, sample or channel of the input's gradient depends only on the same one of the input. The
gradient is therefore computed in parts.
"""

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

_ops = torch.ops.aten


@dataclass(frozen=True)
class LayerNormFormula:
    """Formula of `torch.nn.functional.layer_norm`, computed for some rows at a time."""

    shape: tuple[int, ...]
    eps: float
    # Each part of the input's gradient is read and written once more, to copy it to its place.
    extra_copies: float = 2.0

    def forward(self, x: Tensor, params: Params) -> tuple[Tensor, Extras]:
        weight, bias = params
        y, mean, rstd = torch.native_layer_norm(x, self.shape, weight, bias, self.eps)
        return y, (mean, rstd)

    def differentiable_forward(self, x: Tensor, params: Params) -> Tensor:
        weight, bias = params
        return functional.layer_norm(x, list(self.shape), weight, bias, self.eps)

    def reusable_bytes(self, x: Tensor) -> int:
        return bytes_but_largest_part(x, len(self._rows(x)))

    def _rows(self, x: Tensor) -> Tensor:
        return x.reshape(-1, *self.shape)

    def backward(self, call: BackwardCall) -> tuple[Tensor | None, ...]:
        gradient, x = self._rows(call.gradient), self._rows(call.x)
        mean, rstd = (extra.view(-1, *(1 for _ in self.shape)) for extra in call.extras)
        param_gradients: tuple[Tensor | None, ...] = (None, None)
        if any(call.needs_gradient):
            mask = [False, *call.needs_gradient]
            param_gradients = _ops.native_layer_norm_backward(
                gradient, x, self.shape, mean, rstd, *call.params, mask
            )[1:]
        if call.out is not None:
            out = call.out.view(x.shape)
            for part in parts(len(x)):
                x_gradient, _, _ = _ops.native_layer_norm_backward(
                    gradient[part],
                    x[part],
                    self.shape,
                    mean[part],
                    rstd[part],
                    *call.params,
                    [True, False, False],
                )
                out[part].copy_(x_gradient)
        return _masked(param_gradients, call.needs_gradient)


@dataclass(frozen=True)
class GroupNormFormula:
    """Formula of `torch.nn.functional.group_norm`, computed for some samples at a time."""

    groups: int
    eps: float
    # As for `LayerNormFormula`.
    extra_copies: float = 2.0

    def forward(self, x: Tensor, params: Params) -> tuple[Tensor, Extras]:
        samples, channels = x.shape[:2]
        weight, bias = params
        y, mean, rstd = torch.native_group_norm(
            x, weight, bias, samples, channels, _inner(x), self.groups, self.eps
        )
        return y, (mean, rstd)

    def differentiable_forward(self, x: Tensor, params: Params) -> Tensor:
        weight, bias = params
        return functional.group_norm(x, self.groups, weight, bias, self.eps)

    def reusable_bytes(self, x: Tensor) -> int:
        return bytes_but_largest_part(x, len(x))

    def backward(self, call: BackwardCall) -> tuple[Tensor | None, ...]:
        param_gradients: tuple[Tensor | None, ...] = (None, None)
        if any(call.needs_gradient):
            param_gradients = self._gradients(
                call, slice(0, len(call.x)), [False, *call.needs_gradient]
            )[1:]
        if call.out is not None:
            for part in parts(len(call.x)):
                x_gradient = self._gradients(call, part, [True, False, False])[0]
                assert x_gradient is not None
                call.out[part].copy_(x_gradient)
        return _masked(param_gradients, call.needs_gradient)

    def _gradients(
        self, call: BackwardCall, part: slice, mask: list[bool]
    ) -> tuple[Tensor | None, ...]:
        mean, rstd = call.extras
        gradients: tuple[Tensor | None, ...] = _ops.native_group_norm_backward(
            call.gradient[part].contiguous(),
            call.x[part],
            mean[part],
            rstd[part],
            call.params[0],
            part.stop - part.start,
            call.x.shape[1],
            _inner(call.x),
            self.groups,
            mask,
        )
        return gradients


@dataclass(frozen=True)
class BatchNormFormula:
    """Formula of `torch.nn.functional.batch_norm`, computed for some channels at a time.

    Attributes:
        running: Running mean and variance. A forward with batch statistics updates them.
        uses_batch: Whether the statistics of the batch are used, and not the running ones.
        momentum: Weight of the batch in the running statistics.
        eps: Number that is added to the variance.
    """

    running: tuple[Tensor | None, Tensor | None]
    uses_batch: bool
    momentum: float
    eps: float
    # Three copies, each with a read and a write: the contiguous parts of the input and of the
    # output's gradient, and the input's gradient.
    extra_copies: float = 6.0

    def forward(self, x: Tensor, params: Params) -> tuple[Tensor, Extras]:
        (weight, bias), (mean, variance) = params, self.running
        y, *batch = torch.native_batch_norm(
            x, weight, bias, mean, variance, self.uses_batch, self.momentum, self.eps
        )
        if self.uses_batch:
            return y, tuple(batch)
        assert mean is not None
        assert variance is not None
        return y, (mean, variance)

    def differentiable_forward(self, x: Tensor, params: Params) -> Tensor:
        mean, variance = (None, None) if self.uses_batch else self.running
        weight, bias = params
        return functional.batch_norm(
            x, mean, variance, weight, bias, self.uses_batch, 0.0, self.eps
        )

    def reusable_bytes(self, x: Tensor) -> int:
        # Three tensors take memory for one part: the input's gradient, and the contiguous copies of
        # the input and of the output's gradient. With one or two channels a part is so large that
        # the result is negative.
        return x.nbytes - 3 * (x.nbytes - bytes_but_largest_part(x, x.shape[1]))

    def backward(self, call: BackwardCall) -> tuple[Tensor | None, ...]:
        weight, _ = call.params
        gradients = []
        for part in parts(call.x.shape[1]):
            used, unused = [extra[part] for extra in call.extras], [None, None]
            batch, running = (used, unused) if self.uses_batch else (unused, used)
            x_gradient, *param_gradients = _ops.native_batch_norm_backward(
                call.gradient[:, part].contiguous(),
                call.x[:, part].contiguous(),
                None if weight is None else weight[part],
                *running,
                *batch,
                self.uses_batch,
                self.eps,
                [call.out is not None, *call.needs_gradient],
            )
            if call.out is not None:
                call.out[:, part].copy_(x_gradient)
            gradients.append(param_gradients)
        return tuple(
            torch.cat(pieces) if is_needed else None
            for pieces, is_needed in zip(
                zip(*gradients, strict=True), call.needs_gradient, strict=True
            )
        )


def _inner(x: Tensor) -> int:
    """Return the number of elements of one channel of one sample."""
    return x.numel() // (x.shape[0] * x.shape[1])


def _masked(gradients: Sequence[Tensor | None], mask: Sequence[bool]) -> tuple[Tensor | None, ...]:
    return tuple(
        value if is_needed else None for value, is_needed in zip(gradients, mask, strict=True)
    )
