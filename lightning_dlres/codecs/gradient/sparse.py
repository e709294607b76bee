"""Sparse payloads: the values and the indices of a gradient's largest elements.

A payload has `k` values as float32, then `k` indices as int32. Unused entries have the value 0. The
first index of a gradient that is not finite is -1, and all its elements are decoded as NaN.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from typing_extensions import override

from lightning_dlres.codecs.gradient.base import GradientCodec
from lightning_dlres.core.errors import ConfigError, got_expected

_NOT_FINITE = -1
# Elements above which the threshold is estimated from a sample, and the number of elements in the
# sample. Selecting among all elements takes longer than everything else.
_SAMPLED_ABOVE, _SAMPLE = 1 << 16, 1 << 14


def check_ratio(ratio: float) -> float:
    """Return a share of elements.

    Raises:
        ConfigError: If it is not in (0, 1].
    """
    if not isinstance(ratio, (int, float)) or isinstance(ratio, bool) or not 0 < ratio <= 1:
        raise ConfigError(got_expected("ratio", ratio, "in (0, 1]", "ratio=0.01"))
    return ratio


def entries(count: int, ratio: float) -> int:
    """Return the number of elements that are sent of `count`: a share, and at least one."""
    return min(count, max(1, math.ceil(count * ratio)))


def payload_bytes(count: int, ratio: float) -> int:
    """Return the bytes of a payload of `count` elements."""
    return 8 * entries(count, ratio)


def largest(values: Tensor, number: int) -> Tensor:
    """Return the indices of at most `number` of the elements with the largest magnitudes.

    They are exactly the largest ones of a small tensor, or on a GPU. Of a large one on a CPU, a
    regular sample gives the threshold (Lin et al., 2018), and fewer elements than `number` may pass
    it. On a GPU the number of results is fixed, so that nothing waits for it.
    """
    magnitudes = values.abs()
    if values.is_cuda or values.numel() <= _SAMPLED_ABOVE:
        return magnitudes.topk(number, sorted=False).indices
    sample = magnitudes[:: values.numel() // _SAMPLE]
    expected = max(1, round(sample.numel() * number / values.numel()))
    threshold = sample.topk(expected, sorted=False).values.min()
    candidates = (magnitudes >= threshold).nonzero().view(-1)
    if candidates.numel() <= number:
        return candidates
    return candidates[magnitudes[candidates].topk(number, sorted=False).indices]


def write(payload: Tensor, values: Tensor, indices: Tensor, is_finite: Tensor) -> None:
    """Write a payload of at most as many entries as it holds.

    Args:
        payload: uint8[payload_bytes(n, ratio)].
        values: float32[k].
        indices: int64[k].
        is_finite: Boolean without dimensions. False: all elements are decoded as NaN.
    """
    sent, positions = _parts(payload)
    sent.zero_()
    positions.zero_()
    sent[: indices.numel()] = values
    positions[: indices.numel()] = indices.to(torch.int32)
    sent.masked_fill_(~is_finite, math.nan)
    positions.masked_fill_(~is_finite, _NOT_FINITE)


def write_not_finite(payload: Tensor) -> None:
    """Write the payload of a gradient that is not finite."""
    sent, positions = _parts(payload)
    sent.fill_(math.nan)
    positions.fill_(_NOT_FINITE)


def expand(payload: Tensor, out: Tensor, scale: float, accumulate: bool) -> None:
    """Write or add the decoded values; see `GradientCodec.expand`."""
    if not out.numel():
        return
    values, indices = _parts(payload)
    if not accumulate:
        out.zero_()
    is_not_finite = indices[0] == _NOT_FINITE
    # A GPU makes a pass over memory even if all is finite; a branch would wait for it.
    if out.is_cuda or is_not_finite:
        out.masked_fill_(is_not_finite, math.nan)
    out.index_add_(0, indices.clamp(min=0), values * scale)


def _parts(payload: Tensor) -> tuple[Tensor, Tensor]:
    size = payload.numel() // 2
    return payload[:size].view(torch.float32), payload[size:].view(torch.int32)


class SparseCodec(GradientCodec):
    """Base of the codecs that send a share `ratio` of the elements."""

    # The largest elements of a gradient are not the largest ones of its partitions.
    is_divisible = False
    ratio: float

    @override
    def payload_bytes(self, count: int) -> int:
        return payload_bytes(count, self.ratio)

    @override
    def expand(
        self, payload: Tensor, out: Tensor, *, scale: float = 1.0, accumulate: bool = False
    ) -> None:
        expand(payload, out, scale, accumulate)
