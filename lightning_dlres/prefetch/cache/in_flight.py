"""Requests in flight on one host: batch requests and leases of the clients, fetches from the
storage, and the window of samples that may be fetched ahead of need.

Leases and the window share one budget of bytes.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from lightning_dlres.core.errors import ConfigError
from lightning_dlres.prefetch.cache.epochs import EpochProgress
from lightning_dlres.prefetch.cache.exchange import (
    CACHED_TIER,
    DIRECT_TIER,
    PINNED_TIER,
    BatchReply,
    Counts,
    Fetch,
)
from lightning_dlres.prefetch.cache.index import CacheIndex, extend_reach
from lightning_dlres.prefetch.cache.space.cache_space import (
    Bytes,
    CacheSpace,
    EpochSlots,
    UsedEntries,
)
from lightning_dlres.prefetch.cache.space.entry_kernels import DONE, FETCHING, PINNED
from lightning_dlres.prefetch.cache.space.pinned import PinnedSamples


@dataclass(eq=False)
class BatchRequest:
    """Batch request that is not delivered yet.

    Attributes:
        client: Name of the process that made the request.
        request_id: Number that the client gave the request, unique for this client.
        epoch: Epoch that the samples belong to.
        epoch_slots: uint32[n], in the order in which the samples are delivered.
        direct: Bytes of samples that are delivered without being stored, by epoch slot.
        num_served: Only with `lookahead=0`: number of leading samples that are ready to deliver.
        used: Only with `lookahead=0`: entry, offset and length of each hit, by epoch slot.
        unstored_bytes: Number of bytes in `direct` that were fetched for the cache space, which had
            no contiguous space for them. They count as used until the batch is released.
    """

    client: str
    request_id: int
    epoch: EpochProgress
    epoch_slots: EpochSlots
    direct: dict[int, Bytes] = field(default_factory=dict)
    num_served: int = 0
    used: dict[int, NDArray[np.int64]] = field(default_factory=dict)
    unstored_bytes: int = 0

    def reply(
        self,
        used: dict[int, NDArray[np.int64]],
        sizes: NDArray[np.int64],
        pinned: PinnedSamples,
    ) -> BatchReply:
        """Return the reply that delivers the batch.

        Args:
            used: Entry, offset and length of each sample in the cache space, by epoch slot. A
                sample that is neither there nor in `direct` is pinned.
            sizes: int64[samples], size of each sample of the data set, in bytes.
            pinned: Pinned tier.
        """
        sample_ids = self.epoch.index.sample_ids[self.epoch_slots]
        locations = np.empty((len(sample_ids), 3), dtype=np.int64)
        locations[:, 2] = sizes[sample_ids]
        direct: list[Bytes] = []
        direct_bytes = 0
        for position, slot in enumerate(self.epoch_slots.tolist()):
            if slot in self.direct:
                data = self.direct[slot]
                locations[position, 0], locations[position, 1] = DIRECT_TIER, direct_bytes
                direct_bytes += len(data)
                direct.append(data)
            elif slot in used:
                locations[position, 0], locations[position, 1] = CACHED_TIER, used[slot][1]
            else:
                offset = pinned.offsets(sample_ids[position : position + 1])[0]
                locations[position, 0], locations[position, 1] = PINNED_TIER, offset
        joined = np.concatenate(direct) if direct else np.empty(0, dtype=np.uint8)
        return BatchReply(self.client, self.request_id, sample_ids, locations, joined)


@dataclass(frozen=True, eq=False)
class Lease:
    """Right of a client to read a delivered batch.

    The entries of the batch stay in place until the client releases it.

    Attributes:
        epoch: Epoch of the batch.
        used: Entry, offset and length of each sample in the cache space.
        unstored_bytes: As in `BatchRequest`.
    """

    epoch: EpochProgress
    used: UsedEntries
    unstored_bytes: int

    @property
    def nbytes(self) -> int:
        """Number of bytes of the batch that are in the cache space."""
        return int(self.used[:, 2].sum())


class LeaseTable:
    """Leases on delivered batches, by client and request_id."""

    def __init__(self) -> None:
        self._leases: dict[tuple[str, int], Lease] = {}

    @property
    def in_use_bytes(self) -> int:
        """Number of bytes of the cache space that are leased."""
        return sum(lease.nbytes for lease in self._leases.values())

    @property
    def unstored_bytes(self) -> int:
        """Number of bytes of leased batches that count as used, but are not in the cache space."""
        return sum(lease.unstored_bytes for lease in self._leases.values())

    def add(self, request: BatchRequest, used: UsedEntries) -> None:
        """Lease a delivered batch to its client."""
        lease = Lease(request.epoch, used, request.unstored_bytes)
        self._leases[request.client, request.request_id] = lease

    def pop(self, client: str, request_id: int) -> Lease:
        """Remove a lease and return it.

        Raises:
            KeyError: If there is no such lease.
        """
        return self._leases.pop((client, request_id))

    def leased_request_ids(self, client: str) -> list[int]:
        """Return the request_id of each batch that a client has leased."""
        return [request_id for holder, request_id in self._leases if holder == client]

    def leased_bytes_outside(self, epochs: Collection[EpochProgress]) -> int:
        """Return the number of leased bytes that belong to none of these epochs."""
        return sum(lease.nbytes for lease in self._leases.values() if lease.epoch not in epochs)


@dataclass(frozen=True, eq=False)
class PendingFetch:
    """Fetch in flight.

    Attributes:
        epoch: Epoch that the samples belong to.
        epoch_slots: uint32[n], in the order of the fetch.
        request: Batch request that gets the samples directly. None: the samples are stored in the
            cache space.
        node: Storage node that the fetch was sent to.
    """

    epoch: EpochProgress
    epoch_slots: EpochSlots
    request: BatchRequest | None
    node: int

    def delays(self, request: BatchRequest) -> bool:
        """Return True if a batch request waits for a sample of this fetch.

        If the fetch fails, so does the request. The storage has tried until its deadline, and
        another fetch would double the request's wait.
        """
        if self.request is not None:
            return request is self.request
        is_needed = np.isin(self.epoch_slots, request.epoch_slots).any()
        return request.epoch is self.epoch and bool(is_needed)


class InflightFetches:
    """Fetches in flight, with a limit for each storage node.

    Args:
        sizes: int64[samples], in bytes.
        nodes: Number of storage nodes; sample i is on node i mod `nodes`.
        space: Cache space. Its slot table marks the samples that are in flight.
        max_requests: Limit for prefetches to one node. Fetches on a miss may exceed it.
        counts: Counters that each fetch is added to.
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
        """Return True if one more prefetch may be sent to a node."""
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
        """Remove a fetch after its reply, and return it.

        Raises:
            KeyError: If there is no such fetch.
        """
        fetch = self._pending.pop(fetch_id)
        self._num_pending[fetch.node] -= 1
        return fetch

    def pop_unsent(self) -> list[Fetch]:
        """Return the fetches that were added since the last call."""
        fetches = list(self._unsent)
        self._unsent.clear()
        return fetches


class PrefetchWindow:
    """Open epochs, and the bytes of the cache space that are reserved for their samples.

    The bytes of a sample are reserved in two cases. It is in use, or its epoch slot is below
    `EpochProgress.reach` and its state is neither DONE nor PINNED. Invariant, if there is a budget:
    reserved bytes never exceed it.

    Args:
        sizes: int64[samples], in bytes.
        nodes: Number of storage nodes.
        space: Cache space for the fetched samples.
        pinned: Pinned tier; its samples are not fetched again.
        fetches: Fetches in flight.
        leases: Batches in use.
        prefetch: Maximum number of samples in one fetch.
        budget: Maximum number of reserved bytes. 0: nothing is fetched ahead of need.
    """

    def __init__(
        self,
        *,
        sizes: NDArray[np.int64],
        nodes: int,
        space: CacheSpace,
        pinned: PinnedSamples,
        fetches: InflightFetches,
        leases: LeaseTable,
        prefetch: int,
        budget: int,
    ) -> None:
        self.budget = budget
        # Oldest first: one, or two while the prefetch runs into the next epoch.
        self.epochs: list[EpochProgress] = []
        # Returns the index of an epoch by its epoch_id; None if there is no such epoch.
        self.index_of_epoch: Callable[[int], CacheIndex | None] = _no_index
        self._sizes, self._nodes, self._prefetch = sizes, nodes, prefetch
        self._space, self._pinned = space, pinned
        self._fetches, self._leases = fetches, leases
        self._reserved = 0

    def find(self, epoch_id: int) -> EpochProgress | None:
        """Return the epoch with this epoch_id; None if no such epoch is open."""
        for epoch in self.epochs:
            if epoch.epoch_id == epoch_id:
                return epoch
        return None

    def open_epoch(self, epoch_id: int, index: CacheIndex) -> None:
        """Open an epoch.

        Raises:
            ConfigError: If two epochs are open.
        """
        if len(self.epochs) == 2:
            open_ids = [epoch.epoch_id for epoch in self.epochs]
            raise ConfigError(
                f"epoch_id must be one of {open_ids} while these two epochs are open, got "
                f"{epoch_id}. Finish one of them first."
            )
        row = 1 - self.epochs[0].row if self.epochs else 0
        self._space.reset_row(row, len(index))
        self._pinned.choose(index.sample_ids)
        if len(self._pinned.is_ready):
            is_pinned = self._pinned.is_ready[index.sample_ids]
            self._space.slot_table[row, : len(index)][is_pinned] = PINNED
        is_requested = np.zeros(len(index), dtype=np.bool_)
        self.epochs.append(EpochProgress(epoch_id, row, index, is_requested))

    def close_epoch(self, epoch: EpochProgress) -> None:
        """Close an epoch and drop its samples. Samples in use stay until they are released."""
        self.epochs.remove(epoch)
        self._space.reset_row(epoch.row)
        self._reserved = self._count_reserved()

    def unreserve(self, nbytes: int) -> None:
        """Give reserved bytes back to the budget: the samples are released, or are not stored."""
        self._reserved -= nbytes

    def prefetch_ahead(self) -> None:
        """Fetch samples ahead of need, within the budget.

        The first open epoch comes first. The next epoch follows when all samples of the first one
        are within its reach.
        """
        slots_before = 0
        for position in range(2):
            if position == len(self.epochs):
                last = self.epochs[-1] if self.epochs else None
                index = self.index_of_epoch(last.epoch_id + 1) if last else None
                if last is None or index is None:
                    return
                self.open_epoch(last.epoch_id + 1, index)
            epoch = self.epochs[position]
            states = self._space.slot_table[epoch.row]
            epoch.reach, self._reserved = extend_reach(
                epoch.index.sample_ids,
                self._sizes,
                states,
                epoch.reach,
                self._reserved,
                self.budget,
            )
            # Send a short run if its first sample is needed within the first half of the window.
            # The window is counted in slots from the start of the first open epoch.
            window_start = self.epochs[0].num_requested
            window_end = slots_before + epoch.reach
            urgent_before = (window_start + window_end) // 2 - slots_before
            for node in range(self._nodes):
                self._prefetch_from(epoch, node, states, urgent_before)
            if epoch.reach < len(epoch.index):
                return
            slots_before += len(epoch.index)

    def _prefetch_from(
        self, epoch: EpochProgress, node: int, states: NDArray[np.int32], urgent_before: int
    ) -> None:
        """Fetch the next runs of a node's prefetch list; see `CacheIndex` for runs.

        Args:
            epoch: Open epoch.
            node: Storage node.
            states: int32[n], the epoch's row of the slot table.
            urgent_before: Epoch slot. A run that may still grow is fetched only if it starts before
                this slot.
        """
        while self._fetches.may_prefetch(node):
            run, is_final = epoch.index.run_ahead(node, self._prefetch, epoch.reach, states)
            if not len(run) or not (is_final or int(run[0]) < urgent_before):
                return
            self._fetches.add(epoch, run, None)

    def _count_reserved(self) -> int:
        reserved = self._leases.leased_bytes_outside(self.epochs)
        for epoch in self.epochs:
            states = self._space.slot_table[epoch.row, : epoch.reach]
            is_reserved = (states != DONE) & (states != PINNED)
            reserved += int(self._sizes[epoch.index.sample_ids[: epoch.reach][is_reserved]].sum())
        return reserved


def _no_index(epoch_id: int) -> CacheIndex | None:
    """Stand-in for `PrefetchWindow.index_of_epoch` until the first epoch begins."""
    return None
