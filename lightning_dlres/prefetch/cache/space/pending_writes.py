"""Samples that have come and for which the cache space has no room in one piece yet."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import numpy as np

from lightning_dlres.prefetch.cache.space.cache_space import Bytes, CacheSpace, Lengths
from lightning_dlres.prefetch.order.sequence import Positions


@dataclass(eq=False)
class _PendingWrite:
    row: int
    positions: Positions
    lengths: Lengths
    data: Bytes


class PendingWrites:
    """A queue before the cache space.

    Args:
        space: where samples go.
    """

    def __init__(self, space: CacheSpace) -> None:
        self._space = space
        self._queue: deque[_PendingWrite] = deque()
        # Whether storing was tried in vain since something was let go.
        self._is_full = False

    @property
    def nbytes(self) -> int:
        """Bytes of what waits here."""
        return sum(int(landing.lengths.sum()) for landing in self._queue)

    def add(self, row: int, positions: Positions, lengths: Lengths, data: Bytes) -> None:
        """Line up samples; arguments as for `CacheSpace.store`."""
        if len(positions):
            self._queue.append(_PendingWrite(row, positions, lengths, data))

    def room_was_made(self) -> None:
        """Try again with the next `land`."""
        self._is_full = False

    def land(self) -> None:
        """Store what there is room for."""
        while self._queue and not self._is_full:
            landing = self._queue.popleft()
            stored = self._space.store(
                landing.row, landing.positions, landing.lengths, landing.data
            )
            if stored < len(landing.positions):
                data = landing.data[int(landing.lengths[:stored].sum()) :]
                self._queue.appendleft(
                    _PendingWrite(
                        landing.row, landing.positions[stored:], landing.lengths[stored:], data
                    )
                )
                self._is_full = True

    def take_out(self, row: int, wanted: Positions) -> list[tuple[int, Bytes]]:
        """Remove those of some positions that wait here, and return position and bytes of each."""
        found: list[tuple[int, Bytes]] = []
        for landing in self._queue:
            mine = np.isin(landing.positions, wanted)
            if landing.row != row or not mine.any():
                continue
            pieces = np.split(landing.data, np.cumsum(landing.lengths)[:-1])
            positions = landing.positions.tolist()
            found += [(positions[at], pieces[at]) for at in np.flatnonzero(mine).tolist()]
            rest = [pieces[at] for at in np.flatnonzero(~mine).tolist()]
            landing.positions, landing.lengths = landing.positions[~mine], landing.lengths[~mine]
            landing.data = np.concatenate(rest) if rest else np.empty(0, dtype=np.uint8)
        self._queue = deque(landing for landing in self._queue if len(landing.positions))
        return found

    def drop(self, row: int) -> None:
        """Forget what waits for an epoch that was given up."""
        self._queue = deque(landing for landing in self._queue if landing.row != row)
        self._is_full = False
