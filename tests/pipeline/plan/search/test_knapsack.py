"""The knapsack finds the cheapest set that frees enough, compared with all sets."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import combinations

from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_dlres.pipeline.plan.search.knapsack import (
    RELATIVE_GAP,
    cheapest_cover,
    cheapest_covers,
)
from tests.support.examples import examples

seconds = st.one_of(st.integers(0, 6).map(float), st.floats(0.0, 10.0))
items = st.lists(st.tuples(seconds, st.integers(-3, 12)), max_size=9)
# Layers of equal cost per byte are the hard case: no order by cost per byte helps.
proportional = st.lists(st.integers(-3, 12).map(lambda size: (abs(size) / 4, size)), max_size=9)


def brute_force(items: list[tuple[float, int]], need: int) -> float | None:
    sets = (chosen for n in range(len(items) + 1) for chosen in combinations(items, n))
    enough = [sum(s for s, _ in chosen) for chosen in sets if sum(b for _, b in chosen) >= need]
    return min(enough, default=None)


@settings(max_examples=examples(400))
@given(st.one_of(items, proportional), st.integers(-2, 50))
def test_no_set_is_cheaper(items: list[tuple[float, int]], need: int) -> None:
    chosen = cheapest_cover([s for s, _ in items], [b for _, b in items], need)
    cheapest = brute_force(items, need)
    if chosen is None:
        assert cheapest is None
        return
    assert cheapest is not None
    assert list(chosen) == sorted(set(chosen))
    assert all(items[index][1] > 0 for index in chosen)
    assert sum(items[index][1] for index in chosen) >= need
    assert sum(items[index][0] for index in chosen) <= cheapest * (1 + 1.1 * RELATIVE_GAP) + 1e-12


def test_covers_by_hand() -> None:
    assert cheapest_cover([], [], 0) == ()
    assert cheapest_cover([], [], 1) is None
    assert cheapest_cover([1.0, 1.0], [3, 4], 8) is None
    assert cheapest_cover([1.0, 1.0], [3, 4], 7) == (0, 1)
    assert cheapest_cover([1.0, 1.0], [3, 4], 0) == (), "nothing needs to be recomputed"
    assert cheapest_cover([1.0, 1.0, 1.5], [3, 4, 7], 6) == (2,), "one item for two cheap ones"
    assert cheapest_cover([1.0, 2.5, 1.5], [3, 7, 4], 7) in ((1,), (0, 2))


def test_a_layer_that_frees_nothing_is_never_chosen() -> None:
    assert cheapest_cover([0.0, 5.0], [0, 9], 9) == (1,)
    assert cheapest_cover([0.0, 5.0], [-2, 9], 9) == (1,)


def test_many_layers_of_equal_cost_per_byte_are_solved() -> None:
    # Without a bound, the list of undominated sets doubles with each of them.
    freed = [1_000_003 + 7919 * (index * index % 61) for index in range(48)]
    chosen = cheapest_cover([size * 1e-9 for size in freed], freed, need := sum(freed) * 3 // 5)
    assert chosen is not None
    assert need <= sum(freed[index] for index in chosen) <= need * (1 + 1.1 * RELATIVE_GAP)


@settings(max_examples=examples(100))
@given(st.lists(st.tuples(seconds, seconds, st.integers(-3, 12)), max_size=8), st.integers(1, 50))
def test_no_set_is_cheaper_for_two_devices(
    items: list[tuple[float, float, int]], need: int
) -> None:
    covers = cheapest_covers(
        [[a for a, _, _ in items], [b for _, b, _ in items]], [*_freed(items)], need
    )
    spent = [_spent([items[index] for index in chosen]) for chosen in covers]
    for chosen in covers:
        assert list(chosen) == sorted(set(chosen))
        assert sum(items[index][2] for index in chosen) >= need
    for count in range(len(items) + 1):
        for chosen in combinations(items, count):
            if sum(_freed(chosen)) >= need:
                a, b = _spent(chosen)
                assert any(x <= a + 1e-9 and y <= b + 1e-9 for x, y in spent)


def test_devices_with_different_cheapest_sets_get_both() -> None:
    # Either layer frees enough, and each is cheap on one device.
    assert set(cheapest_covers([[1.0, 9.0], [9.0, 1.0]], [5, 5], 5)) == {(0,), (1,)}
    assert cheapest_covers([[1.0, 9.0], [2.0, 8.0]], [5, 5], 5) == [(0,)]
    assert cheapest_covers([[1.0, 9.0], [2.0, 8.0]], [5, 5], 11) == []


def _freed(items: Iterable[tuple[float, float, int]]) -> Iterable[int]:
    return (size for _, _, size in items)


def _spent(items: Iterable[tuple[float, float, int]]) -> tuple[float, float]:
    return sum(a for a, _, _ in items), sum(b for _, b, _ in items)
