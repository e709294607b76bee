"""Harness that drives the engine of the cache, with storage replies in any order.

The harness makes the samples itself, so it needs no storage.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from lightning_dlres.prefetch.cache.engine import PrefetchEngine
from lightning_dlres.prefetch.cache.exchange import (
    CACHED_TIER,
    DIRECT_TIER,
    PINNED_TIER,
    BatchReply,
    Fetch,
)
from lightning_dlres.prefetch.cache.space.cache_space import CacheSpace
from lightning_dlres.prefetch.cache.space.pinned import PinnedSamples


def sample_content(sample_id: int, size: int) -> np.ndarray:
    """Return the bytes of a sample, uint8[size]; they differ from sample to sample."""
    return ((np.arange(size) * 31 + sample_id * 17 + 5) % 253).astype(np.uint8)


@dataclass
class EngineHarness:
    """Engine with its memory and the fetches that have no reply yet.

    Attributes:
        sizes: int64[samples], size of each sample, in bytes.
        nodes: Number of storage nodes.
        capacity: Size of the cache space, in bytes.
        prefetch: Maximum number of samples in one fetch.
        lookahead: As for `PrefetchEngine`, in bytes.
        threshold: As for `CacheSpace`.
        pinned: Size of the pinned tier, in bytes.
        max_inflight_requests: Limit of prefetches to one node.
        padding: Number of samples from the start of an epoch that are repeated at its end.
        open_fetches: Fetches that have no reply yet, oldest first.
        fetched_ids: The sample_id of every fetched sample, in order.
    """

    sizes: np.ndarray
    nodes: int
    capacity: int
    prefetch: int
    lookahead: int | None
    threshold: float = 0.75
    pinned: int = 0
    max_inflight_requests: int = 4
    padding: int = 0
    open_fetches: list[Fetch] = field(default_factory=list)
    fetched_ids: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.memory = np.zeros(self.capacity, np.uint8)
        self.pinned_memory = np.zeros(self.pinned, np.uint8)
        self.space = CacheSpace(self.memory, len(self.sizes), self.threshold)
        self.pinned_samples = PinnedSamples(self.pinned_memory, self.sizes)
        self.engine = PrefetchEngine(
            self.sizes,
            self.nodes,
            self.space,
            self.pinned_samples,
            prefetch=self.prefetch,
            lookahead=self.lookahead,
            max_inflight_requests=self.max_inflight_requests,
        )

    def collect_fetches(self) -> None:
        """Move the new fetches of the engine to `open_fetches`, and check them."""
        for fetch in self.engine.pop_fetches():
            assert 1 <= len(fetch.sample_ids) <= self.prefetch
            assert (fetch.sample_ids % self.nodes == fetch.node).all()
            self.open_fetches.append(fetch)
            self.fetched_ids.extend(fetch.sample_ids.tolist())

    def answer(self, position: int = 0) -> None:
        """Give the engine the reply to the open fetch at a position, modulo their number."""
        fetch = self.open_fetches.pop(position % len(self.open_fetches))
        samples = [sample_content(i, int(self.sizes[i])) for i in fetch.sample_ids.tolist()]
        self.engine.arrive(fetch.fetch_id, np.concatenate(samples))

    def read(self, reply: BatchReply) -> list[np.ndarray]:
        """Return views of the samples of a batch reply."""
        tiers = {
            CACHED_TIER: self.memory,
            PINNED_TIER: self.pinned_memory,
            DIRECT_TIER: reply.direct,
        }
        return [
            tiers[tier][offset : offset + size] for tier, offset, size in reply.locations.tolist()
        ]

    def check(self, reply: BatchReply) -> None:
        """Assert that each delivered sample has the bytes of the stored one."""
        for sample_id, data in zip(reply.sample_ids.tolist(), self.read(reply), strict=True):
            assert np.array_equal(data, sample_content(sample_id, int(self.sizes[sample_id])))
