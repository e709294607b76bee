"""What Method C does at a given capacity, predicted without memory, threads or storage (C4, C5).

Hits, misses and requests depend only on the order, the sizes and a few numbers, so the engine's
counts must be equal to these.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from lightning_dlres.prefetch.order.sequence import Positions


@dataclass(frozen=True)
class Prediction:
    """Counts of one epoch on one host."""

    samples: int
    hits: int
    requests: int
    requested_bytes: int

    @property
    def hit_rate(self) -> float:
        """The part of the samples that were in the cache when they were taken."""
        return self.hits / self.samples if self.samples else 0.0


def predict(
    numbers: Positions,
    sizes: NDArray[np.int64],
    *,
    nodes: int,
    prefetch: int,
    capacity: int,
    batch: int = 1,
) -> Prediction:
    """Return what happens where samples are only fetched on a miss (`lookahead=0`).

    Args:
        numbers: uint32[n], the samples in the order in which they are taken.
        sizes: int64[samples], in bytes.
        nodes: how many storage nodes there are.
        prefetch: samples of one request, Method C's k.
        capacity: bytes of the cache space.
        batch: how many samples are let go together, once all of them have been taken.
    """
    lists: list[list[int]] = [[] for _ in range(nodes)]
    rank = np.empty(len(numbers), dtype=np.int64)
    for position, number in enumerate(numbers.tolist()):
        rank[position] = len(lists[number % nodes])
        lists[number % nodes].append(position)
    cached: set[int] = set()
    live = in_use = hits = requests = total = 0
    for position, number in enumerate(numbers.tolist()):
        size = int(sizes[number])
        if position in cached:
            cached.remove(position)
            hits += 1
            in_use += size
        else:
            requests, total = requests + 1, total + size
            after = int(rank[position]) + 1
            for other in lists[number % nodes][after : after + prefetch - 1]:
                more = int(sizes[numbers[other]])
                if live + more > capacity:
                    break
                live, total = live + more, total + more
                cached.add(other)
        if (position + 1) % batch == 0:
            live, in_use = live - in_use, 0
    return Prediction(len(numbers), hits, requests, total)
