"""A million samples: what is kept about each of them are bytes in arrays, not objects."""

from __future__ import annotations

import gc

import numpy as np

from lightning_dlres.prefetch.cache.engine import PrefetchEngine
from lightning_dlres.prefetch.cache.index import CacheIndex
from lightning_dlres.prefetch.cache.space.cache_space import CacheSpace
from lightning_dlres.prefetch.cache.space.pinned import PinnedSamples
from lightning_dlres.prefetch.order.sequence import shuffled

SAMPLES, NODES, BATCH = 1_000_000, 8, 256


def test_management_space_and_objects() -> None:
    sizes = np.random.default_rng(0).integers(0, 5, SAMPLES)
    space = CacheSpace(np.zeros(100_000, np.uint8), SAMPLES)
    kept = PinnedSamples(np.zeros(1000, np.uint8), sizes)
    gc.collect()
    before = len(gc.get_objects())
    engine = PrefetchEngine(sizes, NODES, space, kept)

    def index_of(epoch: int) -> CacheIndex:
        return CacheIndex.build(shuffled(SAMPLES, 0, epoch), NODES, kept.ready)

    engine.begin(0, index_of(0), index_of)
    order = shuffled(SAMPLES, 0, 0)
    for take in range(40):
        positions = np.arange(take * BATCH, (take + 1) * BATCH, dtype=np.uint32)
        engine.take("rank 0", take, 0, positions)
        deliveries = engine.deliveries()
        while not deliveries:
            for request in engine.requests():
                engine.arrive(request.ticket, np.zeros(int(sizes[request.numbers].sum()), np.uint8))
            deliveries = engine.deliveries()
        assert np.array_equal(deliveries[0].numbers, order[positions])
        engine.release("rank 0", take)
    # The next epoch's index at the same time.
    engine.end(0)
    engine.begin(1, index_of(1), index_of)
    engine.begin(2, index_of(2), index_of)
    assert engine.management_bytes() < 64 * SAMPLES
    del deliveries
    gc.collect()
    assert len(gc.get_objects()) - before < 1000
