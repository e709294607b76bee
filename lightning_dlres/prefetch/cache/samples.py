"""Samples as user code sees them: a key, and bytes that lie in the cache and were not copied.

They stay where they are for as long as anything that was made of them without a copy is alive: a
memoryview, an array, a tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, overload

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lightning_dlres.core.host import shared_memory
from lightning_dlres.prefetch.cache.exchange import CACHED_TIER, DIRECT_TIER, KEPT_TIER
from lightning_dlres.prefetch.cache.messages import Delivered
from lightning_dlres.prefetch.order.sequence import mixed
from lightning_dlres.prefetch.storage.manifest import SampleTable

Bytes = NDArray[np.uint8]


class Sample:
    """One sample. No dataclass: Lightning would take it apart to look for tensors.

    Attributes:
        number: its number in the data set.
        array: uint8[n], its bytes; not to be written to.
    """

    __slots__ = ("_epoch_seed", "_key", "_shared", "array", "number")

    def __init__(
        self,
        key: str | SampleTable,
        number: int,
        array: Bytes,
        epoch_seed: int,
        shared: bool = False,
    ) -> None:
        # Most keys and seeds are never looked at.
        self._key, self.number, self.array, self._epoch_seed = key, number, array, epoch_seed
        self._shared = shared

    def __reduce__(self) -> tuple[Any, ...]:
        return Sample, (self.key, self.number, self.array, self._epoch_seed, self._shared)

    @property
    def key(self) -> str:
        """Its name in the data set."""
        return self._key if isinstance(self._key, str) else self._key.key(self.number)

    @property
    def seed(self) -> int:
        """A number for what is random about it: another one in every epoch, and the same on any
        rank, in any worker and after a restart."""
        return mixed(self._epoch_seed + self.number)

    def __repr__(self) -> str:
        return f"Sample({self.key!r}, number={self.number}, {len(self)} bytes)"

    @property
    def data(self) -> memoryview:
        """The bytes, without a copy and read-only."""
        return self.array.data.toreadonly()

    def tensor(self) -> Tensor:
        """Return uint8[n], without a copy unless the sample stays in memory for later epochs."""
        if not len(self.array):
            return torch.empty(0, dtype=torch.uint8)
        return torch.from_numpy(self.array.copy() if self._shared else self.array)

    def __len__(self) -> int:
        return len(self.array)


class Regions:
    """The memory of a host's cache, as a process has mapped it.

    Args:
        cache_path, cache_bytes, kept_path, kept_bytes: as in `messages.Joined`.
    """

    def __init__(self, cache_path: str, cache_bytes: int, kept_path: str, kept_bytes: int) -> None:
        self.names = (cache_path, cache_bytes, kept_path, kept_bytes)
        self.cache = shared_memory.attach(cache_path, cache_bytes)
        self.kept = shared_memory.attach(kept_path, kept_bytes)


_mapped: dict[tuple[str, int, str, int], Regions] = {}


def mapped(names: tuple[str, int, str, int]) -> Regions:
    """Return regions, mapped once in this process."""
    if names not in _mapped:
        # The cache before is gone, or its process could not have another one's path.
        _mapped.clear()
        _mapped[names] = Regions(*names)
    return _mapped[names]


class Samples(Sequence[Sample]):
    """What one delivery brought, in order.

    It can be sent to another process of the host, where it looks at the same memory; whoever sends
    it has to hold it meanwhile.

    Args:
        delivered: where the samples are.
        regions: the memory.
        released: called when neither this nor anything made of it without a copy is left; None: it
            is somebody else's.
    """

    def __init__(
        self,
        delivered: Delivered,
        regions: Regions,
        released: Callable[[], None] | None = None,
    ) -> None:
        self.delivered, self.numbers = delivered, delivered.numbers
        self.epoch_seed = 0
        self._regions = regions
        self._cache = regions.cache if released is None else _held(regions.cache, released)

    def __len__(self) -> int:
        return len(self.delivered.numbers)

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
        return _unpacked, (self.delivered, self._regions.names, self.epoch_seed)

    def _sample(self, at: int) -> Sample:
        delivered = self.delivered
        tier, offset, length = delivered.places[at].tolist()
        memory = {CACHED_TIER: self._cache, KEPT_TIER: self._regions.kept}.get(
            tier, delivered.direct
        )
        start = int(delivered.key_ends[at - 1]) if at else 0
        key = delivered.keys[start : int(delivered.key_ends[at])].decode()
        array = memory[offset : offset + length]
        if tier == DIRECT_TIER:
            array = array.copy()
        elif tier == KEPT_TIER:
            # Other epochs and ranks look at the same bytes.
            array.flags.writeable = False
        number = int(delivered.numbers[at])
        return Sample(key, number, array, self.epoch_seed, tier == KEPT_TIER)


class _Lease:
    """Stands between an array and the memory below it, and tells when the array and all views of it
    are gone."""

    def __init__(self, memory: Bytes, released: Callable[[], None]) -> None:
        self._memory = memory
        self._released = released
        self.__array_interface__ = memory.__array_interface__

    def __del__(self) -> None:
        self._released()


def _held(memory: Bytes, released: Callable[[], None]) -> Bytes:
    return np.asarray(_Lease(memory, released))


def _unpacked(delivered: Delivered, names: tuple[str, int, str, int], seed: int) -> Samples:
    samples = Samples(delivered, mapped(names))
    samples.epoch_seed = seed
    return samples
