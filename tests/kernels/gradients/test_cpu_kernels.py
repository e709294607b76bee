"""Tests of single operations in the CPU kernels of gradient codecs, which a GPU repeats exactly."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from lightning_dlres.kernels.gradients import levels, sums, threshold
from lightning_dlres.kernels.gradients.layout import BLOCK


def encoded(values: Tensor, residual: Tensor, bits: int = 8) -> Tensor:
    payload = torch.empty(levels.payload_bytes(values.numel(), bits), dtype=torch.uint8)
    levels.encode_nearest(values, residual, payload, 1.0, bits)
    return payload


def test_a_residual_is_rounded_after_each_operation() -> None:
    values, residual = torch.randn(BLOCK), torch.randn(BLOCK) / 64
    exact = (values + residual).numpy()
    step = np.float32(np.abs(exact).max() / np.float32(127))
    level = np.rint(exact * (np.float32(1) / step))
    # NumPy has no fused operations, which would round once instead of twice.
    expected = exact - level * step
    encoded(values, residual)
    assert np.array_equal(residual.numpy(), expected)


@pytest.mark.parametrize("bits", [4, 8])
def test_blocks_too_small_for_a_step_stay_in_the_residual(bits: int) -> None:
    """A step near the smallest float32 has no finite inverse."""
    values, residual = torch.zeros(100), torch.zeros(100)
    values[3], values[5] = 1e-37, -3e-38
    payload, decoded = encoded(values, residual, bits), torch.empty(100)
    levels.decode(payload, decoded, 1.0, False, bits=bits)
    torch.testing.assert_close(
        decoded.double() + residual.double(), values.double(), rtol=0, atol=0
    )


def largest_values() -> Tensor:
    """Return the largest float32, and the numbers just below it, of both signs."""
    top = torch.finfo(torch.float32).max
    values = torch.arange(64).mul(-1).add(torch.tensor(top).view(torch.int32)).view(torch.float32)
    return torch.cat([values, -values])


@pytest.mark.parametrize("bits", [4, 8])
def test_levels_of_the_largest_values_are_finite(bits: int) -> None:
    for value in largest_values():
        values, residual, decoded = value.repeat(40), torch.zeros(40), torch.empty(40)
        levels.decode(encoded(values, residual, bits), decoded, 1.0, False, bits=bits)
        assert decoded.isfinite().all()
        assert torch.equal(decoded.double() + residual.double(), values.double())


@pytest.mark.parametrize("bits", [2, 4, 8])
def test_random_levels_of_the_largest_values_are_finite(bits: int) -> None:
    for value in largest_values():
        values, decoded = value.repeat(40), torch.empty(40)
        payload = torch.empty(levels.payload_bytes(40, bits), dtype=torch.uint8)
        levels.encode_stochastic(values, payload, 1.0, bits=bits, seed=1)
        levels.decode(payload, decoded, 1.0, False, bits=bits)
        torch.testing.assert_close(decoded, values, rtol=2.0**-20, atol=0)


def in_order(lanes: NDArray[np.floating]) -> np.floating:
    """Return a sum in the order that `sums` defines."""
    while lanes.size > 1:
        lower, upper = np.split(lanes, 2)
        lanes = lower + upper
    return lanes[0]


@pytest.mark.parametrize("count", [1, 255, 4095, 4096, 4097, 300_000])
def test_moments_are_sums_in_a_defined_order(count: int) -> None:
    values = torch.randn(count)
    padded = np.zeros(-(-count // BLOCK) * BLOCK)
    padded[:count] = values.numpy().astype(np.float64) - np.float64(0.5)
    for power, actual in zip((1, 2), sums.moments(values, torch.tensor([0.5]))[1:], strict=True):
        rows = (padded**power).reshape(-1, 16, 256)
        of_blocks = np.zeros(-(-len(rows) // 256) * 256)
        for i, row in enumerate(rows):
            # cumsum adds in order.
            of_blocks[i] = in_order(np.cumsum(row, axis=0)[-1])
        assert float(actual) == in_order(np.cumsum(of_blocks.reshape(-1, 256), axis=0)[-1])
    assert sums.moments(values, torch.zeros(1))[0] == values.abs().max()


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_moments_leave_out_values_that_are_not_finite(value: float) -> None:
    values = torch.randn(5000)
    values[4999] = value
    largest, total, squares = sums.moments(values, torch.zeros(1))
    assert largest.isnan()
    assert torch.isclose(total, values[:4999].double().sum())
    assert torch.isclose(squares, values[:4999].double().square().sum())


def test_the_variance_of_a_constant_is_exactly_zero() -> None:
    values = torch.full((100_003,), 0.1)
    _, total, squares = sums.moments(values, values[:1])
    assert total == squares == 0
    assert [float(moment) for moment in sums.moments(values[:0], values[:1])] == [0, 0, 0]


def test_a_threshold_of_zero_starts_at_the_mean_magnitude() -> None:
    values, adaptive = torch.randn(10_000), torch.zeros(1)
    payload = torch.empty(threshold.payload_bytes(10_000), dtype=torch.uint8)
    threshold.encode(values, torch.zeros(10_000), payload, adaptive, 0.5, 1.5)
    sent = payload[:4].view(torch.float32)
    torch.testing.assert_close(sent, 1.5 * 0.5 * values.abs().mean().view(1))
    # The next one follows a sample of gradient plus residual.
    torch.testing.assert_close(adaptive, sent, rtol=0.1, atol=0)
    before = adaptive.clone()
    threshold.encode(values, torch.zeros(10_000), payload, adaptive, 0.5, 1.5)
    assert torch.equal(payload[:4].view(torch.float32), before)


def test_the_threshold_follows_all_parts_of_a_block() -> None:
    """A sixteenth of a block with small gradients does not keep the others from being sent."""
    values, residual, adaptive = torch.randn(BLOCK), torch.zeros(BLOCK), torch.zeros(1)
    values[: BLOCK // 16] *= 1e-3
    payload = torch.empty(threshold.payload_bytes(BLOCK), dtype=torch.uint8)
    thresholds = []
    for _ in range(100):
        threshold.encode(values, residual, payload, adaptive, 1.0, 1.5)
        thresholds.append(float(adaptive))
    assert sum(value > 0.5 for value in thresholds) > 50
