"""Lines through two measurements never have negative costs."""

from __future__ import annotations

import pytest

from lightning_dlres.gradsync.profile.linear_fit import linear_cost


def test_a_line_passes_both_points() -> None:
    cost = linear_cost((10, 3.0), (30, 7.0))
    assert cost.seconds(10) == pytest.approx(3.0)
    assert cost.seconds(30) == pytest.approx(7.0)


def test_a_task_that_does_not_grow_has_only_a_fixed_time() -> None:
    cost = linear_cost((10, 3.0), (30, 2.5))
    assert cost.fixed_seconds == 3.0
    assert cost.seconds_per_item == 0.0


def test_a_fixed_time_is_never_negative() -> None:
    cost = linear_cost((10, 1.0), (30, 9.0))
    assert cost.fixed_seconds == 0.0
    assert cost.seconds(30) == pytest.approx(9.0)
