"""The prefetch cache space (C5 to C10): one region of memory in which samples lie one behind the
other, from which those that were hit go away, and in which those to be hit close up.

Eviction does not stop the world (C9): a pass advances by so many bytes at a time, and samples are
stored behind the zone in between.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from lightning_dlres.core.errors import ConfigError, got_expected
from lightning_dlres.core.units import format_bytes
from lightning_dlres.prefetch.cache.space import entry_kernels as kernels
from lightning_dlres.prefetch.order.sequence import Positions

Lengths = NDArray[np.int64]
Bytes = NDArray[np.uint8]
Used = NDArray[np.int64]

# What one slice of a pass moves at most: a fraction of a millisecond, while a reply waits.
SLICE_BYTES = 1 << 20
_MOST_MOVES = 256
_FIRST_ENTRIES = 1024


@dataclass(frozen=True)
class Move:
    """One copy within the space, in bytes."""

    source: int
    target: int
    length: int


class CacheSpace:
    """The cache space and its metadata list.

    Samples are named by a row (0 or 1, since the next epoch's may come while this one's are still
    needed) and a position in that epoch's cache index. A sample is waiting when it is stored, in
    use from `use` to `release`, and hit from then on. What is in use never moves.

    Args:
        data: uint8[capacity], the memory.
        samples: how many positions an epoch has, as a rule.
        threshold: the part of the capacity at which a store starts an eviction pass, in (0, 1].

    Raises:
        ConfigError: the threshold is not such a part.
    """

    def __init__(self, data: Bytes, samples: int, threshold: float = 0.75) -> None:
        if not 0 < threshold <= 1:
            raise ConfigError(
                got_expected("threshold", threshold, "a part of the capacity", "threshold=0.75")
            )
        self.capacity = len(data)
        self.threshold = threshold
        self.places = np.full((2, max(samples, 1)), kernels.UNASKED, dtype=np.int32)
        self.evicted = 0
        self.moved_bytes = 0
        self.passes = 0
        self.peak = 0
        # What a store has a pass move: so many bytes, and as many times what it stores.
        self.slice_bytes, self.pace = SLICE_BYTES, 4
        # Called with every move, and with None at the start and the end of a pass.
        self.watch: Callable[[Move | None], None] | None = None
        self._data = data
        self._address = data.ctypes.data
        self._entries = np.zeros(_FIRST_ENTRIES, dtype=kernels.ENTRY)
        self._at = np.zeros(len(kernels.REGISTERS), dtype=np.int64)
        self._at[[kernels.HEAD, kernels.TAIL, kernels.FREE]] = kernels.NIL
        self._moves = np.empty((_MOST_MOVES, 3), dtype=np.int64)
        kernels.link_free(self._entries, self._at, 0)

    @property
    def end(self) -> int:
        """Behind the last sample: the used capacity, in bytes."""
        return int(self._at[kernels.END])

    @property
    def live_bytes(self) -> int:
        """Bytes of the samples that wait or are in use."""
        return int(self._at[kernels.LIVE])

    @property
    def count(self) -> int:
        """How many entries the metadata list has."""
        return int(self._at[kernels.COUNT])

    @property
    def passing(self) -> bool:
        """Whether an eviction pass has begun and not ended."""
        return bool(self._at[kernels.PASSING])

    def management_bytes(self) -> int:
        """Return the bytes of the metadata list and of `places`."""
        return int(self._entries.nbytes + self.places.nbytes + self._moves.nbytes)

    def clear(self, row: int, positions: int = 0) -> None:
        """Make a row ready for another epoch, with so many positions: what waits in it counts as
        hit, since nobody will ask for it, and what is in use stays until it is released."""
        if positions > self.places.shape[1]:
            # Padding makes an epoch longer than the data set.
            grown = np.full((2, positions), kernels.UNASKED, dtype=np.int32)
            grown[:, : self.places.shape[1]] = self.places
            self.places = grown
        if kernels.abandon(self._entries, self._at, self.places, row) and not self.passing:
            self._begin_pass()

    def store(self, row: int, positions: Positions, lengths: Lengths, data: Bytes) -> int:
        """Store samples one behind the other and return how many of them there was room for.

        `data` is uint8[sum of lengths]. Where the room behind the last sample is too little, a pass
        is carried to its end first; what there is no room for then has to wait until something is
        released.
        """
        self._grow(len(positions))
        stored = self._append(row, positions, lengths, data)
        if stored < len(positions):
            self.compact_fully()
            rest = data[int(lengths[:stored].sum()) :]
            stored += self._append(row, positions[stored:], lengths[stored:], rest)
        if not self.passing and self.end >= self.threshold * self.capacity:
            self._begin_pass()
        # Faster than the room behind the zone fills up.
        self.advance(max(self.slice_bytes, self.pace * int(lengths[:stored].sum())))
        return stored

    def use(self, row: int, positions: Positions) -> Used:
        """Mark waiting samples as in use; return int64[n, 3]: entry, offset and length of each.

        Raises:
            KeyError: one of them is not waiting in the cache; nothing is marked.
        """
        found = np.empty((len(positions), 3), dtype=np.int64)
        if not kernels.use(self._entries, self.places, row, positions, found):
            raise KeyError(f"not every one of {len(positions)} samples waits in the cache")
        return found

    def release(self, used: Used) -> None:
        """Mark samples in use as hit, as `use` has returned them.

        Raises:
            KeyError: one of them was released before.
        """
        if kernels.release(self._entries, self._at, self.places, used[:, 0].copy()):
            raise KeyError("a sample was released twice")

    def view(self, offset: int, length: int) -> Bytes:
        """Return uint8[length], the memory itself."""
        return self._data[offset : offset + length]

    def advance(self, most_bytes: int = SLICE_BYTES) -> bool:
        """Go on with a pass, if there is one, by about so many moved bytes; return whether there is
        more to do."""
        if self.passing:
            count, evicted = kernels.evict(self._entries, self._at, self._moves, most_bytes)
            self.evicted += evicted
            for source, target, length in self._moves[:count].tolist():
                # Towards the start and in this order: no move overwrites what a later one reads.
                ctypes.memmove(self._address + target, self._address + source, length)
                self.moved_bytes += length
                if self.watch:
                    self.watch(Move(source, target, length))
            if not self.passing and self.watch:
                self.watch(None)
        return self.passing

    def compact_fully(self) -> None:
        """Evict and move all that can be."""
        while self.advance(self.capacity):
            pass
        if self.end > self.live_bytes or self._at[kernels.HITS]:
            self._begin_pass()
            while self.advance(self.capacity):
                pass

    def entries(self) -> list[np.void]:
        """Return the metadata list in the order of offsets; for tests and pictures."""
        found, number = [], int(self._at[kernels.HEAD])
        while number != kernels.NIL:
            found.append(self._entries[number].copy())
            number = int(self._entries[number]["next"])
        return found

    def _append(self, row: int, positions: Positions, lengths: Lengths, data: Bytes) -> int:
        start = self.end
        stored: int = kernels.append(
            self._entries, self._at, self.places, row, positions, lengths, self.capacity
        )
        self._data[start : self.end] = data[: self.end - start]
        self.peak = max(self.peak, self.end)
        return stored

    def _begin_pass(self) -> None:
        self.passes += 1
        kernels.begin_pass(self._at)
        if self.watch:
            self.watch(None)

    def _grow(self, more: int) -> None:
        if self.count + more <= len(self._entries):
            return
        before = len(self._entries)
        grown = np.zeros(max(2 * before, before + more), dtype=kernels.ENTRY)
        grown[:before] = self._entries
        self._entries = grown
        kernels.link_free(self._entries, self._at, before)


def check_fits(largest: int, capacity: int, key: str, share: int = 1) -> None:
    """Raise where a sample is larger than the cache, which has the `share`-th part of what the user
    has given.

    Raises:
        ConfigError: with the sample's key.
    """
    if largest > capacity:
        part = f" (a part of 1/{share} for this split)" if share > 1 else ""
        raise ConfigError(
            f"capacity must be at least the largest sample, {format_bytes(largest)} ({key!r}), "
            f"got {format_bytes(capacity)}{part}. Use capacity={2 * largest * share}."
        )
