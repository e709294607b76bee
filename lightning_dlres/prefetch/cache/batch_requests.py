"""Batch requests of the clients, and leases on the batches that were delivered."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from lightning_dlres.prefetch.cache.epochs import EpochProgress
from lightning_dlres.prefetch.cache.exchange import (
    CACHED_TIER,
    DIRECT_TIER,
    PINNED_TIER,
    BatchReply,
)
from lightning_dlres.prefetch.cache.space.cache_space import Bytes, EpochSlots, UsedEntries
from lightning_dlres.prefetch.cache.space.pinned import PinnedSamples


@dataclass(eq=False)
class BatchRequest:
    """Batch request that is not delivered yet.

    Attributes:
        client: Process that made it.
        request_id: Unique for this client.
        epoch: Epoch that the samples belong to.
        epoch_slots: uint32[n], in the order in which the samples are delivered.
        direct: Samples that wait outside of the cache space, by epoch slot.
        num_served: Only with `lookahead=0`: samples that were found or fetched so far.
        used: Only with `lookahead=0`: entry, offset and length of each hit, by epoch slot.
        unstored_bytes: Bytes in `direct` that were fetched for the cache space and found no
            contiguous room. They count against its capacity until the batch is released.
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
            sizes: int64[samples], in bytes.
            pinned: The pinned tier.
        """
        sample_ids = self.epoch.index.sample_ids[self.epoch_slots]
        locations = np.empty((len(sample_ids), 3), dtype=np.int64)
        locations[:, 2] = sizes[sample_ids]
        direct: list[Bytes] = []
        direct_bytes = 0
        for at, slot in enumerate(self.epoch_slots.tolist()):
            if slot in self.direct:
                data = self.direct[slot]
                locations[at, 0], locations[at, 1] = DIRECT_TIER, direct_bytes
                direct_bytes += len(data)
                direct.append(data)
            elif slot in used:
                locations[at, 0], locations[at, 1] = CACHED_TIER, used[slot][1]
            else:
                offset = pinned.offsets(sample_ids[at : at + 1])[0]
                locations[at, 0], locations[at, 1] = PINNED_TIER, offset
        joined = np.concatenate(direct) if direct else np.empty(0, dtype=np.uint8)
        return BatchReply(self.client, self.request_id, sample_ids, locations, joined)


@dataclass(frozen=True, eq=False)
class Lease:
    """Right of a client to look at a delivered batch; its entries stay in place until `release`."""

    epoch: EpochProgress
    used: UsedEntries
    unstored_bytes: int

    @property
    def nbytes(self) -> int:
        """Bytes that the batch has in the cache space."""
        return int(self.used[:, 2].sum())


class LeaseTable:
    """Leases on delivered batches, by client and request_id."""

    def __init__(self) -> None:
        self._leases: dict[tuple[str, int], Lease] = {}

    @property
    def in_use_bytes(self) -> int:
        """Bytes of the cache space that are leased."""
        return sum(lease.nbytes for lease in self._leases.values())

    @property
    def unstored_bytes(self) -> int:
        """Bytes of leased batches that count against the capacity and lie outside of it."""
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

    def requests_of(self, client: str) -> list[int]:
        """Return the request_id of each batch that a client has leased."""
        return [request_id for holder, request_id in self._leases if holder == client]

    def bytes_outside(self, epochs: Collection[EpochProgress]) -> int:
        """Return the leased bytes of epochs other than these."""
        return sum(lease.nbytes for lease in self._leases.values() if lease.epoch not in epochs)
