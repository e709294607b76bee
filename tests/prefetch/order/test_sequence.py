"""Order of an epoch and its shards: stable permutations, and each sample assigned once."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_dlres.core.errors import ConfigError
from lightning_dlres.prefetch.order.sequence import ShardSpec, shuffled
from tests.support.examples import examples


def test_orders_never_change_because_checkpoints_depend_on_them() -> None:
    assert shuffled(10, 0, 0).tolist() == [4, 7, 0, 5, 9, 3, 6, 2, 8, 1]
    assert shuffled(10, 42, 7).tolist() == [6, 4, 5, 3, 9, 7, 2, 1, 8, 0]


@given(st.integers(0, 300), st.integers(-(2**70), 2**70), st.integers(0, 10**6))
@settings(max_examples=examples(50))
def test_every_order_is_a_permutation(count: int, seed: int, epoch: int) -> None:
    order = shuffled(count, seed, epoch)
    assert sorted(order.tolist()) == list(range(count))
    assert np.array_equal(order, shuffled(count, seed, epoch))


def test_all_orders_are_equally_likely_and_differ_between_epochs_and_seeds() -> None:
    assert shuffled(100, 1, 0).tolist() != shuffled(100, 1, 1).tolist()
    assert shuffled(100, 1, 1).tolist() != shuffled(100, 2, 0).tolist()
    orders = [tuple(shuffled(3, seed, 5).tolist()) for seed in range(6000)]
    counts = [orders.count(order) for order in set(orders)]
    assert len(counts) == 6
    # Five standard deviations of a binomial with 6000 draws and probability 1/6.
    assert all(abs(count - 1000) < 5 * (6000 * 5 / 36) ** 0.5 for count in counts)


@given(st.data())
@settings(max_examples=examples(200))
def test_each_sample_is_assigned_once_when_restarts_change_the_ranks(data: st.DataObject) -> None:
    samples = data.draw(st.integers(1, 200))
    order = shuffled(samples, 1, 1)
    consumed, seen = 0, []
    while consumed < samples:
        shards = ShardSpec(
            samples,
            consumed,
            data.draw(st.integers(1, 5)),
            data.draw(st.integers(1, 9)),
            "uneven",
        )
        assigned = shards.sample_ids(order, tuple(range(shards.ranks)))
        most_steps = max(shards.num_batches(rank) for rank in range(shards.ranks))
        steps = data.draw(st.integers(1, most_steps))
        for rank in range(shards.ranks):
            own = shards.sample_ids(order, (rank,))
            assert len(own) == shards.num_samples(rank)
            assert np.array_equal(own, assigned[rank :: shards.ranks])
            seen.extend(own[: steps * shards.batch].tolist())
        consumed = shards.consumed_after(steps)
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
def test_each_tail_rule_assigns_the_right_number_of_samples(
    samples: int, consumed: int, ranks: int, batch: int, tail: str
) -> None:
    consumed = min(consumed, samples)
    shards = ShardSpec(samples, consumed, ranks, batch, tail)  # type: ignore[arg-type]
    order = shuffled(samples, 0, 0)
    assigned = shards.sample_ids(order, tuple(range(ranks)))
    left = samples - consumed
    counts = {shards.num_samples(rank) for rank in range(ranks)}
    assert (
        sum(shards.num_samples(rank) for rank in range(ranks))
        == len(assigned)
        == shards.num_assigned
    )
    if tail == "drop":
        assert len(counts) == 1
        assert counts.pop() % batch == 0
        assert left - ranks * batch < len(assigned) <= left
    elif tail == "pad":
        assert len(counts) == 1
        assert left <= len(assigned) < left + ranks
        assert set(order[consumed:].tolist()) <= set(assigned.tolist())
    else:
        assert len(assigned) == left
        assert max(counts) - min(counts) <= 1
    if len(assigned) <= left:
        assert np.array_equal(assigned, order[consumed : consumed + len(assigned)])
    even_ranks = tuple(range(0, ranks, 2))
    interleaved = shards.sample_ids(order, even_ranks)
    for at, rank in enumerate(even_ranks):
        own = shards.sample_ids(order, (rank,))
        assert np.array_equal(interleaved[at :: len(even_ranks)], own)


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
def test_values_out_of_range_are_refused(arguments: dict[str, object], word: str) -> None:
    with pytest.raises(ConfigError, match=word):
        ShardSpec(**arguments)  # type: ignore[arg-type]
