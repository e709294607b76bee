"""Samples that one host needs of an epoch, the ranks in it, and its progress."""

from __future__ import annotations

from dataclasses import dataclass, field

import msgspec
import numpy as np
from numpy.typing import NDArray

from lightning_dlres.core.errors import ConfigError
from lightning_dlres.prefetch.cache.index import CacheIndex
from lightning_dlres.prefetch.cache.messages import Begin
from lightning_dlres.prefetch.cache.space.cache_space import EpochSlots
from lightning_dlres.prefetch.order.sequence import SampleIds, ShardSpec, shuffled


@dataclass(eq=False)
class EpochProgress:
    """Progress of an open epoch.

    Attributes:
        epoch_id: Number of epochs that each client has begun before this one.
        row: Row of `CacheSpace.slot_table` that this epoch uses, 0 or 1. Two epochs may be open.
        index: The samples of this epoch, by epoch slot.
        is_requested: bool[n], true for epoch slots that a batch request contains.
        reach: Number of leading epoch slots that may be fetched.
        num_requested: Number of true elements of `is_requested`.
    """

    epoch_id: int
    row: int
    index: CacheIndex
    is_requested: NDArray[np.bool_]
    reach: int = 0
    num_requested: int = 0

    def mark_requested(self, epoch_slots: EpochSlots) -> None:
        """Mark the epoch slots of a batch request as requested.

        Raises:
            ConfigError: If a slot is not in this epoch, or was requested before.
        """
        if len(epoch_slots) and int(epoch_slots.max()) >= len(self.index):
            raise ConfigError(
                f"epoch_slots of epoch {self.epoch_id} must be below {len(self.index)}, got "
                f"{int(epoch_slots.max())}. Give all ranks the same batch size and checkpoint."
            )
        is_repeated = len(np.unique(epoch_slots)) < len(epoch_slots)
        if is_repeated or self.is_requested[epoch_slots].any():
            raise ConfigError(
                f"epoch_slots of epoch {self.epoch_id} must each be requested once, got a repeated "
                "request. Give the cache of each loader its own name."
            )
        self.is_requested[epoch_slots] = True
        self.num_requested += len(epoch_slots)


@dataclass
class BegunEpoch:
    """An epoch that a client has begun.

    Attributes:
        begin: Its start, as the first client sent it.
        ranks: Ranks that have begun it.
    """

    begin: Begin
    ranks: set[int] = field(default_factory=set)

    def clash(self, begin: Begin) -> str:
        """Return the text of the error if this start cannot be one of the same epoch, else ""."""
        if msgspec.structs.replace(begin, rank=self.begin.rank) != self.begin:
            return (
                f"All ranks must start the same epoch, got {begin} and {self.begin}. Give them the "
                "same seed, batch size and checkpoint. If an earlier job still uses the cache, end "
                "it, or give this job a cache name of its own."
            )
        if begin.rank in self.ranks:
            return (
                f"Each rank must begin an epoch once, got rank {begin.rank} twice. Give the cache "
                "of each loader its own name, and close a loader before another one uses its name."
            )
        return ""


def needed_samples(num_samples: int, begin: Begin) -> SampleIds:
    """Return uint32[n], the sample_ids that `begin.local_ranks` need, in order of epoch slots.

    Args:
        num_samples: Number of samples of the data set.
        begin: Description of the epoch.
    """
    order = (
        shuffled(num_samples, begin.seed, begin.epoch)
        if begin.shuffle
        else np.arange(num_samples, dtype=np.uint32)
    )
    shards = ShardSpec(num_samples, begin.consumed, begin.ranks, begin.batch, begin.tail)
    return shards.sample_ids(order, begin.local_ranks)
