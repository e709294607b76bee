"""The rule that ends the warm-up."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest

from lightning_dlres.gradsync.optimizers.variance_freeze import FreezeRule


def freeze_step_of(rule: FreezeRule, norm: Callable[[int], float], last: int) -> int | None:
    for step in range(1, last + 1):
        if rule.is_last(step) or (rule.needs_norm(step) and rule.add(norm(step))):
            return step
    return None


@pytest.mark.parametrize(("beta2", "window"), [(0.9, 10), (0.95, 20), (0.5, 2), (0.0, 1)])
@pytest.mark.parametrize("pace", [0.5, 2.0, 7.0])
def test_a_short_window_is_compared_at_every_step(beta2: float, window: int, pace: float) -> None:
    def norm(step: int) -> float:
        return 5 - 4 * math.exp(-step / (pace * window))

    expected = next(
        step for step in range(window + 1, 1000) if abs(norm(step) / norm(step - window) - 1) < 0.04
    )
    assert freeze_step_of(FreezeRule("auto", beta2), norm, 1000) == expected


def test_a_long_window_is_compared_at_twenty_steps() -> None:
    """The norm of a stationary gradient's variance grows as 1 - beta2^step."""
    rule, checks = FreezeRule("auto", 0.999), []

    def norm(step: int) -> float:
        checks.append(step)
        return 1 - 0.999**step

    end = freeze_step_of(rule, norm, 10_000)
    exact = next(s for s in range(1001, 10_000) if norm(s) / norm(s - 1000) < 1.04)
    assert end is not None
    assert exact <= end < exact + 50
    assert checks[: end // 50] == list(range(50, end + 1, 50))
    assert len(rule.norms) == 21


def test_an_unstable_or_absent_variance_is_not_frozen() -> None:
    for norm in (lambda step: 1.05**step, lambda step: 0.95**step, lambda step: 0.0):
        assert freeze_step_of(FreezeRule("auto", 0.9), norm, 100) is None


def test_a_fixed_step_needs_no_norm() -> None:
    rule = FreezeRule(7, 0.999)
    assert not any(map(rule.needs_norm, range(1, 100)))
    assert freeze_step_of(rule, lambda step: 1.0, 100) == 7


def test_a_restored_rule_decides_as_the_first_one() -> None:
    def norm(step: int) -> float:
        return 5 - 4 * math.exp(-step / 20)

    rule = FreezeRule("auto", 0.9)
    expected = freeze_step_of(rule, norm, 100)
    assert expected is not None
    first, second = FreezeRule("auto", 0.9), FreezeRule("auto", 0.9)
    assert freeze_step_of(first, norm, expected - 5) is None
    second.restore(first.norms)
    steps = range(expected - 4, expected + 1)
    assert [second.add(norm(step)) for step in steps] == [False] * 4 + [True]
