"""The engine against a list of bytes: every sample once and in order, whatever the sizes, capacity,
requests and the order of replies; counts against the pure model."""

from __future__ import annotations

from collections import deque

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from lightning_dlres.core.errors import ConfigError, StorageError
from lightning_dlres.prefetch.cache.exchange import BatchReply
from lightning_dlres.prefetch.cache.index import CacheIndex
from lightning_dlres.prefetch.cache.space.pinned import PinnedSamples
from lightning_dlres.prefetch.order.sequence import shuffled
from tests.support.engine_harness import Bench
from tests.support.examples import examples
from tests.support.prefetch_model import predict


def index_of(bench: Bench, epoch: int) -> CacheIndex:
    order = order_of(bench, epoch)
    ready = bench.engine._kept.ready
    return CacheIndex.build(order, bench.nodes, ready if len(ready) else None)


def order_of(bench: Bench, epoch: int) -> np.ndarray:
    order = shuffled(len(bench.sizes), 3, epoch)
    # As padding does it.
    return np.concatenate([order, order[: bench.padding]])


def run_epoch(
    bench: Bench, epoch: int, batch: int, ahead: int, held: int, choose: st.DataObject | None
) -> list[int]:
    """Consume an epoch with so many takes ahead and batches held; return the numbers."""
    index = index_of(bench, epoch)
    bench.engine.end(epoch - 1)
    bench.engine.begin(epoch, index, lambda number: index_of(bench, number))
    order = index.numbers
    cuts = [
        np.arange(a, min(a + batch, len(order)), dtype=np.uint32)
        for a in range(0, len(order), batch)
    ]
    seen: list[int] = []
    holding: deque[tuple[int, BatchReply]] = deque()
    asked = delivered = 0
    while delivered < len(cuts):
        while asked < len(cuts) and asked < delivered + ahead:
            bench.engine.take("rank 0", asked, epoch, cuts[asked])
            asked += 1
        bench.collect()
        got = bench.engine.deliveries()
        for delivery in got:
            assert delivery.take == delivered
            assert np.array_equal(delivery.numbers, order[cuts[delivered]])
            seen.extend(delivery.numbers.tolist())
            holding.append((delivered, delivery))
            delivered += 1
        for _, delivery in holding:
            bench.check(delivery)
        assert bench.space.end <= bench.capacity
        while len(holding) > held:
            number, delivery = holding.popleft()
            bench.check(delivery)
            bench.engine.release("rank 0", number)
        if got:
            continue
        bench.engine.work()
        bench.collect()
        if bench.open:
            bench.answer(choose.draw(st.integers(0, 50)) if choose else 0)
        elif bench.engine.blocked:
            assert bench.engine.relieve(), "nothing is under way and nothing can be done"
    for number, _ in holding:
        bench.engine.release("rank 0", number)
    return seen


@given(st.data())
@settings(max_examples=examples(120))
def test_every_sample_once_in_order_with_its_bytes(data: st.DataObject) -> None:
    sizes = np.array(data.draw(st.lists(st.integers(0, 60), min_size=1, max_size=80)), np.int64)
    capacity = data.draw(st.integers(max(1, int(sizes.max())), 3 * int(sizes.sum()) + 1))
    bench = Bench(
        sizes,
        nodes=data.draw(st.integers(1, 5)),
        capacity=capacity,
        prefetch=data.draw(st.integers(1, 12)),
        lookahead=data.draw(st.sampled_from([0, None, capacity, capacity // 2 + 1])),
        threshold=data.draw(st.floats(0.05, 1.0)),
        kept=data.draw(st.sampled_from([0, 0, 50, 10_000])),
        depth=data.draw(st.integers(1, 3)),
        padding=data.draw(st.sampled_from([0, 0, 1, 3])),
    )
    batch, held = data.draw(st.integers(1, 9)), data.draw(st.integers(0, 2))
    ahead = data.draw(st.integers(1, 3))
    for epoch in range(3):
        seen = run_epoch(bench, epoch, batch, ahead, held, data)
        assert sorted(set(seen)) == list(range(len(sizes)))
        assert seen == order_of(bench, epoch).tolist()
    assert bench.engine.counts.samples == 3 * len(seen)


@given(
    sizes=st.lists(st.integers(1, 60), min_size=1, max_size=120),
    room=st.floats(0, 1),
    nodes=st.integers(1, 5),
    prefetch=st.integers(1, 12),
    batch=st.integers(1, 9),
    threshold=st.floats(0.05, 1.0),
)
# There is room, but not in one piece.
@example([1, 1, 1, 1, 1, 3, 1, 1, 1, 1, 1, 1], 1 / 25, 1, 2, 5, 1.0)
@settings(max_examples=examples(150))
def test_without_look_ahead_the_counts_are_the_models(
    sizes: list[int], room: float, nodes: int, prefetch: int, batch: int, threshold: float
) -> None:
    sizes = np.array(sizes, np.int64)
    # From the largest sample alone to more than all.
    capacity = int(sizes.max()) + round(room * (2 * int(sizes.sum()) - int(sizes.max())))
    bench = Bench(sizes, nodes, capacity, prefetch, 0, threshold)
    run_epoch(bench, 0, batch, 1, 0, None)
    expected = predict(
        shuffled(len(sizes), 3, 0),
        sizes,
        nodes=nodes,
        prefetch=prefetch,
        capacity=capacity,
        batch=batch,
    )
    counts = bench.engine.counts
    assert (counts.samples, counts.hits, counts.requests, counts.requested_bytes) == (
        expected.samples,
        expected.hits,
        expected.requests,
        expected.requested_bytes,
    )
    assert counts.samples - counts.hits == counts.requests
    assert counts.requested_bytes == int(sizes.sum())
    if capacity >= int(sizes.sum()):
        per_node = np.bincount(np.arange(len(sizes)) % nodes, minlength=nodes)
        assert counts.requests == int((-(-per_node // prefetch)).sum())


def test_ahead_of_need_requests_are_full_where_there_is_room() -> None:
    sizes = np.full(1000, 10, np.int64)
    bench = Bench(sizes, nodes=4, capacity=4000, prefetch=16, lookahead=None)
    for epoch in range(3):
        run_epoch(bench, epoch, 8, 2, 1, None)
    # The look-ahead has gone on into the fourth epoch.
    assert bench.engine.counts.requested_samples >= 3000
    per_sample = bench.engine.counts.requests / bench.engine.counts.requested_samples
    assert per_sample <= 1.1 / 16


def test_what_is_kept_is_not_asked_for_again() -> None:
    sizes = np.full(100, 10, np.int64)
    bench = Bench(sizes, 2, 400, 8, None, kept=305)
    for epoch in range(2):
        run_epoch(bench, epoch, 5, 2, 1, None)
    kept = set(shuffled(100, 3, 0)[:30].tolist())
    assert bench.engine.counts.kept_hits == 30
    second = bench.asked[100:170]
    assert not kept.intersection(second)
    assert sorted([*second, *kept]) == list(range(100))


def test_an_epoch_can_be_given_up_while_samples_are_in_use_and_on_their_way() -> None:
    sizes = np.full(60, 10, np.int64)
    bench = Bench(sizes, 3, 200, 4, None)
    index = index_of(bench, 0)
    bench.engine.begin(0, index, lambda number: None)
    bench.engine.take("a", 0, 0, np.arange(4, dtype=np.uint32))
    deliveries: list[BatchReply] = []
    while not deliveries:
        bench.collect()
        bench.answer()
        deliveries = bench.engine.deliveries()
    bench.collect()
    assert bench.open, "there is look-ahead under way"
    bench.engine.end(0)
    old, bench.open = bench.open, []
    bench.engine.begin(1, index_of(bench, 1), lambda number: None)
    bench.check(deliveries[0])
    bench.open = old
    while bench.open:
        bench.answer()
    bench.space.compact_fully()
    assert bench.space.count == 4
    bench.check(deliveries[0])
    bench.engine.release("a", 0)
    bench.engine.end(1)
    assert sorted(run_epoch(bench, 2, 5, 2, 1, None)) == list(range(60))


def test_a_client_that_is_gone_holds_nothing() -> None:
    sizes = np.full(60, 10, np.int64)
    bench = Bench(sizes, 3, 200, 4, None)
    bench.engine.begin(0, index_of(bench, 0), lambda number: None)
    bench.engine.take("a", 0, 0, np.arange(4, dtype=np.uint32))
    bench.engine.take("a", 1, 0, np.arange(4, 8, dtype=np.uint32))
    while not bench.engine.deliveries():
        bench.collect()
        bench.answer()
    bench.engine.forget("a")
    assert bench.engine.in_use_bytes == 0
    bench.engine.take("b", 0, 0, np.arange(8, 12, dtype=np.uint32))
    deliveries: list[BatchReply] = []
    while not deliveries:
        bench.collect()
        bench.answer()
        deliveries = bench.engine.deliveries()
    assert deliveries[0].client == "b"


def test_a_take_that_cannot_be() -> None:
    bench = Bench(np.full(10, 10, np.int64), 1, 100, 4, None)
    with pytest.raises(ConfigError, match=r"epoch must be one under way, .* got 0"):
        bench.engine.take("a", 0, 0, np.arange(2, dtype=np.uint32))
    bench.engine.begin(0, index_of(bench, 0), lambda number: None)
    bench.engine.take("a", 0, 0, np.arange(2, dtype=np.uint32))
    for positions in ([1], [3, 3]):
        with pytest.raises(ConfigError, match="taken twice"):
            bench.engine.take("a", 1, 0, np.array(positions, np.uint32))
    with pytest.raises(ConfigError, match="must be below 10, got 10"):
        bench.engine.take("a", 1, 0, np.array([10], np.uint32))
    for argument in ({"prefetch": 0}, {"nodes": 0}, {"depth": 0}, {"lookahead": 101}):
        values = {"nodes": 1, "prefetch": 1, "lookahead": None, "depth": 1, **argument}
        with pytest.raises(ConfigError, match=next(iter(argument))):
            Bench(np.full(10, 10, np.int64), capacity=100, **values)


def test_pinned_samples_are_chosen_until_one_does_not_fit() -> None:
    kept = PinnedSamples(np.zeros(25, np.uint8), np.full(6, 10, np.int64))
    # After a resume the first epoch may be short, or empty.
    kept.choose(np.array([], np.uint32))
    kept.choose(np.array([4], np.uint32))
    kept.choose(np.array([5, 4, 0, 1], np.uint32))
    kept.put(np.array([0, 4, 5], np.uint32), np.arange(30, dtype=np.uint8))
    assert np.flatnonzero(kept.ready).tolist() == [4, 5]
    assert kept.offsets(np.array([4, 5], np.uint32)).tolist() == [0, 10]


def test_a_failed_request_fails_who_waits_and_is_asked_again_for_who_does_not() -> None:
    bench = Bench(np.full(12, 10, np.int64), nodes=1, capacity=400, prefetch=4, lookahead=None)
    index = index_of(bench, 0)
    bench.engine.begin(0, index, lambda _: None)
    bench.engine.take("rank 0", 0, 0, np.arange(2, dtype=np.uint32))
    bench.collect()
    first, second = bench.open.pop(0), bench.open.pop(0)
    bench.engine.fail(first.ticket, StorageError("it burns"))
    assert [(f.take, str(f.error)) for f in bench.engine.failures()] == [(0, "it burns")]
    # Nobody waits for these: they are asked for once more, and come.
    bench.engine.fail(second.ticket, StorageError("it burns"))
    assert bench.engine.failures() == []
    bench.engine.take("rank 0", 1, 0, np.arange(4, 6, dtype=np.uint32))
    bench.collect()
    again = next(request for request in bench.open if request.numbers[0] == index.numbers[4])
    assert again.numbers.tolist() == index.numbers[4:6].tolist()
    bench.answer(bench.open.index(again))
    (delivery,) = bench.engine.deliveries()
    bench.check(delivery)


def test_without_look_ahead_a_failed_request_fails_who_has_made_it() -> None:
    bench = Bench(np.full(12, 10, np.int64), nodes=1, capacity=400, prefetch=4, lookahead=0)
    bench.engine.begin(0, index_of(bench, 0), lambda _: None)
    bench.engine.take("rank 0", 0, 0, np.arange(2, dtype=np.uint32))
    bench.collect()
    bench.engine.fail(bench.open.pop().ticket, StorageError("it burns"))
    assert [failure.take for failure in bench.engine.failures()] == [0]
    bench.engine.take("rank 0", 1, 0, np.arange(2, 4, dtype=np.uint32))
    bench.collect()
    bench.answer()
    (delivery,) = bench.engine.deliveries()
    bench.check(delivery)
