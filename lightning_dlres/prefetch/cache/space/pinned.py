"""The pinned tier: samples that stay for all epochs, the only way to save bytes, since an epoch
needs every sample once.

Which ones is decided before the first of them arrives: those that the first epoch needs first, as
many as fit. They are copied when they come by, and never move.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import int64, uint32
from numpy.typing import NDArray

from lightning_dlres.core.compiled import compiled
from lightning_dlres.prefetch.cache.space.cache_space import Bytes
from lightning_dlres.prefetch.order.sequence import Positions


class PinnedSamples:
    """A region of memory, or of a file, that holds samples by number.

    Args:
        data: uint8[capacity], the memory.
        sizes: int64[samples], in bytes.
    """

    def __init__(self, data: Bytes, sizes: NDArray[np.int64]) -> None:
        self.capacity = len(data)
        self.ready = np.zeros(len(sizes) if len(data) else 0, dtype=np.bool_)
        self.used = 0
        self._data = data
        self._sizes = sizes
        self._offsets = np.full(len(self.ready), -1, dtype=np.int64)
        # Whether one did not fit.
        self._is_full = not len(data)

    def management_bytes(self) -> int:
        """Return the bytes of the arrays."""
        return self.ready.nbytes + self._offsets.nbytes

    def choose(self, numbers: Positions) -> None:
        """Choose from the samples of an epoch, in its order, until one does not fit: after a resume
        the first epoch may be short."""
        if not self._is_full:
            self.used, self._is_full = _choose(
                numbers, self._sizes, self._offsets, self.used, self.capacity
            )

    def put(self, numbers: Positions, data: Bytes) -> None:
        """Copy those of some samples that were chosen; `data` is uint8[sum of their sizes]."""
        if not self.used:
            return
        wanted = (self._offsets[numbers] >= 0) & ~self.ready[numbers]
        if not wanted.any():
            return
        ends = np.cumsum(self._sizes[numbers])
        for at in np.flatnonzero(wanted).tolist():
            number, end = int(numbers[at]), int(ends[at])
            offset, size = int(self._offsets[number]), int(self._sizes[number])
            self._data[offset : offset + size] = data[end - size : end]
            self.ready[number] = True

    def offsets(self, numbers: Positions) -> NDArray[np.int64]:
        """Return where samples are that are ready."""
        return self._offsets[numbers]


@compiled((uint32[::1], int64[::1], int64[::1], int64, int64))
def _choose(numbers: Any, sizes: Any, offsets: Any, used: int, capacity: int) -> tuple[int, bool]:
    for number in numbers:
        if offsets[number] >= 0:
            continue
        if used + sizes[number] > capacity:
            return used, True
        offsets[number] = used
        used += sizes[number]
    return used, False
