"""What the processes of a host say to the one that keeps its cache; each message is a frame of
`core.frames`. Small ones are msgpack; a take, a delivery and a release are arrays.
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

from lightning_dlres.core.errors import ProtocolError
from lightning_dlres.prefetch.order.sequence import MOST_SAMPLES, Positions, Tail
from lightning_dlres.prefetch.storage.source_options import SourceConfig

JOIN, JOINED, BEGIN, BEGUN, LEAVE, LEFT = "join", "joined", "begin", "begun", "leave", "left"
TAKE, DELIVERY, RELEASE, FAILED = "take", "delivery", "release", "failed"
METRICS, MEASURED = "metrics", "measured"

_Count = Annotated[int, msgspec.Meta(ge=0, le=1 << 48)]
# What is allocated for ranks and batches follows from these.
_Ranks = Annotated[int, msgspec.Meta(ge=1, le=1 << 20)]
_Batch = Annotated[int, msgspec.Meta(ge=1, le=MOST_SAMPLES)]
_TAKE = struct.Struct("<qq")
_DELIVERY = struct.Struct("<qqqq")


class HostConfig(msgspec.Struct, frozen=True, kw_only=True):
    """All that the process that keeps a cache needs to know; sizes in bytes. The capacity is the
    `share`-th part of what the user has given, which matters for advice only."""

    source: SourceConfig
    capacity: int
    prefetch: int = 32
    lookahead: int | None = None
    threshold: float = 0.75
    depth: int = 4
    kept: int = 0
    kept_directory: str | None = None
    share: int = 1


class Join(msgspec.Struct, frozen=True):
    """A process wants to use the cache; `config` is a fingerprint of what it expects."""

    config: str


class Joined(msgspec.Struct, frozen=True, kw_only=True):
    """Where the cache's memory is, and what the data set is like; `note`, in a line, is for users
    to know, "" where there is nothing."""

    pid: int
    cache_path: str
    cache_bytes: int
    kept_path: str
    kept_bytes: int
    samples: int
    total_bytes: int
    largest: int
    digest: str
    encoding: str
    nodes: int
    note: str


class Begin(msgspec.Struct, frozen=True, kw_only=True):
    """A process starts an epoch. `generation` counts its epochs, those given up too; `local_ranks`
    are those that this host's cache serves; `more` says whether another epoch follows."""

    generation: _Count
    seed: int
    epoch: _Count
    shuffle: bool
    consumed: _Count
    ranks: _Ranks
    local_ranks: tuple[int, ...]
    batch: _Batch
    tail: Tail
    more: bool

    def __post_init__(self) -> None:
        local = self.local_ranks
        ascending = all(first < second for first, second in itertools.pairwise(local))
        if not (local and ascending and local[0] >= 0 and local[-1] < self.ranks):
            raise ValueError(f"local ranks must be ascending ranks of {self.ranks}")


class Metrics(msgspec.Struct, frozen=True, kw_only=True):
    """Counts since the cache's start, see `exchange.Counts`; what is in the cache now, in bytes."""

    samples: int
    hits: int
    kept_hits: int
    requests: int
    requested_samples: int
    requested_bytes: int
    taken_bytes: int
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
    """What was asked for cannot be done; `take` is -1 where it was no take. `error` is the name of
    a class of `core.errors`."""

    take: int
    error: str
    text: str


@dataclass(frozen=True)
class Delivered:
    """Samples, in order; arrays as in `exchange.Delivery`. `keys` are in UTF-8, one behind the
    other, and end at `key_ends`."""

    take: int
    numbers: Positions
    places: NDArray[np.int64]
    key_ends: NDArray[np.int64]
    keys: bytes
    direct: NDArray[np.uint8]


def fingerprint(config: HostConfig) -> str:
    """Return what is equal for equal configurations, without saying the keys in them."""
    return hashlib.blake2b(msgspec.json.encode(config), digest_size=16).hexdigest()


def pack_take(take: int, generation: int, positions: Positions) -> bytes:
    """Return the payload of a take."""
    return _TAKE.pack(take, generation) + np.ascontiguousarray(positions, "<u4").tobytes()


def unpack_take(payload: bytes, peer: str) -> tuple[int, int, Positions]:
    """Return number, generation and positions of a take.

    Raises:
        ProtocolError: the payload is none.
    """
    if len(payload) < _TAKE.size or (len(payload) - _TAKE.size) % 4:
        raise ProtocolError(f"{peer} sent a take of {len(payload)} bytes.")
    take, generation = _TAKE.unpack_from(payload)
    return take, generation, np.frombuffer(payload, "<u4", offset=_TAKE.size).astype(np.uint32)


def pack_release(takes: list[int]) -> bytes:
    """Return the payload of a release."""
    return np.array(takes, dtype="<i8").tobytes()


def unpack_release(payload: bytes, peer: str) -> list[int]:
    """Return the numbers of the takes that are let go.

    Raises:
        ProtocolError: the payload is none.
    """
    if len(payload) % 8:
        raise ProtocolError(f"{peer} sent a release of {len(payload)} bytes.")
    takes: list[int] = np.frombuffer(payload, "<i8").tolist()
    return takes


def pack_delivery(delivered: Delivered) -> bytes:
    """Return the payload of a delivery."""
    count = len(delivered.numbers)
    head = _DELIVERY.pack(delivered.take, count, len(delivered.keys), len(delivered.direct))
    return b"".join(
        [
            head,
            np.ascontiguousarray(delivered.places, "<i8").tobytes(),
            np.ascontiguousarray(delivered.key_ends, "<i8").tobytes(),
            np.ascontiguousarray(delivered.numbers, "<u4").tobytes(),
            delivered.keys,
            delivered.direct.tobytes(),
        ]
    )


def unpack_delivery(payload: bytes, peer: str) -> Delivered:
    """Return what a delivery says; `direct` is a view of the payload.

    Raises:
        ProtocolError: the payload is none.
    """
    if len(payload) < _DELIVERY.size:
        raise ProtocolError(f"{peer} sent a delivery of {len(payload)} bytes.")
    take, count, key_bytes, direct_bytes = _DELIVERY.unpack_from(payload)
    if len(payload) != _DELIVERY.size + 36 * count + key_bytes + direct_bytes:
        raise ProtocolError(f"{peer} sent a delivery of {len(payload)} bytes for {count} samples.")
    at = _DELIVERY.size
    places = np.frombuffer(payload, "<i8", 3 * count, at).reshape(count, 3)
    at += 24 * count
    key_ends = np.frombuffer(payload, "<i8", count, at)
    at += 8 * count
    numbers = np.frombuffer(payload, "<u4", count, at)
    at += 4 * count
    keys = payload[at : at + key_bytes]
    direct = np.frombuffer(payload, np.uint8, direct_bytes, at + key_bytes)
    return Delivered(take, numbers, places, key_ends, keys, direct)
