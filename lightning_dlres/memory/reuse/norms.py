"""Normalisation layers, whose input's gradient depends on one row, sample or channel at a time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from lightning_dlres.memory.reuse.formula import Extras, Params, parts, spare_bytes

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

    def backward(
        self,
        gradient: Tensor,
        x: Tensor,
        params: Params,
        extras: Extras,
        wanted: Sequence[bool],
        into: Tensor | None,
    ) -> tuple[Tensor | None, ...]:
        gradient, x = self._rows(gradient), self._rows(x)
        mean, scale = (extra.view(-1, *(1 for _ in self.shape)) for extra in extras)
        found: tuple[Tensor | None, ...] = (None, None)
        if any(wanted):
            mask = [False, *wanted]
            found = _ops.native_layer_norm_backward(
                gradient, x, self.shape, mean, scale, *params, mask
            )[1:]
        if into is not None:
            into = into.view(x.shape)
            for part in parts(len(x)):
                some, _, _ = _ops.native_layer_norm_backward(
                    gradient[part],
                    x[part],
                    self.shape,
                    mean[part],
                    scale[part],
                    *params,
                    [True, False, False],
                )
                into[part].copy_(some)
        return _only(found, wanted)


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

    def backward(
        self,
        gradient: Tensor,
        x: Tensor,
        params: Params,
        extras: Extras,
        wanted: Sequence[bool],
        into: Tensor | None,
    ) -> tuple[Tensor | None, ...]:
        gradient = gradient.contiguous()
        every = slice(0, len(x))
        found: tuple[Tensor | None, ...] = (None, None)
        if any(wanted):
            found = self._gradients(gradient, x, params, extras, every, [False, *wanted])[1:]
        if into is not None:
            for part in parts(len(x)):
                mask = [True, False, False]
                some = self._gradients(gradient, x, params, extras, part, mask)[0]
                assert some is not None
                into[part].copy_(some)
        return _only(found, wanted)

    def _gradients(
        self,
        gradient: Tensor,
        x: Tensor,
        params: Params,
        extras: Extras,
        part: slice,
        mask: list[bool],
    ) -> tuple[Tensor | None, ...]:
        weight, _ = params
        mean, scale = extras
        found: tuple[Tensor | None, ...] = _ops.native_group_norm_backward(
            gradient[part],
            x[part],
            mean[part],
            scale[part],
            weight,
            part.stop - part.start,
            x.shape[1],
            _inner(x),
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

    def backward(
        self,
        gradient: Tensor,
        x: Tensor,
        params: Params,
        extras: Extras,
        wanted: Sequence[bool],
        into: Tensor | None,
    ) -> tuple[Tensor | None, ...]:
        weight, _ = params
        found = []
        for part in parts(x.shape[1]):
            own = [extra[part] for extra in extras]
            batch, running = (own, [None, None]) if self.uses_batch else ([None, None], own)
            some, *rest = _ops.native_batch_norm_backward(
                gradient[:, part].contiguous(),
                x[:, part].contiguous(),
                None if weight is None else weight[part],
                *running,
                *batch,
                self.uses_batch,
                self.eps,
                [into is not None, *wanted],
            )
            if into is not None:
                into[:, part].copy_(some)
            found.append(rest)
        return tuple(
            torch.cat(pieces) if is_wanted else None
            for pieces, is_wanted in zip(zip(*found, strict=True), wanted, strict=True)
        )


def _inner(x: Tensor) -> int:
    """Return how many elements a channel of a sample has."""
    return x.numel() // (x.shape[0] * x.shape[1])


def _only(found: Sequence[Tensor | None], wanted: Sequence[bool]) -> tuple[Tensor | None, ...]:
    return tuple(one if is_wanted else None for one, is_wanted in zip(found, wanted, strict=True))
