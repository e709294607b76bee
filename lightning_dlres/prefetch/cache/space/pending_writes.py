"""Queue of samples that have arrived and have no contiguous room in the cache space yet."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import numpy as np

from lightning_dlres.prefetch.cache.space.cache_space import Bytes, CacheSpace, EpochSlots, Lengths


@dataclass(eq=False)
class _PendingWrite:
    row: int
    epoch_slots: EpochSlots
    lengths: Lengths
    data: Bytes


class PendingWrites:
    """Queue of writes to the cache space, oldest first.

    Args:
        space: Cache space to write to.
    """

    def __init__(self, space: CacheSpace) -> None:
        self._space = space
        self._queue: deque[_PendingWrite] = deque()
        # True if a write failed for lack of room and nothing was released since. Another try would
        # scan the whole space in vain.
        self._is_full = False

    @property
    def nbytes(self) -> int:
        """Bytes of the samples in the queue."""
        return sum(int(write.lengths.sum()) for write in self._queue)

    def add(self, row: int, epoch_slots: EpochSlots, lengths: Lengths, data: Bytes) -> None:
        """Add samples to the queue; arguments as for `CacheSpace.store`."""
        if len(epoch_slots):
            self._queue.append(_PendingWrite(row, epoch_slots, lengths, data))

    def retry(self) -> None:
        """Let the next `write` try again: something was released."""
        self._is_full = False

    def write(self) -> None:
        """Store samples from the head of the queue, as many as there is room for."""
        while self._queue and not self._is_full:
            write = self._queue.popleft()
            stored = self._space.store(write.row, write.epoch_slots, write.lengths, write.data)
            if stored < len(write.epoch_slots):
                data = write.data[int(write.lengths[:stored].sum()) :]
                self._queue.appendleft(
                    _PendingWrite(
                        write.row, write.epoch_slots[stored:], write.lengths[stored:], data
                    )
                )
                self._is_full = True

    def remove(self, row: int, epoch_slots: EpochSlots) -> list[tuple[int, Bytes]]:
        """Remove those samples of some epoch slots that are in the queue.

        Returns:
            Epoch slot and bytes of each removed sample.
        """
        removed: list[tuple[int, Bytes]] = []
        for write in self._queue:
            matches = np.isin(write.epoch_slots, epoch_slots)
            if write.row != row or not matches.any():
                continue
            pieces = np.split(write.data, np.cumsum(write.lengths)[:-1])
            slots = write.epoch_slots.tolist()
            removed += [(slots[at], pieces[at]) for at in np.flatnonzero(matches).tolist()]
            rest = [pieces[at] for at in np.flatnonzero(~matches).tolist()]
            write.epoch_slots, write.lengths = write.epoch_slots[~matches], write.lengths[~matches]
            write.data = np.concatenate(rest) if rest else np.empty(0, dtype=np.uint8)
        self._queue = deque(write for write in self._queue if len(write.epoch_slots))
        return removed

    def drop(self, row: int) -> None:
        """Drop the samples of an aborted epoch."""
        self._queue = deque(write for write in self._queue if write.row != row)
        self._is_full = False
