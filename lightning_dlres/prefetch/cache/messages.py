"""Messages between the processes of a host and the process that keeps its cache.

The messages are those of `core.wire.message`. Most payloads are msgpack; those of batch requests,
batch replies and releases are packed arrays. The id spaces are those of `cache.engine`.
"""

from __future__ import annotations

import hashlib
import itertools
import struct
from dataclasses import dataclass
from typing import Annotated

import msgspec
import numpy as np
from numpy.typing import NDArray

from lightning_dlres.core.wire.message import protocol_error
from lightning_dlres.prefetch.cache.space.cache_space import EpochSlots
from lightning_dlres.prefetch.order.sequence import MAX_SAMPLES, SampleIds, Tail
from lightning_dlres.prefetch.storage.source_options import SourceConfig

# Kinds of messages.
JOIN, JOINED, BEGIN, BEGUN, LEAVE, LEFT = "join", "joined", "begin", "begun", "leave", "left"
BATCH_REQUEST, BATCH_REPLY = "batch_request", "batch_reply"
RELEASE, FAILED = "release", "failed"
METRICS, MEASURED = "metrics", "measured"

_Count = Annotated[int, msgspec.Meta(ge=0, le=1 << 48)]
# The next two are bounded because the cache allocates memory in proportion to them.
_Ranks = Annotated[int, msgspec.Meta(ge=1, le=1 << 20)]
_Batch = Annotated[int, msgspec.Meta(ge=1, le=MAX_SAMPLES)]
# request_id and epoch_id; uint32 epoch slots follow.
_BATCH_REQUEST_HEAD = struct.Struct("<qq")
# request_id, number of samples, bytes of the keys, bytes of the direct samples.
_BATCH_REPLY_HEAD = struct.Struct("<qqqq")
# Bytes of one sample in a batch reply: its location, the end of its key, its sample_id.
_LOCATION_BYTES, _KEY_END_BYTES, _SAMPLE_ID_BYTES = 24, 8, 4
_BYTES_PER_SAMPLE = _LOCATION_BYTES + _KEY_END_BYTES + _SAMPLE_ID_BYTES


class HostConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Configuration of the process that keeps a cache.

    Attributes:
        source: Where samples come from.
        capacity: Bytes of the cache space.
        prefetch: Maximum number of samples in one fetch.
        lookahead: Bytes that may be fetched ahead of need. None: half of the capacity. 0: fetch on
            a miss only.
        threshold: Used part of the capacity at which eviction starts, in (0, 1].
        max_inflight_requests: Maximum number of prefetches in flight to one storage node.
        pinned: Bytes of the pinned tier.
        pinned_directory: Directory for the file of the pinned tier. None: the tier is in memory.
        share: Number that the user's capacity was divided by to get `capacity`; for error messages.
    """

    source: SourceConfig
    capacity: int
    prefetch: int = 32
    lookahead: int | None = None
    threshold: float = 0.75
    max_inflight_requests: int = 4
    pinned: int = 0
    pinned_directory: str | None = None
    share: int = 1


class Join(msgspec.Struct, frozen=True):
    """Request of a process to use the cache; `config` is the fingerprint of its `HostConfig`."""

    config: str


class Joined(msgspec.Struct, frozen=True, kw_only=True):
    """Answer to `Join`: the memory of the cache, and facts about the data set.

    Attributes:
        pid: Process that keeps the cache.
        cache_path: Shared memory of the cache space.
        cache_bytes: Size of the cache space.
        pinned_path: Shared memory, or file, of the pinned tier.
        pinned_bytes: Size of the pinned tier.
        samples: Number of samples in the data set.
        total_bytes: Bytes of all samples.
        largest: Bytes of the largest sample.
        digest: Fingerprint of the data set.
        encoding: As in `SampleTable`.
        nodes: Number of storage nodes.
        note: Line for users about the data set; "" if there is nothing to say.
    """

    pid: int
    cache_path: str
    cache_bytes: int
    pinned_path: str
    pinned_bytes: int
    samples: int
    total_bytes: int
    largest: int
    digest: str
    encoding: str
    nodes: int
    note: str


class Begin(msgspec.Struct, frozen=True, kw_only=True):
    """Start of an epoch in one process. For one epoch_id, all processes of a job must send the
    same, apart from their own `rank`.

    Attributes:
        epoch_id: Number of epochs that the process has begun before, aborted ones included.
        rank: Data-parallel rank of the process, one of `local_ranks`.
        seed: Seed of all orders.
        epoch: Number of the epoch, which decides its order together with the seed.
        shuffle: False: the samples come in the order of the data set.
        consumed: Number of samples at the start of the epoch that are left out, because the ranks
            were trained on them before a resume.
        ranks: Number of data-parallel ranks.
        local_ranks: Ranks that this host's cache serves, ascending.
        batch: Number of samples in one batch of a rank, for the tail rule.
        tail: Tail rule, see `ShardSpec`.
        has_next: True if another epoch follows, which may be prefetched.
        job: Text that tells jobs apart, where the launcher gives one.
    """

    epoch_id: _Count
    rank: _Count
    seed: int
    epoch: _Count
    shuffle: bool
    consumed: _Count
    ranks: _Ranks
    local_ranks: tuple[int, ...]
    batch: _Batch
    tail: Tail
    has_next: bool
    job: str = ""

    def __post_init__(self) -> None:
        local = self.local_ranks
        ascending = all(first < second for first, second in itertools.pairwise(local))
        if not (local and ascending and local[0] >= 0 and local[-1] < self.ranks):
            raise ValueError(f"local_ranks must be ascending ranks below {self.ranks}, got {local}")
        if self.rank not in local:
            raise ValueError(f"rank must be one of local_ranks, {local}, got {self.rank}")


class Metrics(msgspec.Struct, frozen=True, kw_only=True):
    """Counts since the start of the cache (see `exchange.Counts` for the first eight), and its
    present state.

    Attributes:
        evicted: Samples that eviction has removed.
        passes: Eviction passes.
        moved_bytes: Bytes that eviction has copied.
        cache_bytes: Bytes of the samples that wait in the cache space or are in use.
        used_bytes: Bytes of the cache space up to the last sample, gaps included.
        peak_bytes: Largest `used_bytes` so far.
        capacity: Bytes of the cache space.
        management_bytes: Bytes of indexes, lists and metadata.
    """

    samples: int
    hits: int
    pinned_hits: int
    requests: int
    requested_samples: int
    requested_bytes: int
    delivered_bytes: int
    direct_samples: int
    evicted: int
    passes: int
    moved_bytes: int
    cache_bytes: int
    used_bytes: int
    peak_bytes: int
    capacity: int
    management_bytes: int


class Failed(msgspec.Struct, frozen=True):
    """Answer to a request that cannot be served.

    Attributes:
        request_id: The batch request that failed; -1 if it was another kind of request.
        error: Name of a class of `core.errors`.
        text: Text of the error.
    """

    request_id: int
    error: str
    text: str


@dataclass(frozen=True)
class DeliveredBatch:
    """Batch reply as it is sent: `exchange.BatchReply` without the client, but with keys.

    Attributes:
        keys: Keys of the samples in UTF-8, one behind the other.
        key_ends: int64[n], offset in `keys` behind each key.
    """

    request_id: int
    sample_ids: SampleIds
    locations: NDArray[np.int64]
    key_ends: NDArray[np.int64]
    keys: bytes
    direct: NDArray[np.uint8]


def fingerprint(config: HostConfig) -> str:
    """Return a hash that is equal for equal configurations and reveals none of their secrets."""
    return hashlib.blake2b(msgspec.json.encode(config), digest_size=16).hexdigest()


def pack_batch_request(request_id: int, epoch_id: int, epoch_slots: EpochSlots) -> bytes:
    """Return the payload of a batch request."""
    head = _BATCH_REQUEST_HEAD.pack(request_id, epoch_id)
    return head + np.ascontiguousarray(epoch_slots, "<u4").tobytes()


def unpack_batch_request(payload: bytes, peer: str) -> tuple[int, int, EpochSlots]:
    """Return request_id, epoch_id and epoch slots of a batch request.

    Raises:
        ProtocolError: If the payload is no batch request.
    """
    head = _BATCH_REQUEST_HEAD.size
    if len(payload) < head or (len(payload) - head) % 4:
        raise protocol_error(
            peer, f"a batch request of {len(payload)} bytes", f"{head} bytes and 4 for each sample"
        )
    request_id, epoch_id = _BATCH_REQUEST_HEAD.unpack_from(payload)
    return request_id, epoch_id, np.frombuffer(payload, "<u4", offset=head).astype(np.uint32)


def pack_release(request_ids: list[int]) -> bytes:
    """Return the payload of a release."""
    return np.array(request_ids, dtype="<i8").tobytes()


def unpack_release(payload: bytes, peer: str) -> list[int]:
    """Return the request_ids of the batches that are released.

    Raises:
        ProtocolError: If the payload is no release.
    """
    if len(payload) % 8:
        raise protocol_error(
            peer, f"a release of {len(payload)} bytes", "8 bytes for each request_id"
        )
    request_ids: list[int] = np.frombuffer(payload, "<i8").tolist()
    return request_ids


def pack_batch_reply(batch: DeliveredBatch) -> bytes:
    """Return the payload of a batch reply."""
    head = _BATCH_REPLY_HEAD.pack(
        batch.request_id, len(batch.sample_ids), len(batch.keys), len(batch.direct)
    )
    return b"".join(
        [
            head,
            np.ascontiguousarray(batch.locations, "<i8").tobytes(),
            np.ascontiguousarray(batch.key_ends, "<i8").tobytes(),
            np.ascontiguousarray(batch.sample_ids, "<u4").tobytes(),
            batch.keys,
            batch.direct.tobytes(),
        ]
    )


def unpack_batch_reply(payload: bytes, peer: str) -> DeliveredBatch:
    """Return a batch reply; its `direct` is a view of the payload.

    Raises:
        ProtocolError: If the payload is no batch reply.
    """
    if len(payload) < _BATCH_REPLY_HEAD.size:
        raise protocol_error(
            peer,
            f"a batch reply of {len(payload)} bytes",
            f"at least the {_BATCH_REPLY_HEAD.size} bytes of its head",
        )
    request_id, count, key_bytes, direct_bytes = _BATCH_REPLY_HEAD.unpack_from(payload)
    body = _BYTES_PER_SAMPLE * count + key_bytes + direct_bytes
    if len(payload) != _BATCH_REPLY_HEAD.size + body:
        raise protocol_error(
            peer,
            f"a batch reply of {len(payload)} bytes",
            f"{_BATCH_REPLY_HEAD.size + body} bytes for {count} samples",
        )
    at = _BATCH_REPLY_HEAD.size
    locations = np.frombuffer(payload, "<i8", 3 * count, at).reshape(count, 3)
    at += _LOCATION_BYTES * count
    key_ends = np.frombuffer(payload, "<i8", count, at)
    at += _KEY_END_BYTES * count
    sample_ids = np.frombuffer(payload, "<u4", count, at)
    at += _SAMPLE_ID_BYTES * count
    keys = payload[at : at + key_bytes]
    direct = np.frombuffer(payload, np.uint8, direct_bytes, at + key_bytes)
    return DeliveredBatch(request_id, sample_ids, locations, key_ends, keys, direct)
