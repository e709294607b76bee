"""One-bit quantisation with error feedback: signs, and the mean of each sign.

Seide, Fu, Droppo, Li and Yu, "1-bit stochastic gradient descent", 2014. There the means are those
of a column. Here they are those of a block of 4096 elements, so that one pass over memory is
enough.
"""

from __future__ import annotations

from torch import Tensor
from typing_extensions import override

from lightning_dlres.codecs.base import register
from lightning_dlres.codecs.gradient.base import RESIDUAL, GradientCodec, State
from lightning_dlres.kernels.gradients import sign


@register
class OneBit(GradientCodec):
    """Codec with one bit per element, and two means per block."""

    name = "onebit"
    suits_adam = False
    uses_kernels = True

    @override
    def payload_bytes(self, count: int) -> int:
        return sign.payload_bytes(count)

    @override
    def compress(
        self, values: Tensor, state: State, payload: Tensor, *, scale: float = 1.0, seed: int = 0
    ) -> None:
        sign.encode(values, state[RESIDUAL], payload, scale)

    @override
    def expand(
        self, payload: Tensor, out: Tensor, *, scale: float = 1.0, accumulate: bool = False
    ) -> None:
        sign.decode(payload, out, scale, accumulate)
