"""Conversion to 16-bit floating-point numbers and back, with error feedback, on the CPU.

Values are rounded to the nearest number, ties to even. A finite value beyond the largest number
becomes that number; NaN and the infinities stay what they are.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lightning_dlres.core.arrays import array_of
from lightning_dlres.kernels.gradients.layout import float_array, run

_BITS = 16


def encode(
    gradient: Tensor, residual: Tensor, payload: Tensor, scale: float, dtype: torch.dtype
) -> None:
    """Write a payload, and update the residual.

    Args:
        gradient: float32[n], contiguous.
        residual: float32[n], updated in place. Elements whose value is not finite keep theirs.
        payload: uint8[at least 2 * n].
        scale: Power of two by which the gradient is multiplied.
        dtype: float16 or bfloat16.
    """
    from lightning_dlres.kernels.half import conversion_cpu

    kernel = (
        conversion_cpu.encode_float16 if dtype is torch.float16 else conversion_cpu.encode_bfloat16
    )
    count = gradient.numel()
    run(
        kernel,
        count,
        _BITS,
        elements=[float_array(gradient), float_array(residual), _codes(payload, count)],
        options=[scale],
    )


def decode(
    payload: Tensor, out: Tensor, scale: float, accumulate: bool, dtype: torch.dtype
) -> None:
    """Write or add the decoded values.

    Args:
        payload: uint8[at least 2 * n].
        out: float32[n], contiguous.
        scale: Factor of the decoded values.
        accumulate: Add to `out`.
        dtype: float16 or bfloat16.
    """
    from lightning_dlres.kernels.half import conversion_cpu

    kernel = (
        conversion_cpu.decode_float16 if dtype is torch.float16 else conversion_cpu.decode_bfloat16
    )
    count = out.numel()
    run(
        kernel,
        count,
        _BITS,
        elements=[float_array(out), _codes(payload, count)],
        options=[scale, accumulate],
    )


def _codes(payload: Tensor, count: int) -> NDArray[np.uint16]:
    return array_of(payload).view(np.uint16)[:count]
