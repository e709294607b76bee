"""8-bit floating-point gradients with one scale per block of 4096 elements, and error feedback.

The formats are those of Micikevicius et al., "FP8 formats for deep learning", 2022: E4M3 has 3 bits
of mantissa, E5M2 has 2 and a wider range. A scale maps the largest magnitude of a block to the
format's largest number.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor
from torch.nn.functional import pad
from typing_extensions import override

from lightning_dlres.codecs.base import register
from lightning_dlres.codecs.gradient.base import RESIDUAL, GradientCodec, State
from lightning_dlres.core.checks import one_of
from lightning_dlres.kernels.gradients.layout import BLOCK, blocks

_DTYPES = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}


@register
class Float8(GradientCodec):
    """Codec with one byte per element, and one scale per block.

    Args:
        format: "e4m3" or "e5m2".

    Raises:
        ConfigError: If `format` has another value.
    """

    name = "fp8"

    def __init__(self, *, format: Literal["e4m3", "e5m2"] = "e4m3") -> None:
        self.format = one_of("format", format, _DTYPES, "format='e4m3'")
        self._dtype = _DTYPES[self.format]

    @override
    def payload_bytes(self, count: int) -> int:
        return 4 * blocks(count) + 4 * -(-count // 4)

    @override
    def compress(
        self, values: Tensor, state: State, payload: Tensor, *, scale: float = 1.0, seed: int = 0
    ) -> None:
        residual, count = state[RESIDUAL], values.numel()
        if not count:
            return
        exact = torch.add(residual, values, alpha=scale)
        rows = _rows(exact)
        # NaN if any element of the block is not finite.
        largest = (rows.abs() + 0 * rows).amax(1)
        largest_code = torch.finfo(self._dtype).max
        # Divide by a tensor: given a number, a GPU would multiply by its inverse, which rounds
        # differently.
        block_scales = largest / largest.new_full((1,), largest_code)
        divisor = block_scales.masked_fill(~(block_scales > 0), 1.0)
        # A scale below the normal numbers may have been rounded down, and then the quotient is
        # larger than any code. Some versions of torch would make it infinite or NaN.
        codes = (rows / divisor[:, None]).clamp_(-largest_code, largest_code).to(self._dtype)
        error = exact - (codes.to(torch.float32) * block_scales[:, None]).view(-1)[:count]
        torch.where(error.isfinite(), error, residual, out=residual)
        scale_bytes = 4 * blocks(count)
        payload[:scale_bytes].view(torch.float32).copy_(block_scales)
        payload[scale_bytes : scale_bytes + count].copy_(codes.view(-1)[:count].view(torch.uint8))

    @override
    def expand(
        self, payload: Tensor, out: Tensor, *, scale: float = 1.0, accumulate: bool = False
    ) -> None:
        count = out.numel()
        if not count:
            return
        scale_bytes = 4 * blocks(count)
        block_scales = payload[:scale_bytes].view(torch.float32) * scale
        codes = payload[scale_bytes : scale_bytes + count].view(self._dtype).to(torch.float32)
        values = (_rows(codes) * block_scales[:, None]).view(-1)[:count]
        out.add_(values) if accumulate else out.copy_(values)


def _rows(values: Tensor) -> Tensor:
    """Return the elements as rows of one block each; the last one is filled with zeros."""
    return pad(values, (0, -values.numel() % BLOCK)).view(-1, BLOCK)
