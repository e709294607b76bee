"""QSGD: unbiased stochastic rounding to a few levels (Alistarh, Grubic, Li, Tomioka and Vojnovic,
2017).

Like the authors' experiments it scales each bucket, here a block of 4096 elements, by its largest
magnitude. Codes have a fixed width; the paper's entropy code would make payload sizes depend on the
data.
"""

from __future__ import annotations

from torch import Tensor
from typing_extensions import override

from lightning_dlres.codecs.base import register
from lightning_dlres.codecs.gradient.base import GradientCodec, State
from lightning_dlres.core.errors import ConfigError, got_expected
from lightning_dlres.kernels.gradients import levels

_WIDTHS = (2, 4, 8)


@register
class QSGD(GradientCodec):
    """Codec with codes of a few bits, unbiased and without a state.

    Args:
        bits: Bits of an element: 2, 4 or 8.

    Raises:
        ConfigError: If `bits` has another value.
    """

    name = "qsgd"
    is_unbiased = True
    uses_kernels = True

    def __init__(self, *, bits: int = 4) -> None:
        if bits not in _WIDTHS:
            raise ConfigError(got_expected("bits", bits, "2, 4 or 8", "bits=4"))
        self.bits = bits

    @override
    def payload_bytes(self, count: int) -> int:
        return levels.payload_bytes(count, self.bits)

    @override
    def compress(
        self, values: Tensor, state: State, payload: Tensor, *, scale: float = 1.0, seed: int = 0
    ) -> None:
        levels.encode_stochastic(values, payload, scale, bits=self.bits, seed=seed)

    @override
    def expand(
        self, payload: Tensor, out: Tensor, *, scale: float = 1.0, accumulate: bool = False
    ) -> None:
        levels.decode(payload, out, scale, accumulate, bits=self.bits)
