"""The order of an epoch and its dealing: permutations that never change, and every sample once
whatever the ranks and restarts."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_dlres.core.errors import ConfigError
from lightning_dlres.prefetch.cache.index import CacheIndex
from lightning_dlres.prefetch.order.sequence import ShardSpec, shuffled
from tests.support.examples import examples


def test_the_order_is_what_it_always_was() -> None:
    # Checkpoints of earlier versions go on with these.
    assert shuffled(10, 0, 0).tolist() == [4, 7, 0, 5, 9, 3, 6, 2, 8, 1]
    assert shuffled(10, 42, 7).tolist() == [6, 4, 5, 3, 9, 7, 2, 1, 8, 0]


@given(st.integers(0, 300), st.integers(-(2**70), 2**70), st.integers(0, 10**6))
@settings(max_examples=examples(50))
def test_every_order_is_a_permutation(count: int, seed: int, epoch: int) -> None:
    order = shuffled(count, seed, epoch)
    assert sorted(order.tolist()) == list(range(count))
    assert np.array_equal(order, shuffled(count, seed, epoch))


def test_orders_differ_and_every_one_is_as_likely() -> None:
    assert shuffled(100, 1, 0).tolist() != shuffled(100, 1, 1).tolist()
    assert shuffled(100, 1, 1).tolist() != shuffled(100, 2, 0).tolist()
    found = [tuple(shuffled(3, seed, 5).tolist()) for seed in range(6000)]
    counts = [found.count(order) for order in set(found)]
    assert len(counts) == 6
    # Five standard deviations of a binomial with 6000 draws and probability 1/6.
    assert all(abs(count - 1000) < 5 * (6000 * 5 / 36) ** 0.5 for count in counts)


@given(st.data())
@settings(max_examples=examples(200))
def test_along_restarts_with_other_ranks_every_sample_is_dealt_once(data: st.DataObject) -> None:
    samples = data.draw(st.integers(1, 200))
    order = shuffled(samples, 1, 1)
    consumed, seen = 0, []
    while consumed < samples:
        deal = ShardSpec(
            samples,
            consumed,
            data.draw(st.integers(1, 5)),
            data.draw(st.integers(1, 9)),
            "uneven",
        )
        every = deal.sample_ids(order, tuple(range(deal.ranks)))
        most = max(deal.num_batches(rank) for rank in range(deal.ranks))
        steps = data.draw(st.integers(1, most))
        for rank in range(deal.ranks):
            mine = deal.sample_ids(order, (rank,))
            assert len(mine) == deal.num_samples(rank)
            assert np.array_equal(mine, every[rank :: deal.ranks])
            seen.extend(mine[: steps * deal.batch].tolist())
        consumed = deal.consumed_after(steps)
        assert sorted(seen) == sorted(order[:consumed].tolist())
    assert sorted(seen) == list(range(samples))


@given(
    st.integers(1, 100),
    st.integers(0, 100),
    st.integers(1, 7),
    st.integers(1, 9),
    st.sampled_from(["drop", "pad", "uneven"]),
)
@settings(max_examples=examples(200))
def test_the_tails(samples: int, consumed: int, ranks: int, batch: int, tail: str) -> None:
    consumed = min(consumed, samples)
    deal = ShardSpec(samples, consumed, ranks, batch, tail)  # type: ignore[arg-type]
    order = shuffled(samples, 0, 0)
    dealt = deal.sample_ids(order, tuple(range(ranks)))
    left = samples - consumed
    counts = {deal.num_samples(rank) for rank in range(ranks)}
    assert sum(deal.num_samples(rank) for rank in range(ranks)) == len(dealt) == deal.num_assigned
    if tail == "drop":
        assert len(counts) == 1
        assert counts.pop() % batch == 0
        assert left - ranks * batch < len(dealt) <= left
    elif tail == "pad":
        assert len(counts) == 1
        assert left <= len(dealt) < left + ranks
        assert set(order[consumed:].tolist()) <= set(dealt.tolist())
    else:
        assert len(dealt) == left
        assert max(counts) - min(counts) <= 1
    if len(dealt) <= left:
        assert np.array_equal(dealt, order[consumed : consumed + len(dealt)])
    some = tuple(range(0, ranks, 2))
    mine = deal.sample_ids(order, some)
    for at, rank in enumerate(some):
        own = deal.sample_ids(order, (rank,))
        assert np.array_equal(mine[at :: len(some)], own)


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        ({"samples": -1}, "samples"),
        ({"samples": 2**31}, "samples"),
        ({"samples": 3, "consumed": 4}, "consumed"),
        ({"samples": 3, "ranks": 0}, "ranks"),
        ({"samples": 3, "batch": 0}, "batch"),
        ({"samples": 3, "tail": "cut"}, "tail.*drop.*pad.*uneven"),
    ],
)
def test_bad_values(arguments: dict[str, object], word: str) -> None:
    with pytest.raises(ConfigError, match=word):
        ShardSpec(**arguments)  # type: ignore[arg-type]


@given(st.integers(0, 200), st.integers(1, 7), st.booleans())
@settings(max_examples=examples(60))
def test_lists_hold_what_is_on_their_node_in_order(samples: int, nodes: int, kept: bool) -> None:
    numbers = shuffled(samples, 5, 5)
    flags = (np.arange(samples) % 3 == 0) if kept else None
    index = CacheIndex.build(numbers, nodes, flags)
    for node in range(nodes):
        mine = index.lists[index.starts[node] : index.starts[node + 1]].tolist()
        expected = [
            position
            for position, number in enumerate(numbers.tolist())
            if number % nodes == node and not (kept and number % 3 == 0)
        ]
        assert mine == expected


def test_no_nodes() -> None:
    with pytest.raises(ConfigError, match="nodes"):
        CacheIndex.build(shuffled(3, 0, 0), 0)
