"""Kinds, powers and filled-in times of devices, by hand and for random times."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_dlres.pipeline.profile.device_kinds import (
    fill_missing_times,
    kinds_of,
    powers_of,
    times_of_kinds,
)


def test_a_rank_of_half_the_speed_has_half_the_power() -> None:
    assert powers_of([[1.0, 2.0, 3.0], [2.0, 4.0, 6.0]]) == [1.0, 0.5]
    assert powers_of([[4.0, 8.0], [1.0, 2.0], [2.0, 4.0]]) == [0.25, 1.0, 0.5]
    assert powers_of([[0.5, 0.25]]) == [1.0]


def test_one_disturbed_layer_changes_no_power() -> None:
    assert powers_of([[1.0, 1.0, 1.0], [2.0, 50.0, 2.0]]) == [1.0, 0.5]
    assert powers_of([[1.0, 1.0, 90.0], [2.0, 2.0, 2.0], [1.0, 1.0, 1.0]]) == [1.0, 0.5, 1.0]


def test_layers_without_measurable_time_do_not_count() -> None:
    assert powers_of([[0.0, 1.0, 1.0], [0.0, 2.0, 2.0]]) == [1.0, 0.5]
    assert powers_of([[0.0, 0.0], [0.0, 0.0]]) == [1.0, 1.0]


@given(
    st.lists(st.floats(1e-5, 10.0), min_size=1, max_size=6),
    st.lists(st.sampled_from([1.0, 2.0, 4.0, 8.0]), min_size=1, max_size=4),
)
def test_powers_are_the_inverse_of_slowdowns(layers: list[float], slowdowns: list[float]) -> None:
    fastest = min(slowdowns)
    powers = powers_of([[seconds * s for seconds in layers] for s in slowdowns])
    assert powers == pytest.approx([fastest / s for s in slowdowns])
    assert max(powers) == 1.0


def test_a_missing_time_is_that_of_other_ranks_times_the_slowdown() -> None:
    nan = float("nan")
    assert fill_missing_times([[1.0, 2.0, 8.0], [2.0, 4.0, nan]]) == [
        [1.0, 2.0, 8.0],
        [2.0, 4.0, 16.0],
    ]
    assert fill_missing_times([[1.0, nan], [nan, 3.0]]) == [[1.0, 3.0], [1.0, 3.0]]
    rows = [[1.0, 10.0], [1.0, 12.0], [1.0, 11.0], [3.0, nan]]
    assert fill_missing_times(rows)[3] == [3.0, 33.0]
    assert fill_missing_times([[1.0, 2.0, nan], [nan, nan, nan]]) == [
        [1.0, 2.0, 2.0],
        [1.0, 2.0, 1.0],
    ]


def test_noise_makes_no_kinds() -> None:
    names = ["cpu"] * 4
    assert kinds_of(names, [[1.0, 1.0], [1.1, 1.05], [0.98, 1.0], [4.0, 4.0]]) == [0, 0, 0, 1]
    assert kinds_of(["cpu", "cuda", "cpu", "cpu"], [[1.0], [1.0], [1.0], [2.0]]) == [0, 1, 0, 2]


@given(st.lists(st.floats(0.95, 1.05), min_size=1, max_size=8))
def test_equal_devices_are_one_kind_with_any_noise(noise: list[float]) -> None:
    assert set(kinds_of(["cpu"] * len(noise), [[x, 2 * x] for x in noise])) == {0}


def test_the_time_of_a_kind_is_the_median_of_its_devices() -> None:
    rows = [[1.0, 2.0], [3.0, 2.2], [1.1, 2.1], [8.0, 8.0]]
    assert times_of_kinds([0, 0, 0, 1], rows) == [[1.1, 2.1], [8.0, 8.0]]
