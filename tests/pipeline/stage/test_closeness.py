"""Equality up to rounding, with values that are not finite and values of masks."""

from __future__ import annotations

import math

import pytest
import torch

from lightning_dlres.pipeline.stage.closeness import equal_up_to_rounding

VALUES = torch.linspace(-2, 2, 64).reshape(8, 8)
MASK = torch.ones(8, 8).triu(1).bool()


@pytest.mark.parametrize("fill", [0.0, -1e9, -math.inf, math.nan, torch.finfo().min])
def test_a_fill_value_gives_no_tolerance_to_the_others(fill: float) -> None:
    filled = VALUES.masked_fill(MASK, fill)
    assert equal_up_to_rounding(filled + 1e-7, filled, 1e-5)
    other = (VALUES + 0.1).masked_fill(MASK, fill)
    assert not equal_up_to_rounding(other, filled, 1e-5)


@pytest.mark.parametrize("special", [math.inf, -math.inf, math.nan])
def test_values_that_are_not_finite_must_be_at_the_same_places(special: float) -> None:
    other = VALUES.clone()
    other[3, 3] = special
    assert equal_up_to_rounding(other, other, 1e-5)
    assert not equal_up_to_rounding(other, VALUES, 1e-5)
    assert not equal_up_to_rounding(VALUES, other, 1e-5)


@pytest.mark.parametrize("shape", [(0,), (), (1,), (5, 0)])
def test_any_shape_is_compared(shape: tuple[int, ...]) -> None:
    assert equal_up_to_rounding(torch.zeros(shape), torch.zeros(shape), 1e-5)
    if math.prod(shape):
        assert not equal_up_to_rounding(torch.ones(shape), torch.zeros(shape), 1e-5)


def test_rounding_near_zero_is_measured_by_the_scale() -> None:
    values = VALUES.clone()
    values[0] = 0.0
    noisy = values + 1e-6
    assert equal_up_to_rounding(noisy, values, 1e-5)
    assert not equal_up_to_rounding(noisy, values * 1e-3, 1e-5)
