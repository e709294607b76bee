"""Index of the cache: the list of each storage node."""

from __future__ import annotations

import tracemalloc

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_dlres.core.errors import ConfigError
from lightning_dlres.prefetch.cache.index import CacheIndex
from lightning_dlres.prefetch.cache.space.entry_kernels import UNFETCHED
from lightning_dlres.prefetch.order.sequence import shuffled
from tests.support.examples import examples


@given(st.integers(0, 200), st.integers(1, 7), st.booleans())
@settings(max_examples=examples(60))
def test_the_list_of_a_node_has_its_samples_in_order(
    samples: int, nodes: int, has_pinned: bool
) -> None:
    sample_ids = shuffled(samples, 5, 5)
    is_pinned = (np.arange(samples) % 3 == 0) if has_pinned else None
    index = CacheIndex.build(sample_ids, nodes, is_pinned)
    for node in range(nodes):
        epoch_slots = index.lists[index.starts[node] : index.starts[node + 1]].tolist()
        expected = [
            slot
            for slot, sample_id in enumerate(sample_ids.tolist())
            if sample_id % nodes == node and not (has_pinned and sample_id % 3 == 0)
        ]
        assert epoch_slots == expected


def test_an_index_needs_at_least_one_node() -> None:
    with pytest.raises(ConfigError, match="nodes"):
        CacheIndex.build(shuffled(3, 0, 0), 0)


def test_a_miss_copies_no_list() -> None:
    """Lists have an entry for each sample, and the cache's process holds all clients up."""
    samples = 1_000_000
    index = CacheIndex.build(np.arange(samples, dtype=np.uint32), 2)
    states = np.full(samples, UNFETCHED, dtype=np.int32)
    # The first call loads compiled code.
    index.run_on_miss(0, 3, states)
    tracemalloc.start()
    run = index.run_on_miss(700_001, 3, states)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert run.tolist() == [700_001, 700_003, 700_005]
    assert peak < index.lists.nbytes / 10
