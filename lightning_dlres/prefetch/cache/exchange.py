"""Inputs and outputs of the cache's engine: fetches, batch replies, failures and counts."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from lightning_dlres.core.errors import StorageError
from lightning_dlres.prefetch.order.sequence import SampleIds

# Tier of a delivered sample: the cache space, the pinned tier, or the reply itself.
CACHED_TIER, PINNED_TIER, DIRECT_TIER = 0, 1, 2


@dataclass(frozen=True)
class Fetch:
    """Request to one storage node. The storage's reply must name `fetch_id`.

    Attributes:
        fetch_id: Unique in this engine.
        node: Storage node to ask.
        sample_ids: uint32[n], all on this node.
    """

    fetch_id: int
    node: int
    sample_ids: SampleIds


@dataclass(frozen=True)
class BatchReply:
    """Delivered samples of one batch request, in the order of the request.

    Attributes:
        client: Process that made the request.
        request_id: The request, unique for this client.
        sample_ids: uint32[n].
        locations: int64[n, 3]: tier, offset and length of each sample, in bytes.
        direct: uint8, the samples of `DIRECT_TIER`, concatenated; their offsets count from its
            start.
    """

    client: str
    request_id: int
    sample_ids: SampleIds
    locations: NDArray[np.int64]
    direct: NDArray[np.uint8]


@dataclass(frozen=True)
class BatchFailure:
    """Batch request that cannot be served, with the storage's error."""

    client: str
    request_id: int
    error: StorageError


@dataclass
class Counts:
    """Counts since the start of the cache.

    Attributes:
        samples: Delivered samples.
        hits: Samples that were in the cache space when a batch request named them; with
            `lookahead=0`, when their turn in the request came. Pinned samples do not count.
        pinned_hits: Delivered samples that lay in the pinned tier.
        requests: Fetches that were sent to storage nodes.
        requested_samples: Samples in these fetches.
        requested_bytes: Bytes of these samples.
        delivered_bytes: Bytes of the delivered samples.
        direct_samples: Delivered samples that bypassed the cache space.
    """

    samples: int = 0
    hits: int = 0
    pinned_hits: int = 0
    requests: int = 0
    requested_samples: int = 0
    requested_bytes: int = 0
    delivered_bytes: int = 0
    direct_samples: int = 0
