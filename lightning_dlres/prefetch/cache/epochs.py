"""The samples that one host, or one rank, needs in an epoch."""

from __future__ import annotations

import numpy as np

from lightning_dlres.prefetch.cache.messages import Begin
from lightning_dlres.prefetch.order.sequence import Positions, ShardSpec, shuffled


def needed(samples: int, begin: Begin) -> Positions:
    """Return uint32[n], the numbers of the samples that `begin.local_ranks` need, in order."""
    order = (
        shuffled(samples, begin.seed, begin.epoch)
        if begin.shuffle
        else np.arange(samples, dtype=np.uint32)
    )
    deal = ShardSpec(samples, begin.consumed, begin.ranks, begin.batch, begin.tail)
    return deal.sample_ids(order, begin.local_ranks)
