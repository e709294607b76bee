"""Fetches in flight: requests to storage nodes that have no reply yet."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from lightning_dlres.prefetch.cache.batch_requests import BatchRequest
from lightning_dlres.prefetch.cache.epochs import EpochProgress
from lightning_dlres.prefetch.cache.exchange import Counts, Fetch
from lightning_dlres.prefetch.cache.space.cache_space import CacheSpace, EpochSlots
from lightning_dlres.prefetch.cache.space.entry_kernels import FETCHING


@dataclass(frozen=True, eq=False)
class PendingFetch:
    """Fetch in flight.

    Attributes:
        epoch: Epoch that the samples belong to.
        epoch_slots: uint32[n], in the order of the fetch.
        request: Batch request that gets its samples directly, past the cache space. None: they go
            into the cache space.
        node: Storage node that the fetch was sent to.
    """

    epoch: EpochProgress
    epoch_slots: EpochSlots
    request: BatchRequest | None
    node: int


class InflightFetches:
    """Fetches in flight, at most so many to one node.

    Args:
        sizes: int64[samples], in bytes.
        nodes: Number of storage nodes; sample i is on node i mod `nodes`.
        space: Cache space, whose slot table says which samples are being fetched.
        max_requests: Limit for prefetches to one node. Fetches on a miss may exceed it.
        counts: Counts to add each fetch to.
    """

    def __init__(
        self,
        sizes: NDArray[np.int64],
        nodes: int,
        space: CacheSpace,
        max_requests: int,
        counts: Counts,
    ) -> None:
        self._sizes, self._nodes, self._space = sizes, nodes, space
        self._max_requests, self._counts = max_requests, counts
        self._pending: dict[int, PendingFetch] = {}
        self._num_pending = np.zeros(nodes, dtype=np.int64)
        self._next_fetch_id = 0
        self._unsent: deque[Fetch] = deque()

    def __len__(self) -> int:
        return len(self._pending)

    def may_prefetch(self, node: int) -> bool:
        """Return true if a node may get one more prefetch."""
        return bool(self._num_pending[node] < self._max_requests)

    def add(
        self, epoch: EpochProgress, epoch_slots: EpochSlots, request: BatchRequest | None
    ) -> None:
        """Fetch samples that lie on one node; arguments as in `PendingFetch`."""
        self._space.slot_table[epoch.row, epoch_slots] = FETCHING
        sample_ids = epoch.index.sample_ids[epoch_slots]
        node = int(sample_ids[0]) % self._nodes
        fetch_id, self._next_fetch_id = self._next_fetch_id, self._next_fetch_id + 1
        self._pending[fetch_id] = PendingFetch(epoch, epoch_slots, request, node)
        self._num_pending[node] += 1
        self._unsent.append(Fetch(fetch_id, node, sample_ids))
        self._counts.requests += 1
        self._counts.requested_samples += len(sample_ids)
        self._counts.requested_bytes += int(self._sizes[sample_ids].sum())

    def pop(self, fetch_id: int) -> PendingFetch:
        """Remove a fetch whose reply has come, and return it.

        Raises:
            KeyError: If there is no such fetch.
        """
        fetch = self._pending.pop(fetch_id)
        self._num_pending[fetch.node] -= 1
        return fetch

    def pop_unsent(self) -> list[Fetch]:
        """Return the fetches to send now, each once."""
        fetches = list(self._unsent)
        self._unsent.clear()
        return fetches
