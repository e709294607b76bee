"""Drives the engine over a storage that is a list of bytes, with replies in any order."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from lightning_dlres.prefetch.cache.engine import PrefetchEngine
from lightning_dlres.prefetch.cache.exchange import (
    CACHED_TIER,
    DIRECT_TIER,
    KEPT_TIER,
    BatchReply,
    Request,
)
from lightning_dlres.prefetch.cache.space.cache_space import CacheSpace
from lightning_dlres.prefetch.cache.space.pinned import PinnedSamples


def content(number: int, size: int) -> np.ndarray:
    """What sample `number` holds."""
    return ((np.arange(size) * 31 + number * 17 + 5) % 253).astype(np.uint8)


@dataclass
class Bench:
    """An engine, its memory and the requests that have not been answered."""

    sizes: np.ndarray
    nodes: int
    capacity: int
    prefetch: int
    lookahead: int | None
    threshold: float = 0.75
    kept: int = 0
    depth: int = 4
    padding: int = 0
    open: list[Request] = field(default_factory=list)
    asked: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.memory = np.zeros(self.capacity, np.uint8)
        self.kept_memory = np.zeros(self.kept, np.uint8)
        self.space = CacheSpace(self.memory, len(self.sizes), self.threshold)
        self.engine = PrefetchEngine(
            self.sizes,
            self.nodes,
            self.space,
            PinnedSamples(self.kept_memory, self.sizes),
            prefetch=self.prefetch,
            lookahead=self.lookahead,
            depth=self.depth,
        )

    def collect(self) -> None:
        """Take over the engine's new requests."""
        for request in self.engine.requests():
            assert 1 <= len(request.numbers) <= self.prefetch
            assert (request.numbers % self.nodes == request.node).all()
            self.open.append(request)
            self.asked.extend(request.numbers.tolist())

    def answer(self, which: int = 0) -> None:
        """Answer one of the open requests."""
        request = self.open.pop(which % len(self.open))
        pieces = [content(n, int(self.sizes[n])) for n in request.numbers.tolist()]
        self.engine.arrive(request.ticket, np.concatenate(pieces))

    def read(self, delivery: BatchReply) -> list[np.ndarray]:
        """Return what a delivery points to: views, not copies."""
        tiers = {
            CACHED_TIER: self.memory,
            KEPT_TIER: self.kept_memory,
            DIRECT_TIER: delivery.direct,
        }
        return [tiers[t][o : o + n] for t, o, n in delivery.places.tolist()]

    def check(self, delivery: BatchReply) -> None:
        """Fail where a delivered sample is not the stored one."""
        for number, data in zip(delivery.numbers.tolist(), self.read(delivery), strict=True):
            assert np.array_equal(data, content(number, int(self.sizes[number])))
