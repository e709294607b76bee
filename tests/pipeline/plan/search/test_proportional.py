"""The proportional split is optimal, compared with every split."""

from __future__ import annotations

from itertools import combinations, pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_dlres.core.errors import ConfigError
from lightning_dlres.pipeline.plan.search.proportional import proportional_split
from tests.support.examples import examples

# Integers, and powers that divide exactly: the oracle compares sums without rounding.
work_lists = st.lists(st.integers(0, 20).map(float), min_size=1, max_size=9)
power_lists = st.lists(st.sampled_from([0.25, 0.5, 1.0, 2.0]), min_size=1, max_size=4)


def all_splits(layers: int, stages: int) -> list[tuple[int, ...]]:
    cuts = combinations(range(1, layers), stages - 1)
    return [tuple(b - a for a, b in pairwise((0, *cut, layers))) for cut in cuts]


def stage_times(split: tuple[int, ...], work: list[float], powers: list[float]) -> list[float]:
    bounds = [0]
    for count in split:
        bounds.append(bounds[-1] + count)
    return [sum(work[a:b]) / p for (a, b), p in zip(pairwise(bounds), powers, strict=True)]


def cost(split: tuple[int, ...], work: list[float], powers: list[float]) -> tuple[float, float]:
    times = stage_times(split, work, powers)
    return max(times), sum(t * t for t in times)


@settings(max_examples=examples(300))
@given(work_lists, power_lists)
def test_no_split_is_better(work: list[float], powers: list[float]) -> None:
    powers = powers[: len(work)]
    split = proportional_split(work, powers)
    assert sum(split) == len(work)
    assert len(split) == len(powers)
    assert min(split) >= 1
    seconds = work if any(work) else [1.0] * len(work)
    best = min(cost(other, seconds, powers) for other in all_splits(len(work), len(powers)))
    assert cost(split, seconds, powers) == best


@settings(max_examples=examples(100))
@given(
    st.lists(st.floats(1e-6, 1e3), min_size=2, max_size=8),
    st.lists(st.floats(0.05, 1.0), min_size=2, max_size=3),
)
def test_no_split_is_better_with_measured_numbers(work: list[float], powers: list[float]) -> None:
    powers = powers[: len(work)]
    slowest, _ = cost(proportional_split(work, powers), work, powers)
    for split in all_splits(len(work), len(powers)):
        assert slowest <= cost(split, work, powers)[0] * (1 + 1e-6)


def test_shares_follow_powers() -> None:
    assert proportional_split([1.0] * 12, [1.0, 0.5]) == (8, 4)
    assert proportional_split([1.0] * 12, [0.25, 0.5, 1.0, 0.25]) == (1, 3, 7, 1)
    assert proportional_split([0.0] * 4, [1.0, 1.0]) == (2, 2), "not measured: all equal"
    assert proportional_split([5.0, 1.0, 1.0, 1.0], [1.0, 1.0]) == (1, 3)
    assert proportional_split([1.0, 1.0], [1.0, 0.001]) == (1, 1), "every stage has a layer"


def test_two_hundred_layers_can_be_split() -> None:
    work = [1.0 + (i * 37 % 11) for i in range(200)]
    assert sum(proportional_split(work, [1.0, 0.5, 0.25] * 3)) == 200


@pytest.mark.parametrize(
    ("work", "powers", "words"),
    [
        ([1.0], [1.0, 1.0], r"at most the number of layers \(1\), got 2"),
        ([1.0, 1.0], [1.0, 0.0], "must be positive"),
        ([1.0, 1.0], [1.0, -1.0], "must be positive"),
        ([1.0, float("nan")], [1.0], "must be positive"),
        ([1.0, -1.0], [1.0], "must be positive"),
        ([1.0, 1.0], [float("nan")], "must be positive"),
        ([1.0, 1.0], [1.0, float("inf")], "must be positive and finite"),
    ],
)
def test_bad_arguments_are_refused(work: list[float], powers: list[float], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        proportional_split(work, powers)


@pytest.mark.parametrize(
    ("work", "powers"),
    [([1.0, float("inf")], [1.0, 1.0]), ([1e300] * 4, [1e-300, 1.0]), ([1.0], [])],
    ids=["infinite", "overflow", "no stage"],
)
def test_times_that_are_not_finite_are_refused(work: list[float], powers: list[float]) -> None:
    with pytest.raises(ConfigError):
        proportional_split(work, powers)
