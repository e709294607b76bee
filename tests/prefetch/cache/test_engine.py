"""Engine of the cache against a storage in memory.

Every sample of an epoch comes once, in order and with its bytes, whatever the sizes, the capacity
and the order of replies. Without look-ahead, the counts equal those of a slow model of the cache.
"""

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
from tests.support.engine_harness import EngineHarness
from tests.support.examples import examples
from tests.support.prefetch_model import predict


def index_of(harness: EngineHarness, epoch: int) -> CacheIndex:
    is_pinned = harness.pinned_samples.is_ready
    order = order_of(harness, epoch)
    return CacheIndex.build(order, harness.nodes, is_pinned if len(is_pinned) else None)


def order_of(harness: EngineHarness, epoch: int) -> np.ndarray:
    order = shuffled(len(harness.sizes), 3, epoch)
    return np.concatenate([order, order[: harness.padding]])


def slots(first: int, end: int) -> np.ndarray:
    return np.arange(first, end, dtype=np.uint32)


def run_epoch(
    harness: EngineHarness,
    epoch: int,
    *,
    batch: int,
    ahead: int,
    held: int,
    data: st.DataObject | None = None,
) -> list[int]:
    """Run through an epoch, and check every batch.

    Args:
        harness: Harness of the engine. The previous epoch is ended first.
        epoch: Number of the epoch.
        batch: Samples of a batch.
        ahead: Batch requests that wait at the same time.
        held: Batches that are in use at the same time.
        data: Chooses the fetch that is answered next. None: the oldest.

    Returns:
        The sample_id of each delivered sample, in order.
    """
    index = index_of(harness, epoch)
    harness.engine.end_epoch(epoch - 1)
    harness.engine.begin_epoch(epoch, index, lambda later: index_of(harness, later))
    order = index.sample_ids
    batches = [slots(at, min(at + batch, len(order))) for at in range(0, len(order), batch)]
    delivered_ids: list[int] = []
    in_use: deque[BatchReply] = deque()
    requested = delivered = 0
    while delivered < len(batches):
        while requested < len(batches) and requested < delivered + ahead:
            harness.engine.request_batch("rank 0", requested, epoch, batches[requested])
            requested += 1
        harness.collect_fetches()
        replies = harness.engine.pop_replies()
        for reply in replies:
            assert reply.request_id == delivered
            assert np.array_equal(reply.sample_ids, order[batches[delivered]])
            delivered_ids.extend(reply.sample_ids.tolist())
            in_use.append(reply)
            delivered += 1
        for reply in in_use:
            harness.check(reply)
        assert harness.space.end <= harness.capacity
        while len(in_use) > held:
            reply = in_use.popleft()
            harness.check(reply)
            harness.engine.release("rank 0", reply.request_id)
        if replies:
            continue
        harness.engine.advance_eviction()
        harness.collect_fetches()
        if harness.open_fetches:
            harness.answer(data.draw(st.integers(0, 50)) if data else 0)
        elif harness.engine.is_stalled:
            assert harness.engine.fetch_bypassing_cache(), "the engine is stalled for ever"
    for reply in in_use:
        harness.engine.release("rank 0", reply.request_id)
    return delivered_ids


def answer_until_delivered(harness: EngineHarness) -> list[BatchReply]:
    replies: list[BatchReply] = []
    while not replies:
        harness.collect_fetches()
        harness.answer()
        replies = harness.engine.pop_replies()
    return replies


@given(st.data())
@settings(max_examples=examples(120))
def test_every_sample_comes_once_in_order_with_its_bytes(data: st.DataObject) -> None:
    sizes = np.array(data.draw(st.lists(st.integers(0, 60), min_size=1, max_size=80)), np.int64)
    capacity = data.draw(st.integers(max(1, int(sizes.max())), 3 * int(sizes.sum()) + 1))
    harness = EngineHarness(
        sizes,
        nodes=data.draw(st.integers(1, 5)),
        capacity=capacity,
        prefetch=data.draw(st.integers(1, 12)),
        lookahead=data.draw(st.sampled_from([0, None, capacity, capacity // 2 + 1])),
        threshold=data.draw(st.floats(0.05, 1.0)),
        pinned=data.draw(st.sampled_from([0, 0, 50, 10_000])),
        max_inflight_requests=data.draw(st.integers(1, 3)),
        padding=data.draw(st.sampled_from([0, 0, 1, 3])),
    )
    batch, held = data.draw(st.integers(1, 9)), data.draw(st.integers(0, 2))
    ahead = data.draw(st.integers(1, 3))
    for epoch in range(3):
        delivered = run_epoch(harness, epoch, batch=batch, ahead=ahead, held=held, data=data)
        assert sorted(set(delivered)) == list(range(len(sizes)))
        assert delivered == order_of(harness, epoch).tolist()
    assert harness.engine.counts.samples == 3 * len(delivered)


@given(
    sizes=st.lists(st.integers(1, 60), min_size=1, max_size=120),
    spare=st.floats(0, 1),
    nodes=st.integers(1, 5),
    prefetch=st.integers(1, 12),
    batch=st.integers(1, 9),
    threshold=st.floats(0.05, 1.0),
)
# There is room, but it is not contiguous.
@example([1, 1, 1, 1, 1, 3, 1, 1, 1, 1, 1, 1], 1 / 25, 1, 2, 5, 1.0)
@settings(max_examples=examples(150))
def test_counts_without_lookahead_equal_the_predicted_ones(
    sizes: list[int], spare: float, nodes: int, prefetch: int, batch: int, threshold: float
) -> None:
    sizes = np.array(sizes, np.int64)
    # From the largest sample alone to more than all samples.
    capacity = int(sizes.max()) + round(spare * (2 * int(sizes.sum()) - int(sizes.max())))
    harness = EngineHarness(
        sizes,
        nodes=nodes,
        capacity=capacity,
        prefetch=prefetch,
        lookahead=0,
        threshold=threshold,
    )
    run_epoch(harness, 0, batch=batch, ahead=1, held=0)
    expected = predict(
        shuffled(len(sizes), 3, 0),
        sizes,
        nodes=nodes,
        prefetch=prefetch,
        capacity=capacity,
        batch=batch,
    )
    counts = harness.engine.counts
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


def test_prefetches_are_full_if_there_is_room() -> None:
    sizes = np.full(1000, 10, np.int64)
    harness = EngineHarness(sizes, nodes=4, capacity=4000, prefetch=16, lookahead=None)
    for epoch in range(3):
        run_epoch(harness, epoch, batch=8, ahead=2, held=1)
    # The prefetch has reached into the fourth epoch.
    assert harness.engine.counts.requested_samples >= 3000
    per_sample = harness.engine.counts.requests / harness.engine.counts.requested_samples
    assert per_sample <= 1.1 / 16


def test_pinned_samples_are_not_fetched_again() -> None:
    sizes = np.full(100, 10, np.int64)
    harness = EngineHarness(sizes, nodes=2, capacity=400, prefetch=8, lookahead=None, pinned=305)
    for epoch in range(2):
        run_epoch(harness, epoch, batch=5, ahead=2, held=1)
    pinned = set(shuffled(100, 3, 0)[:30].tolist())
    assert harness.engine.counts.pinned_hits == 30
    second = harness.fetched_ids[100:170]
    assert not pinned.intersection(second)
    assert sorted([*second, *pinned]) == list(range(100))


def test_an_epoch_can_be_aborted_while_samples_are_in_use_and_in_flight() -> None:
    sizes = np.full(60, 10, np.int64)
    harness = EngineHarness(sizes, nodes=3, capacity=200, prefetch=4, lookahead=None)
    harness.engine.begin_epoch(0, index_of(harness, 0), lambda _: None)
    harness.engine.request_batch("a", 0, 0, slots(0, 4))
    (reply,) = answer_until_delivered(harness)
    harness.collect_fetches()
    assert harness.open_fetches, "prefetches are in flight"
    harness.engine.end_epoch(0)
    old_fetches, harness.open_fetches = harness.open_fetches, []
    harness.engine.begin_epoch(1, index_of(harness, 1), lambda _: None)
    harness.check(reply)
    harness.open_fetches = old_fetches
    while harness.open_fetches:
        harness.answer()
    harness.space.compact_fully()
    assert harness.space.num_entries == 4
    harness.check(reply)
    harness.engine.release("a", 0)
    harness.engine.end_epoch(1)
    delivered = run_epoch(harness, 2, batch=5, ahead=2, held=1)
    assert sorted(delivered) == list(range(60))


def test_a_forgotten_client_holds_nothing() -> None:
    sizes = np.full(60, 10, np.int64)
    harness = EngineHarness(sizes, nodes=3, capacity=200, prefetch=4, lookahead=None)
    harness.engine.begin_epoch(0, index_of(harness, 0), lambda _: None)
    harness.engine.request_batch("a", 0, 0, slots(0, 4))
    harness.engine.request_batch("a", 1, 0, slots(4, 8))
    answer_until_delivered(harness)
    harness.engine.forget_client("a")
    assert harness.engine.in_use_bytes == 0
    harness.engine.request_batch("b", 0, 0, slots(8, 12))
    assert answer_until_delivered(harness)[0].client == "b"


def test_wrong_batch_requests_and_arguments_are_refused() -> None:
    harness = EngineHarness(
        np.full(10, 10, np.int64), nodes=1, capacity=100, prefetch=4, lookahead=None
    )
    with pytest.raises(ConfigError, match=r"epoch_id must be one of the open epochs, .* got 0"):
        harness.engine.request_batch("a", 0, 0, slots(0, 2))
    harness.engine.begin_epoch(0, index_of(harness, 0), lambda _: None)
    harness.engine.request_batch("a", 0, 0, slots(0, 2))
    for repeated in ([1], [3, 3]):
        with pytest.raises(ConfigError, match="must each be requested once"):
            harness.engine.request_batch("a", 1, 0, np.array(repeated, np.uint32))
    with pytest.raises(ConfigError, match="must be below 10, got 10"):
        harness.engine.request_batch("a", 1, 0, slots(10, 11))
    for wrong in ({"prefetch": 0}, {"nodes": 0}, {"max_inflight_requests": 0}, {"lookahead": 101}):
        arguments = {"nodes": 1, "prefetch": 1, "lookahead": None, **wrong}
        with pytest.raises(ConfigError, match=next(iter(wrong))):
            EngineHarness(np.full(10, 10, np.int64), capacity=100, **arguments)


def test_pinned_samples_are_chosen_until_one_does_not_fit() -> None:
    pinned = PinnedSamples(np.zeros(25, np.uint8), np.full(6, 10, np.int64))
    # After a resume the first epoch may be short, or empty.
    pinned.choose(np.array([], np.uint32))
    pinned.choose(np.array([4], np.uint32))
    pinned.choose(np.array([5, 4, 0, 1], np.uint32))
    pinned.put(np.array([0, 4, 5], np.uint32), np.arange(30, dtype=np.uint8))
    assert np.flatnonzero(pinned.is_ready).tolist() == [4, 5]
    assert pinned.offsets(np.array([4, 5], np.uint32)).tolist() == [0, 10]


def test_a_failed_fetch_fails_waiting_requests_and_is_repeated_for_later_ones() -> None:
    harness = EngineHarness(
        np.full(12, 10, np.int64), nodes=1, capacity=400, prefetch=4, lookahead=None
    )
    index = index_of(harness, 0)
    harness.engine.begin_epoch(0, index, lambda _: None)
    harness.engine.request_batch("rank 0", 0, 0, slots(0, 2))
    harness.collect_fetches()
    first, second = harness.open_fetches.pop(0), harness.open_fetches.pop(0)
    harness.engine.fail(first.fetch_id, StorageError("disk error"))
    failures = harness.engine.pop_failures()
    assert [(f.request_id, str(f.error)) for f in failures] == [(0, "disk error")]
    # No request waits for these samples: they are fetched once more, and come.
    harness.engine.fail(second.fetch_id, StorageError("disk error"))
    assert harness.engine.pop_failures() == []
    harness.engine.request_batch("rank 0", 1, 0, slots(4, 6))
    harness.collect_fetches()
    repeated = next(f for f in harness.open_fetches if f.sample_ids[0] == index.sample_ids[4])
    assert repeated.sample_ids.tolist() == index.sample_ids[4:6].tolist()
    harness.answer(harness.open_fetches.index(repeated))
    (reply,) = harness.engine.pop_replies()
    harness.check(reply)


def test_without_lookahead_a_failed_fetch_fails_the_request_that_missed() -> None:
    harness = EngineHarness(
        np.full(12, 10, np.int64), nodes=1, capacity=400, prefetch=4, lookahead=0
    )
    harness.engine.begin_epoch(0, index_of(harness, 0), lambda _: None)
    harness.engine.request_batch("rank 0", 0, 0, slots(0, 2))
    harness.collect_fetches()
    harness.engine.fail(harness.open_fetches.pop().fetch_id, StorageError("disk error"))
    assert [failure.request_id for failure in harness.engine.pop_failures()] == [0]
    harness.engine.request_batch("rank 0", 1, 0, slots(2, 4))
    harness.collect_fetches()
    harness.answer()
    (reply,) = harness.engine.pop_replies()
    harness.check(reply)
