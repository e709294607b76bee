"""Samples for user code: a key, and bytes that lie in the cache and are not copied.

A sample stays in place as long as the sample or any view of its bytes is alive: a memoryview, an
array or a tensor that was made without a copy.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, overload

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lightning_dlres.core.host import shared_memory
from lightning_dlres.prefetch.cache.exchange import CACHED_TIER, DIRECT_TIER, PINNED_TIER
from lightning_dlres.prefetch.cache.messages import DeliveredBatch
from lightning_dlres.prefetch.order.sequence import splitmix64
from lightning_dlres.prefetch.storage.manifest import SampleTable

Bytes = NDArray[np.uint8]


class Sample:
    """One sample of a data set.

    It is no dataclass, because Lightning would look for tensors in its fields and rebuild it.

    Attributes:
        sample_id: Number of the sample in the data set.
        array: uint8[n], its bytes. Do not write to them.
    """

    __slots__ = ("_epoch_seed", "_is_shared", "_key", "array", "sample_id")

    def __init__(
        self,
        key: str | SampleTable,
        sample_id: int,
        array: Bytes,
        epoch_seed: int,
        is_shared: bool = False,
    ) -> None:
        # Key and seed are computed on demand: most of them are never read.
        self._key, self.sample_id, self.array, self._epoch_seed = key, sample_id, array, epoch_seed
        # True for a pinned sample, whose bytes other epochs and ranks read, too.
        self._is_shared = is_shared

    def __reduce__(self) -> tuple[Any, ...]:
        arguments = (self.key, self.sample_id, self.array, self._epoch_seed, self._is_shared)
        return Sample, arguments

    @property
    def key(self) -> str:
        """Name of the sample in the data set."""
        return self._key if isinstance(self._key, str) else self._key.key(self.sample_id)

    @property
    def seed(self) -> int:
        """Seed for random augmentations: it differs from epoch to epoch, and is the same on any
        rank, in any worker and after a restart."""
        return splitmix64(self._epoch_seed + self.sample_id)

    def __repr__(self) -> str:
        return f"Sample({self.key!r}, sample_id={self.sample_id}, {len(self)} bytes)"

    @property
    def data(self) -> memoryview:
        """The bytes, without a copy and read-only."""
        return self.array.data.toreadonly()

    def tensor(self) -> Tensor:
        """Return uint8[n], without a copy unless the sample is pinned for later epochs."""
        if not len(self.array):
            return torch.empty(0, dtype=torch.uint8)
        return torch.from_numpy(self.array.copy() if self._is_shared else self.array)

    def __len__(self) -> int:
        return len(self.array)


class Regions:
    """Memory of a host's cache, mapped into this process.

    Args:
        cache_path: As in `messages.Joined`.
        cache_bytes: As in `messages.Joined`.
        pinned_path: As in `messages.Joined`.
        pinned_bytes: As in `messages.Joined`.

    Attributes:
        names: The four arguments, with which another process can map the same memory.
        cache: uint8[cache_bytes], the cache space.
        pinned: uint8[pinned_bytes], the pinned tier.
    """

    def __init__(
        self, cache_path: str, cache_bytes: int, pinned_path: str, pinned_bytes: int
    ) -> None:
        self.names = (cache_path, cache_bytes, pinned_path, pinned_bytes)
        self.cache = shared_memory.attach(cache_path, cache_bytes)
        self.pinned = shared_memory.attach(pinned_path, pinned_bytes)


_mapped: dict[tuple[str, int, str, int], Regions] = {}


def map_regions(names: tuple[str, int, str, int]) -> Regions:
    """Return regions by their `names`; only the last ones stay mapped for the next call."""
    if names not in _mapped:
        # A worker process reads from one cache at a time, so the earlier cache has ended.
        _mapped.clear()
        _mapped[names] = Regions(*names)
    return _mapped[names]


class Samples(Sequence[Sample]):
    """Samples of one delivered batch, in order.

    They can be sent to another process of this host, which reads the same memory. The sender has to
    hold its own object until that process is done.

    Args:
        batch: Locations of the samples.
        regions: Memory that they lie in.
        on_release: Called once neither this object nor any view of its memory is alive. None: the
            object in the sending process keeps the batch leased.

    Attributes:
        sample_ids: uint32[n].
        epoch_seed: Seed of the epoch, from which each sample derives its own. The loader sets it.
    """

    def __init__(
        self,
        batch: DeliveredBatch,
        regions: Regions,
        on_release: Callable[[], None] | None = None,
    ) -> None:
        self.batch, self.sample_ids = batch, batch.sample_ids
        self.epoch_seed = 0
        self._regions = regions
        self._cache = regions.cache if on_release is None else _leased(regions.cache, on_release)

    def __len__(self) -> int:
        return len(self.sample_ids)

    @overload
    def __getitem__(self, index: int) -> Sample: ...
    @overload
    def __getitem__(self, index: slice) -> list[Sample]: ...
    def __getitem__(self, index: int | slice) -> Sample | list[Sample]:
        if isinstance(index, slice):
            return [self._sample(at) for at in range(*index.indices(len(self)))]
        at = index + len(self) if index < 0 else index
        if not 0 <= at < len(self):
            raise IndexError(index)
        return self._sample(at)

    def __iter__(self) -> Iterator[Sample]:
        return (self._sample(at) for at in range(len(self)))

    def __reduce__(self) -> tuple[Any, ...]:
        return _unpickle, (self.batch, self._regions.names, self.epoch_seed)

    def _sample(self, at: int) -> Sample:
        batch = self.batch
        tier, offset, length = batch.locations[at].tolist()
        memory = {CACHED_TIER: self._cache, PINNED_TIER: self._regions.pinned}.get(
            tier, batch.direct
        )
        start = int(batch.key_ends[at - 1]) if at else 0
        key = batch.keys[start : int(batch.key_ends[at])].decode()
        array = memory[offset : offset + length]
        if tier == DIRECT_TIER:
            # A view would keep the whole message alive.
            array = array.copy()
        elif tier == PINNED_TIER:
            # Other epochs and ranks read the same bytes.
            array.flags.writeable = False
        sample_id = int(batch.sample_ids[at])
        return Sample(key, sample_id, array, self.epoch_seed, tier == PINNED_TIER)


class _LeasedMemory:
    """Base object of an array. NumPy frees it after the array and all of its views."""

    def __init__(self, memory: Bytes, on_release: Callable[[], None]) -> None:
        self._memory = memory
        self._on_release = on_release
        self.__array_interface__ = memory.__array_interface__

    def __del__(self) -> None:
        self._on_release()


def _leased(memory: Bytes, on_release: Callable[[], None]) -> Bytes:
    return np.asarray(_LeasedMemory(memory, on_release))


def _unpickle(batch: DeliveredBatch, names: tuple[str, int, str, int], seed: int) -> Samples:
    samples = Samples(batch, map_regions(names))
    samples.epoch_seed = seed
    return samples
