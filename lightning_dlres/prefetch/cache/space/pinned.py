"""Pinned tier: samples that stay in memory, or on a local disk, for all epochs.

An epoch needs every sample once, so only pinning reduces the bytes that are fetched. The tier
chooses the first samples of the first epoch, as many as fit, before any of them arrives. A chosen
sample is copied when it arrives, and never moves.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import int64, uint32
from numpy.typing import NDArray

from lightning_dlres.core.compiled import compiled
from lightning_dlres.prefetch.cache.space.cache_space import Bytes
from lightning_dlres.prefetch.order.sequence import SampleIds


class PinnedSamples:
    """Region of memory, or of a file, that holds samples by sample_id.

    Args:
        data: uint8[capacity], the memory or the mapped file.
        sizes: int64[samples], size of each sample of the data set, in bytes.

    Attributes:
        capacity: Size of the region, in bytes.
        is_ready: bool[samples], true for samples that were copied into the region. It is empty if
            `capacity` is 0.
        used: Bytes that are reserved for chosen samples, whether copied or not.
    """

    def __init__(self, data: Bytes, sizes: NDArray[np.int64]) -> None:
        self.capacity = len(data)
        self.is_ready = np.zeros(len(sizes) if len(data) else 0, dtype=np.bool_)
        self.used = 0
        self._data = data
        self._sizes = sizes
        # int64[samples], offset of each sample in the region. -1: the sample was not chosen.
        self._offsets = np.full(len(self.is_ready), -1, dtype=np.int64)
        # True after a sample did not fit. Then no further sample is chosen, not even a smaller one.
        self._is_full = not len(data)

    def management_bytes(self) -> int:
        """Return the size of the arrays that manage the region, in bytes."""
        return self.is_ready.nbytes + self._offsets.nbytes

    def choose(self, sample_ids: SampleIds) -> None:
        """Choose samples of an epoch, in its order, until one does not fit.

        Call this for every epoch. After a resume, the first epoch may be too short to fill the
        region.
        """
        if not self._is_full:
            self.used, self._is_full = _choose(
                sample_ids, self._sizes, self._offsets, self.used, self.capacity
            )

    def put(self, sample_ids: SampleIds, data: Bytes) -> None:
        """Copy those samples that are chosen and not copied yet.

        Args:
            sample_ids: uint32[n], samples that arrived, chosen or not.
            data: uint8[sum of their sizes], the bytes of all of them, in this order.
        """
        if not self.used:
            return
        is_new = (self._offsets[sample_ids] >= 0) & ~self.is_ready[sample_ids]
        if not is_new.any():
            return
        ends = np.cumsum(self._sizes[sample_ids])
        for index in np.flatnonzero(is_new).tolist():
            sample_id, end = int(sample_ids[index]), int(ends[index])
            offset, size = int(self._offsets[sample_id]), int(self._sizes[sample_id])
            self._data[offset : offset + size] = data[end - size : end]
            self.is_ready[sample_id] = True

    def offsets(self, sample_ids: SampleIds) -> NDArray[np.int64]:
        """Return int64[n], the offsets of samples that are ready."""
        return self._offsets[sample_ids]


@compiled((uint32[::1], int64[::1], int64[::1], int64, int64))
def _choose(
    sample_ids: Any, sizes: Any, offsets: Any, used: int, capacity: int
) -> tuple[int, bool]:
    """Set the offsets of samples until one does not fit; return (bytes used, region is full)."""
    for sample_id in sample_ids:
        if offsets[sample_id] >= 0:
            continue
        if used + sizes[sample_id] > capacity:
            return used, True
        offsets[sample_id] = used
        used += sizes[sample_id]
    return used, False
