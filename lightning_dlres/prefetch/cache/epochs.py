"""Epochs on one host: the samples that it needs of an epoch, and the progress of an open epoch."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from lightning_dlres.core.errors import ConfigError
from lightning_dlres.prefetch.cache.index import CacheIndex
from lightning_dlres.prefetch.cache.messages import Begin
from lightning_dlres.prefetch.cache.space.cache_space import EpochSlots
from lightning_dlres.prefetch.order.sequence import SampleIds, ShardSpec, shuffled


@dataclass(eq=False)
class EpochProgress:
    """Open epoch and its progress.

    Attributes:
        epoch_id: Name of the epoch, given by the clients.
        row: 0 or 1, the epoch's row of the slot table.
        index: The samples of this epoch, by epoch slot.
        is_requested: bool[n], true for the epoch slots that a batch request has named.
        reach: Number of leading epoch slots that may be fetched.
        num_requested: Number of epoch slots that batch requests have named.
    """

    epoch_id: int
    row: int
    index: CacheIndex
    is_requested: NDArray[np.bool_]
    reach: int = 0
    num_requested: int = 0

    def mark_requested(self, epoch_slots: EpochSlots) -> None:
        """Note that a batch request names some epoch slots.

        Raises:
            ConfigError: If a slot is not in this epoch, or was named before.
        """
        if len(epoch_slots) and int(epoch_slots.max()) >= len(self.index):
            raise ConfigError(
                f"epoch_slots of epoch {self.epoch_id} must be below {len(self.index)}, got "
                f"{int(epoch_slots.max())}. Give all ranks the same batch size and checkpoint."
            )
        is_repeated = len(np.unique(epoch_slots)) < len(epoch_slots)
        if is_repeated or self.is_requested[epoch_slots].any():
            raise ConfigError(
                f"epoch_slots of epoch {self.epoch_id} must each be requested once, got one for "
                "the second time. Give each loader a cache of its own name."
            )
        self.is_requested[epoch_slots] = True
        self.num_requested += len(epoch_slots)


def needed_samples(samples: int, begin: Begin) -> SampleIds:
    """Return uint32[n], the sample_ids that `begin.local_ranks` need, by epoch slot.

    Args:
        samples: Number of samples of the data set.
        begin: Description of the epoch.
    """
    order = (
        shuffled(samples, begin.seed, begin.epoch)
        if begin.shuffle
        else np.arange(samples, dtype=np.uint32)
    )
    shards = ShardSpec(samples, begin.consumed, begin.ranks, begin.batch, begin.tail)
    return shards.sample_ids(order, begin.local_ranks)
