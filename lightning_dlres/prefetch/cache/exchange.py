"""What goes into the cache's engine and what comes out of it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from lightning_dlres.core.errors import StorageError
from lightning_dlres.prefetch.order.sequence import Positions

# Where a delivered sample is: in the cache space, in the pinned tier, or in the delivery itself.
CACHED_TIER, KEPT_TIER, DIRECT_TIER = 0, 1, 2


@dataclass(frozen=True)
class Request:
    """Samples to ask one storage node for; `numbers` is uint32[n]. The reply must name `ticket`."""

    ticket: int
    node: int
    numbers: Positions


@dataclass(frozen=True)
class BatchReply:
    """Samples that were taken, in order.

    `places` is int64[n, 3]: tier, offset and length of each. A sample that is `DIRECT_TIER` is not
    in the cache, but in `direct` (uint8), at its offset there.
    """

    client: str
    take: int
    numbers: Positions
    places: NDArray[np.int64]
    direct: NDArray[np.uint8]


@dataclass(frozen=True)
class BatchFailure:
    """A take that cannot be delivered."""

    client: str
    take: int
    error: StorageError


@dataclass
class Counts:
    """What has happened since the start; bytes where a name says so. With look-ahead a hit is a
    sample that was there when it was asked for."""

    samples: int = 0
    hits: int = 0
    kept_hits: int = 0
    requests: int = 0
    requested_samples: int = 0
    requested_bytes: int = 0
    taken_bytes: int = 0
    direct_samples: int = 0
