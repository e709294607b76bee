"""16-bit floating-point gradients: float16 and bfloat16, with error feedback.

A finite value beyond the format's range is sent as the format's largest number. The residual keeps
the rest for later steps.
"""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor
from typing_extensions import override

from lightning_dlres.codecs.base import register
from lightning_dlres.codecs.gradient.base import RESIDUAL, GradientCodec, State
from lightning_dlres.kernels.half import conversion


class _Half(GradientCodec):
    """Base of the codecs with 2 bytes per element."""

    dtype: ClassVar[torch.dtype]

    @override
    def payload_bytes(self, count: int) -> int:
        return 4 * -(-count // 2)

    @override
    def compress(
        self, values: Tensor, state: State, payload: Tensor, *, scale: float = 1.0, seed: int = 0
    ) -> None:
        residual = state[RESIDUAL]
        if values.device.type == "cpu":
            conversion.encode(values, residual, payload, scale, self.dtype)
            return
        exact = torch.add(residual, values, alpha=scale)
        limit = torch.finfo(self.dtype).max
        # `clamp` would turn infinities into finite numbers.
        bounded = torch.where(exact.isfinite(), exact.clamp(-limit, limit), exact)
        sent = payload.view(self.dtype)[: values.numel()].copy_(bounded)
        error = exact - sent.to(torch.float32)
        torch.where(error.isfinite(), error, residual, out=residual)

    @override
    def expand(
        self, payload: Tensor, out: Tensor, *, scale: float = 1.0, accumulate: bool = False
    ) -> None:
        if out.device.type == "cpu":
            conversion.decode(payload, out, scale, accumulate, self.dtype)
            return
        values = payload.view(self.dtype)[: out.numel()].to(torch.float32).mul_(scale)
        out.add_(values) if accumulate else out.copy_(values)


@register
class Float16(_Half):
    """Codec of float16 numbers, with 11 bits of precision."""

    name = "fp16"
    dtype = torch.float16


@register
class BFloat16(_Half):
    """Codec of bfloat16 numbers, with the range of float32 and 8 bits of precision."""

    name = "bf16"
    dtype = torch.bfloat16
