"""Memory for management: a million samples cost bytes in arrays, and no objects."""

from __future__ import annotations

import gc

import numpy as np

from lightning_dlres.prefetch.cache.engine import PrefetchEngine
from lightning_dlres.prefetch.cache.index import CacheIndex
from lightning_dlres.prefetch.cache.space.cache_space import CacheSpace
from lightning_dlres.prefetch.cache.space.pinned import PinnedSamples
from lightning_dlres.prefetch.order.sequence import shuffled

SAMPLES, NODES, BATCH = 1_000_000, 8, 256


def test_a_million_samples_need_few_bytes_and_no_objects() -> None:
    sizes = np.random.default_rng(0).integers(0, 5, SAMPLES)
    space = CacheSpace(np.zeros(100_000, np.uint8), SAMPLES)
    pinned = PinnedSamples(np.zeros(1000, np.uint8), sizes)
    gc.collect()
    objects_before = len(gc.get_objects())
    engine = PrefetchEngine(sizes, NODES, space, pinned)

    def index_of(epoch: int) -> CacheIndex:
        return CacheIndex.build(shuffled(SAMPLES, 0, epoch), NODES, pinned.is_ready)

    engine.begin_epoch(0, index_of(0), index_of)
    order = shuffled(SAMPLES, 0, 0)
    for request_id in range(40):
        epoch_slots = np.arange(request_id * BATCH, (request_id + 1) * BATCH, dtype=np.uint32)
        engine.request_batch("rank 0", request_id, 0, epoch_slots)
        replies = engine.pop_replies()
        while not replies:
            for fetch in engine.pop_fetches():
                nbytes = int(sizes[fetch.sample_ids].sum())
                engine.arrive(fetch.fetch_id, np.zeros(nbytes, np.uint8))
            replies = engine.pop_replies()
        assert np.array_equal(replies[0].sample_ids, order[epoch_slots])
        engine.release("rank 0", request_id)
    # Two epochs are open at the same time.
    engine.end_epoch(0)
    engine.begin_epoch(1, index_of(1), index_of)
    engine.begin_epoch(2, index_of(2), index_of)
    assert engine.management_bytes() < 64 * SAMPLES
    del replies
    gc.collect()
    assert len(gc.get_objects()) - objects_before < 1000
