"""Normalisation layers, whose input's gradient depends on one row, sample or channel at a time."""

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

_ops = torch.ops.aten


@dataclass(frozen=True)
class LayerNorm:
    """`torch.nn.functional.layer_norm`, some rows at a time."""

    shape: tuple[int, ...]
    eps: float
    copies: float = 2.0

    def forward(self, x: Tensor, params: Params) -> tuple[Tensor, Extras]:
        weight, bias = params
        y, mean, scale = torch.native_layer_norm(x, self.shape, weight, bias, self.eps)
        return y, (mean, scale)

    def plain(self, x: Tensor, params: Params) -> Tensor:
        weight, bias = params
        return functional.layer_norm(x, list(self.shape), weight, bias, self.eps)

    def spare(self, x: Tensor) -> int:
        return spare_bytes(x, len(self._rows(x)))

    def _rows(self, x: Tensor) -> Tensor:
        return x.reshape(-1, *self.shape)

    def backward(self, call: Backward) -> tuple[Tensor | None, ...]:
        gradient, x = self._rows(call.gradient), self._rows(call.x)
        mean, scale = (extra.view(-1, *(1 for _ in self.shape)) for extra in call.extras)
        found: tuple[Tensor | None, ...] = (None, None)
        if any(call.wanted):
            mask = [False, *call.wanted]
            found = _ops.native_layer_norm_backward(
                gradient, x, self.shape, mean, scale, *call.params, mask
            )[1:]
        if call.into is not None:
            into = call.into.view(x.shape)
            for part in parts(len(x)):
                some, _, _ = _ops.native_layer_norm_backward(
                    gradient[part],
                    x[part],
                    self.shape,
                    mean[part],
                    scale[part],
                    *call.params,
                    [True, False, False],
                )
                into[part].copy_(some)
        return _only(found, call.wanted)


@dataclass(frozen=True)
class GroupNorm:
    """`torch.nn.functional.group_norm`, some samples at a time."""

    groups: int
    eps: float
    copies: float = 2.0

    def forward(self, x: Tensor, params: Params) -> tuple[Tensor, Extras]:
        samples, channels = x.shape[:2]
        weight, bias = params
        y, mean, scale = torch.native_group_norm(
            x, weight, bias, samples, channels, _inner(x), self.groups, self.eps
        )
        return y, (mean, scale)

    def plain(self, x: Tensor, params: Params) -> Tensor:
        weight, bias = params
        return functional.group_norm(x, self.groups, weight, bias, self.eps)

    def spare(self, x: Tensor) -> int:
        return spare_bytes(x, len(x))

    def backward(self, call: Backward) -> tuple[Tensor | None, ...]:
        found: tuple[Tensor | None, ...] = (None, None)
        if any(call.wanted):
            found = self._gradients(call, slice(0, len(call.x)), [False, *call.wanted])[1:]
        if call.into is not None:
            for part in parts(len(call.x)):
                some = self._gradients(call, part, [True, False, False])[0]
                assert some is not None
                call.into[part].copy_(some)
        return _only(found, call.wanted)

    def _gradients(
        self, call: Backward, part: slice, mask: list[bool]
    ) -> tuple[Tensor | None, ...]:
        mean, scale = call.extras
        found: tuple[Tensor | None, ...] = _ops.native_group_norm_backward(
            call.gradient[part].contiguous(),
            call.x[part],
            mean[part],
            scale[part],
            call.params[0],
            part.stop - part.start,
            call.x.shape[1],
            _inner(call.x),
            self.groups,
            mask,
        )
        return found


@dataclass(frozen=True)
class BatchNorm:
    """`torch.nn.functional.batch_norm`, some channels at a time.

    Attributes:
        running: statistics that are kept, which a forward with the batch's own changes.
        uses_batch: whether the batch's own statistics are used.
    """

    running: tuple[Tensor | None, Tensor | None]
    uses_batch: bool
    momentum: float
    eps: float
    copies: float = 6.0

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

    def plain(self, x: Tensor, params: Params) -> Tensor:
        mean, variance = (None, None) if self.uses_batch else self.running
        weight, bias = params
        return functional.batch_norm(
            x, mean, variance, weight, bias, self.uses_batch, 0.0, self.eps
        )

    def spare(self, x: Tensor) -> int:
        # Its gradient, and what is copied of the input and of the output's gradient.
        return x.nbytes - 3 * (x.nbytes - spare_bytes(x, x.shape[1]))

    def backward(self, call: Backward) -> tuple[Tensor | None, ...]:
        weight, _ = call.params
        found = []
        for part in parts(call.x.shape[1]):
            own = [extra[part] for extra in call.extras]
            batch, running = (own, [None, None]) if self.uses_batch else ([None, None], own)
            some, *rest = _ops.native_batch_norm_backward(
                call.gradient[:, part].contiguous(),
                call.x[:, part].contiguous(),
                None if weight is None else weight[part],
                *running,
                *batch,
                self.uses_batch,
                self.eps,
                [call.into is not None, *call.wanted],
            )
            if call.into is not None:
                call.into[:, part].copy_(some)
            found.append(rest)
        return tuple(
            torch.cat(pieces) if is_wanted else None
            for pieces, is_wanted in zip(zip(*found, strict=True), call.wanted, strict=True)
        )


def _inner(x: Tensor) -> int:
    """Return how many elements a channel of a sample has."""
    return x.numel() // (x.shape[0] * x.shape[1])


def _only(found: Sequence[Tensor | None], wanted: Sequence[bool]) -> tuple[Tensor | None, ...]:
    return tuple(one if is_wanted else None for one, is_wanted in zip(found, wanted, strict=True))
