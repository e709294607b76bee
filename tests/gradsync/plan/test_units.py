"""Partitions cover their gradient, and owners follow their shares."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_dlres.core.errors import ConfigError
from lightning_dlres.gradsync.plan.plan import RAW, CodecChoice, make_plan
from lightning_dlres.gradsync.plan.shares import link_shares
from lightning_dlres.gradsync.plan.units import GradientSpec, assign_owners, cut, partitions_for


@settings(deadline=None)
@given(st.integers(0, 1000), st.integers(1, 9), st.integers(1, 64))
def test_partitions_cover_a_gradient(count: int, partitions: int, alignment: int) -> None:
    bounds = cut(count, partitions, alignment)
    assert 1 <= len(bounds) <= partitions
    assert [bounds[0][0], bounds[-1][1]] == [0, count]
    assert all(left[1] == right[0] for left, right in itertools.pairwise(bounds))
    assert all(start % alignment == 0 for start, _ in bounds)
    sizes = [stop - start for start, stop in bounds]
    assert max(sizes) - min(sizes) < 2 * alignment
    assert count == 0 or min(sizes) > 0


@settings(deadline=None)
@given(
    st.lists(st.integers(0, 50), max_size=5),
    st.lists(st.sampled_from([0.0, 0.5, 1.0, 3.0]), min_size=1, max_size=3).filter(any),
)
def test_owners_are_near_the_best_assignment(sizes: list[int], shares: list[float]) -> None:
    def time(owners: tuple[int, ...]) -> float:
        sums = [0.0] * len(shares)
        for owner, size in zip(owners, sizes, strict=True):
            sums[owner] += max(size, 1)
        return max(
            total / share if share else (float("inf") if total else 0.0)
            for total, share in zip(sums, shares, strict=True)
        )

    owners = assign_owners(sizes, shares)
    best = min(map(time, itertools.product(range(len(shares)), repeat=len(sizes))))
    # The bound of Gonzalez, Ibarra and Sahni (1977) for machines of different speeds is 2.
    assert time(tuple(owners)) <= 2 * best


def test_shares_without_a_positive_one_are_refused() -> None:
    with pytest.raises(ConfigError, match="shares must be at least 0, and one above 0"):
        assign_owners([1], [0.0, 0.0])


@settings(deadline=None)
@given(st.lists(st.sampled_from([1.0, 2.0, 4.0, 10.0]), min_size=3, max_size=3))
def test_link_shares_are_the_best_of_a_grid(bandwidths: list[float]) -> None:
    def time(shares: list[float]) -> float:
        # A rank sends the shares of the others, and its own sum to all others.
        return max(
            (1 + (len(shares) - 2) * share) / bandwidth
            for share, bandwidth in zip(shares, bandwidths, strict=True)
        )

    shares, seconds = link_shares(bandwidths)
    assert sum(shares) == pytest.approx(1)
    assert min(shares) >= 0
    assert time(shares) == pytest.approx(seconds)
    grid = [time([a / 20, b / 20, (20 - a - b) / 20]) for a in range(21) for b in range(21 - a)]
    assert seconds <= min(grid) + 1e-9


@settings(deadline=None)
@given(st.lists(st.floats(1e3, 1e10), min_size=1, max_size=6))
def test_link_shares_can_be_given_to_owners(bandwidths: list[float]) -> None:
    """Rounding leaves no share below 0."""
    shares, _ = link_shares(bandwidths)
    assert min(shares) >= 0
    assert len(assign_owners([5, 3, 1], shares)) == 3


def test_one_slow_link_of_four_owns_nothing() -> None:
    shares, seconds = link_shares([25e6, 25e6, 25e6, 6.25e6])
    assert shares == pytest.approx([1 / 3, 1 / 3, 1 / 3, 0])
    # With equal shares, the slow link sends 3/4 of the bytes, and its own quarter to 3 ranks.
    seconds_of_equal_shares = (3 / 4 + 3 / 4) / 6.25e6
    assert seconds_of_equal_shares / seconds == pytest.approx(1.5)


@pytest.mark.parametrize("bandwidths", [[], [1.0, 0.0], [1.0, -2.0]])
def test_links_without_bandwidth_are_refused(bandwidths: list[float]) -> None:
    with pytest.raises(ConfigError, match="bandwidths must be positive numbers"):
        link_shares(bandwidths)


def test_a_plan_cuts_gradients_and_balances_owners() -> None:
    gradients = [GradientSpec(name="a", count=100), GradientSpec(name="b", count=10)]
    choices = [CodecChoice(codec="tbq", partitions=3), CodecChoice(codec=RAW, partitions=1)]
    plan = make_plan(gradients, choices, world_size=3, topology="ps", alignment=10)
    assert [(u.index, u.gradient, u.start, u.stop, u.codec) for u in plan.units] == [
        (0, "a", 0, 30, "tbq"),
        (1, "a", 30, 60, "tbq"),
        (2, "a", 60, 100, "tbq"),
        (3, "b", 0, 10, "raw"),
    ]
    assert sorted(unit.owner for unit in plan.units_of("a")) == [0, 1, 2]


@settings(deadline=None)
@given(st.lists(st.integers(0, 10_000), min_size=1, max_size=8), st.integers(1, 5))
def test_only_large_gradients_are_cut(counts: list[int], world_size: int) -> None:
    total = sum(counts)
    for count in counts:
        partitions = partitions_for(count, total, world_size)
        assert 1 <= partitions <= world_size
        assert partitions == 1 or count > total // (4 * world_size)
    if len(counts) == 1 and total >= 4 * world_size:
        assert partitions_for(total, total, world_size) == world_size
