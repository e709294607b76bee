"""Model of the published prefetch method, without memory, threads or storage.

Hits, misses and requests depend only on the order, the sizes and a few numbers. So the engine's
counts with `lookahead=0` must equal those of this model.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from lightning_dlres.prefetch.order.sequence import SampleIds


@dataclass(frozen=True)
class Prediction:
    """Counts of one epoch on one host."""

    samples: int
    hits: int
    requests: int
    requested_bytes: int

    @property
    def hit_rate(self) -> float:
        """Part of the samples that were in the cache when they were needed."""
        return self.hits / self.samples if self.samples else 0.0


def predict(
    sample_ids: SampleIds,
    sizes: NDArray[np.int64],
    *,
    nodes: int,
    prefetch: int,
    capacity: int,
    batch: int = 1,
) -> Prediction:
    """Return the counts of an epoch in which samples are fetched on a miss only.

    Args:
        sample_ids: uint32[n], in the order in which the samples are needed.
        sizes: int64[samples], in bytes.
        nodes: Number of storage nodes.
        prefetch: Most samples of one fetch.
        capacity: Bytes of the cache space.
        batch: Samples that are released together, once all of them have been delivered.
    """
    # The slots of each node's samples, in order, and the place of each slot in its node's list.
    slots_of: list[list[int]] = [[] for _ in range(nodes)]
    place_in_list = np.empty(len(sample_ids), dtype=np.int64)
    for slot, sample_id in enumerate(sample_ids.tolist()):
        place_in_list[slot] = len(slots_of[sample_id % nodes])
        slots_of[sample_id % nodes].append(slot)
    cached: set[int] = set()
    # Bytes that occupy the cache, and the part of them that the current batch has taken.
    occupied = taken = 0
    hits = requests = requested_bytes = 0
    for slot, sample_id in enumerate(sample_ids.tolist()):
        size = int(sizes[sample_id])
        if slot in cached:
            cached.remove(slot)
            hits += 1
            taken += size
        else:
            requests, requested_bytes = requests + 1, requested_bytes + size
            after = int(place_in_list[slot]) + 1
            for next_slot in slots_of[sample_id % nodes][after : after + prefetch - 1]:
                next_size = int(sizes[sample_ids[next_slot]])
                if occupied + next_size > capacity:
                    break
                occupied += next_size
                requested_bytes += next_size
                cached.add(next_slot)
        if (slot + 1) % batch == 0:
            occupied, taken = occupied - taken, 0
    return Prediction(len(sample_ids), hits, requests, requested_bytes)
