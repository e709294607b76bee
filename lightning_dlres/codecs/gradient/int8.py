"""8-bit quantisation with one scale per block of 4096 elements, and error feedback.

Dettmers, "8-bit approximations for parallelism in deep learning", 2016, has one scale per tensor;
scales per block follow Dettmers, Lewis, Shleifer and Zettlemoyer, "8-bit optimizers via block-wise
quantization", 2022. Levels are uniform.
"""

from __future__ import annotations

from torch import Tensor
from typing_extensions import override

from lightning_dlres.codecs.base import register
from lightning_dlres.codecs.gradient.base import RESIDUAL, GradientCodec, State
from lightning_dlres.kernels.gradients import levels

_BITS = 8


@register
class BlockwiseInt8(GradientCodec):
    """Codec with one byte per element, and one scale per block."""

    name = "int8"
    uses_kernels = True

    @override
    def payload_bytes(self, count: int) -> int:
        return levels.payload_bytes(count, _BITS)

    @override
    def compress(
        self, values: Tensor, state: State, payload: Tensor, *, scale: float = 1.0, seed: int = 0
    ) -> None:
        levels.encode_nearest(values, state[RESIDUAL], payload, scale, _BITS)

    @override
    def expand(
        self, payload: Tensor, out: Tensor, *, scale: float = 1.0, accumulate: bool = False
    ) -> None:
        levels.decode(payload, out, scale, accumulate, bits=_BITS)
