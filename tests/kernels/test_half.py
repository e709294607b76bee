"""16-bit floating-point numbers of our kernels are those of torch, bit for bit."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from lightning_dlres.kernels.gradients.layout import LARGEST
from lightning_dlres.kernels.half import conversion

DTYPES = [torch.float16, torch.bfloat16]


def assert_same_bits_or_nan(one: Tensor, other: Tensor) -> None:
    integers = torch.int16 if one.itemsize == 2 else torch.int32
    is_same = (one.view(integers) == other.view(integers)) | (one.isnan() & other.isnan())
    assert is_same.all(), (one[~is_same][:5], other[~is_same][:5])


@pytest.mark.parametrize("dtype", DTYPES)
def test_all_half_numbers_decode_as_torch_converts_them(dtype: torch.dtype) -> None:
    codes = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(torch.uint8)
    decoded = torch.empty(1 << 16)
    conversion.decode(codes, decoded, 1.0, False, dtype)
    assert_same_bits_or_nan(decoded, codes.view(dtype).float())
    total = torch.ones(1 << 16)
    conversion.decode(codes, total, 0.5, True, dtype)
    assert_same_bits_or_nan(total, 1 + codes.view(dtype).float() * 0.5)


@pytest.mark.parametrize("dtype", DTYPES)
def test_half_numbers_are_rounded_as_torch_rounds_them(dtype: torch.dtype) -> None:
    """Any bits of float32, and numbers near those at which the rounding changes."""
    random_bits = torch.randint(-(1 << 31), 1 << 31, (400_001,)).to(torch.int32)
    edges = torch.tensor(
        [0.0, 2**-24, 2**-25, 1.5 * 2**-24, 2**-14, 65504, 65520, 3.39e38, 3.4e38, math.inf]
    )
    near = torch.stack([edges, torch.nextafter(edges, -edges), torch.nextafter(edges, 2 * edges)])
    values = torch.cat([random_bits.view(torch.float32), near.view(-1), -near.view(-1)])
    residual = torch.zeros_like(values)
    payload = torch.empty(2 * len(values), dtype=torch.uint8)
    conversion.encode(values, residual, payload, 1.0, dtype)
    limit = torch.finfo(dtype).max
    # The sum with the residual has no negative zero.
    bounded = torch.where(values.isfinite(), values.clamp(-limit, limit), values) + 0.0
    sent = payload.view(dtype)
    assert_same_bits_or_nan(sent, bounded.to(dtype))
    is_finite = values.abs() <= LARGEST
    assert torch.equal(residual[is_finite], (values - sent.float())[is_finite])
    assert not residual[~is_finite].any()
