"""TernGrad: unbiased codes -1, 0 and 1 (Wen, Xu, Yan, Wu, Wang, Chen and Li, 2017).

A gradient is first clipped at `clip` standard deviations. The step between two codes is the largest
magnitude that is left. Each element is sent as its sign, with the probability magnitude / step, and
else as 0. The expected value of a decoded element is therefore the clipped element: the codec is
unbiased apart from the clipping.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from typing_extensions import override

from lightning_dlres.codecs.base import register
from lightning_dlres.codecs.gradient.base import GradientCodec, State
from lightning_dlres.core.checks import finite
from lightning_dlres.kernels.gradients import levels, sums

_BITS = 2


@register
class TernGrad(GradientCodec):
    """Codec with codes of 2 bits, and one step per gradient; it has no state.

    Args:
        clip: Magnitude at which elements are clipped, in standard deviations of the gradient.

    Raises:
        ConfigError: If `clip` is not a finite number above 0.
    """

    name = "terngrad"
    is_unbiased = True
    suits_adam = False
    uses_kernels = True

    def __init__(self, *, clip: float = 2.5) -> None:
        self.clip = finite("clip", clip, "clip=2.5", above=True)

    @override
    def payload_bytes(self, count: int) -> int:
        return levels.payload_bytes(count, _BITS, per_block=False)

    @override
    def compress(
        self, values: Tensor, state: State, payload: Tensor, *, scale: float = 1.0, seed: int = 0
    ) -> None:
        count = values.numel()
        pivot = values[:1] if count else values.new_zeros(1)
        limit, total, squares = sums.moments(values, pivot)
        if count > 1:
            # A GPU multiplies by the inverse in place of a division, so both devices do.
            inverse = 1 / count
            variance = (squares - total * total * inverse) * inverse
            deviation = variance.clamp(min=0).sqrt().to(torch.float32)
            clipped = limit.minimum(deviation * self.clip)
            limit = torch.where(deviation > 0, clipped, limit)
        # A NaN from arithmetic has other bits on a GPU than on a CPU, so store the same constant.
        step = (limit * scale).masked_fill(limit.isnan(), math.nan).view(1)
        levels.encode_stochastic(values, payload, scale, bits=_BITS, seed=seed, step=step)

    @override
    def expand(
        self, payload: Tensor, out: Tensor, *, scale: float = 1.0, accumulate: bool = False
    ) -> None:
        levels.decode(payload, out, scale, accumulate, bits=_BITS, per_block=False)
