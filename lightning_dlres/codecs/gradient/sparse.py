"""Sparse payloads: the values and the indices of a gradient's largest elements.

A payload has n entries: n values as float32, then n indices as int32. Unused entries have the value
0. In the payload of a gradient that is not finite, the first index is -1. All elements are then
decoded as NaN.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from typing_extensions import override

from lightning_dlres.codecs.gradient.base import GradientCodec
from lightning_dlres.core.errors import ConfigError, ProtocolError, got_expected

_NOT_FINITE = -1
# Number of elements above which the threshold is estimated from a sample, and the least number of
# elements in the sample. A selection among all elements would take most of the codec's time.
_SAMPLED_ABOVE, _SAMPLE = 1 << 16, 1 << 14


def check_ratio(ratio: float) -> float:
    """Return `ratio`, the share of elements that are sent.

    Raises:
        ConfigError: If it is not a number in (0, 1].
    """
    if not isinstance(ratio, (int, float)) or isinstance(ratio, bool) or not 0 < ratio <= 1:
        raise ConfigError(got_expected("ratio", ratio, "in (0, 1]", "ratio=0.01"))
    return ratio


def entries(count: int, ratio: float) -> int:
    """Return the number of entries in the payload of `count` elements.

    It is the share `ratio` of the elements, rounded up: at least one, unless `count` is 0.
    """
    return min(count, max(1, math.ceil(count * ratio)))


def payload_bytes(count: int, ratio: float) -> int:
    """Return the payload's size in bytes for `count` elements."""
    return 8 * entries(count, ratio)


def largest(values: Tensor, number: int) -> Tensor:
    """Return the indices of the elements with the largest magnitudes, at most `number` of them.

    On a GPU, and for a small tensor, they are exactly the `number` largest. For a large tensor on a
    CPU, a sample of every n-th element gives a threshold (Lin et al., 2018). Fewer elements than
    `number` may reach it. A GPU does not use a threshold, because the host would have to wait for
    the number of results.
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
    """Write values and their indices into a payload, and zeros into the unused entries.

    Args:
        payload: Memory of the payload: uint8[8 * n] for n entries.
        values: float32[k], with k at most n.
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
    # On a GPU, make this pass over memory even if all is finite: a branch would wait for the GPU.
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

    @override
    def check_payload(self, payload: Tensor, count: int) -> None:
        indices = _parts(payload)[1]
        if indices.numel() and int(indices.max()) >= count:
            raise ProtocolError(
                f"a payload of codec {self.name!r} for {count} elements has the position "
                f"{int(indices.max())}."
            )
