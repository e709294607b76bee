"""Comparison of tensors: up to rounding, and value by value."""

from __future__ import annotations

import torch
from torch import Tensor

# The largest magnitude counts, but at most this many times the one that a quarter of the values do
# not reach. Masks fill tensors with values such as -1e9, next to which all others would be zero.
_MOST_QUARTILES = 100.0


def equal_up_to_rounding(a: Tensor, b: Tensor, tolerance: float) -> bool:
    """Return whether two tensors of floating-point numbers are equal up to rounding.

    Infinities and NaN must be at the same places.

    Args:
        a: Any shape.
        b: Same shape and dtype.
        tolerance: Largest difference, relative to the value and to the scale of `b`.
    """
    scale = _scale(b.detach())
    return torch.allclose(a, b, rtol=tolerance, atol=tolerance * scale, equal_nan=True)


def has_same_values(a: Tensor, b: Tensor) -> bool:
    """Return True if two tensors are equal; NaN counts as equal to NaN."""
    a, b = a.detach(), b.detach().to(a.device)
    return a.shape == b.shape and bool(((a == b) | ((a != a) & (b != b))).all())


def _scale(values: Tensor) -> float:
    magnitudes = values.nan_to_num(0.0, 0.0, 0.0).abs().flatten()
    magnitudes = magnitudes[magnitudes > 0].double()
    if not magnitudes.numel():
        return 0.0
    quartile = float(magnitudes.kthvalue((magnitudes.numel() + 3) // 4).values)
    return min(float(magnitudes.max()), _MOST_QUARTILES * quartile)
