"""Cache space: one region of memory that eviction keeps compact.

Samples lie one behind the other. Eviction removes those that were released and moves the waiting
ones towards the start. An eviction pass runs in slices of a limited number of bytes. New samples
are stored behind the last one while the pass runs.
"""

from __future__ import annotations

import ctypes
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from lightning_dlres.core.errors import ConfigError
from lightning_dlres.core.units import format_bytes
from lightning_dlres.prefetch.cache.space import entry_kernels as kernels

# uint32[n], positions in the part of an epoch that this host needs.
EpochSlots = NDArray[np.uint32]
Lengths = NDArray[np.int64]
Bytes = NDArray[np.uint8]
# int64[n, 3]: entry, offset and length of samples in use.
UsedEntries = NDArray[np.int64]

# Approximate number of bytes that one slice of an eviction pass moves. A batch reply may have to
# wait for a slice, which takes a fraction of a millisecond.
SLICE_BYTES = 1 << 20
# Bytes that eviction moves for each byte that is stored. So a pass is faster than the stores that
# fill the room behind the last sample.
_MOVED_PER_STORED_BYTE = 4
# Maximum number of copies in one slice.
_MAX_MOVES = 256
# Entries of the metadata list at the start; it doubles when it is full.
_INITIAL_ENTRIES = 1024


@dataclass(frozen=True)
class Move:
    """Copy within the space; offsets and length in bytes."""

    source: int
    target: int
    length: int


class CacheSpace:
    """Cache space and the metadata list of its samples.

    A row and an epoch slot identify a sample. There are two rows, because samples of the next epoch
    may arrive while those of the current one are still needed. A stored sample waits until `use`,
    is in use until `release`, and may be evicted after that. A sample in use never moves.

    Args:
        data: uint8[capacity], the memory.
        samples: Expected number of epoch slots in an epoch.
        threshold: Part of the capacity, in (0, 1], that has to be used before a store starts an
            eviction pass.

    Attributes:
        capacity: Bytes of the memory.
        threshold: As in the arguments.
        slot_table: int32[2, n]. For each row and epoch slot, the entry of its sample, or one of the
            negative states of `entry_kernels`.
        evicted: Number of samples that eviction has removed.
        moved_bytes: Bytes that eviction has copied.
        passes: Number of eviction passes.
        peak: Largest `end` so far, in bytes.
        slice_bytes: Minimum number of bytes that eviction may move with each store.
        moved_per_stored_byte: Bytes that eviction moves for each byte that is stored.
        on_move: Called with every move, and with None at the start and the end of a pass; for tests
            and pictures.

    Raises:
        ConfigError: If the threshold is not in (0, 1].
    """

    def __init__(self, data: Bytes, samples: int, threshold: float = 0.75) -> None:
        if not 0 < threshold <= 1:
            raise ConfigError(
                f"threshold must be in (0, 1], got {threshold!r}. Use threshold=0.75."
            )
        self.capacity = len(data)
        self.threshold = threshold
        self.slot_table = np.full((2, max(samples, 1)), kernels.UNFETCHED, dtype=np.int32)
        self.evicted = 0
        self.moved_bytes = 0
        self.passes = 0
        self.peak = 0
        self.slice_bytes, self.moved_per_stored_byte = SLICE_BYTES, _MOVED_PER_STORED_BYTE
        self.on_move: Callable[[Move | None], None] | None = None
        self._data = data
        self._address = data.ctypes.data
        self._entries = np.zeros(_INITIAL_ENTRIES, dtype=kernels.ENTRY)
        self._registers = np.zeros(len(kernels.REGISTERS), dtype=np.int64)
        self._registers[[kernels.HEAD, kernels.TAIL, kernels.FREE]] = kernels.NIL
        self._moves = np.empty((_MAX_MOVES, 3), dtype=np.int64)
        kernels.link_free(self._entries, self._registers, 0)

    @property
    def end(self) -> int:
        """Offset behind the last sample, in bytes: the used part of the capacity."""
        return int(self._registers[kernels.END])

    @property
    def live_bytes(self) -> int:
        """Bytes of the samples that wait or are in use."""
        return int(self._registers[kernels.LIVE])

    @property
    def num_entries(self) -> int:
        """Number of entries in the metadata list."""
        return int(self._registers[kernels.COUNT])

    @property
    def is_evicting(self) -> bool:
        """True while an eviction pass is under way."""
        return bool(self._registers[kernels.EVICTING])

    def management_bytes(self) -> int:
        """Return the bytes of the metadata list, the slot table and the list of moves."""
        return int(self._entries.nbytes + self.slot_table.nbytes + self._moves.nbytes)

    def reset_row(self, row: int, epoch_slots: int = 0) -> None:
        """Make a row ready for another epoch.

        Waiting samples of the row may be evicted, because no request will name them. Samples in use
        stay until they are released.

        Args:
            row: 0 or 1.
            epoch_slots: Number of epoch slots that the other epoch has.
        """
        if epoch_slots > self.slot_table.shape[1]:
            # Padding makes an epoch longer than the data set.
            grown = np.full((2, epoch_slots), kernels.UNFETCHED, dtype=np.int32)
            grown[:, : self.slot_table.shape[1]] = self.slot_table
            self.slot_table = grown
        abandoned = kernels.abandon_row(self._entries, self._registers, self.slot_table, row)
        if abandoned and not self.is_evicting:
            self._begin_pass()

    def store(self, row: int, epoch_slots: EpochSlots, lengths: Lengths, data: Bytes) -> int:
        """Store samples one behind the other, as many as there is room for.

        If there is too little room behind the last sample, eviction runs to its end first. Samples
        that do not fit even then have to wait until something is released.

        Args:
            row: 0 or 1.
            epoch_slots: uint32[n].
            lengths: int64[n], in bytes.
            data: uint8[sum of lengths].

        Returns:
            The number of stored samples, counted from the first.
        """
        self._grow(len(epoch_slots))
        stored = self._append(row, epoch_slots, lengths, data)
        if stored < len(epoch_slots):
            self.compact_fully()
            rest = data[int(lengths[:stored].sum()) :]
            stored += self._append(row, epoch_slots[stored:], lengths[stored:], rest)
        if not self.is_evicting and self.end >= self.threshold * self.capacity:
            self._begin_pass()
        stored_bytes = int(lengths[:stored].sum())
        self.advance(max(self.slice_bytes, self.moved_per_stored_byte * stored_bytes))
        return stored

    def use(self, row: int, epoch_slots: EpochSlots) -> UsedEntries:
        """Mark waiting samples as in use; return int64[n, 3]: entry, offset and length of each.

        Raises:
            KeyError: If one of them is not waiting. None of them is marked then.
        """
        used = np.empty((len(epoch_slots), 3), dtype=np.int64)
        if not kernels.use(self._entries, self.slot_table, row, epoch_slots, used):
            raise KeyError(f"not all of {len(epoch_slots)} samples are waiting in the cache")
        return used

    def release(self, used: UsedEntries) -> None:
        """Let samples in use be evicted; `used` are rows of the array that `use` returned.

        Raises:
            KeyError: If one of them was released before.
        """
        if kernels.release(self._entries, self._registers, self.slot_table, used[:, 0].copy()):
            raise KeyError("a sample was released twice")

    def view(self, offset: int, length: int) -> Bytes:
        """Return uint8[length], a view of the memory."""
        return self._data[offset : offset + length]

    def advance(self, max_bytes: int = SLICE_BYTES) -> bool:
        """Advance an eviction pass, if there is one, by about `max_bytes` moved bytes; return true
        if there is more to do."""
        if self.is_evicting:
            count, evicted = kernels.evict(self._entries, self._registers, self._moves, max_bytes)
            self.evicted += evicted
            for source, target, length in self._moves[:count].tolist():
                # All moves go towards the start, in this order: none overwrites the source of a
                # later one.
                ctypes.memmove(self._address + target, self._address + source, length)
                self.moved_bytes += length
                if self.on_move:
                    self.on_move(Move(source, target, length))
            if not self.is_evicting and self.on_move:
                self.on_move(None)
        return self.is_evicting

    def compact_fully(self) -> None:
        """Evict and move everything that can be, in one go."""
        while self.advance(self.capacity):
            pass
        if self.end > self.live_bytes or self._registers[kernels.NUM_EVICTABLE]:
            self._begin_pass()
            while self.advance(self.capacity):
                pass

    def entries(self) -> list[np.void]:
        """Return the metadata list in the order of offsets; for tests and pictures."""
        entries, entry = [], int(self._registers[kernels.HEAD])
        while entry != kernels.NIL:
            entries.append(self._entries[entry].copy())
            entry = int(self._entries[entry]["next"])
        return entries

    def _append(self, row: int, epoch_slots: EpochSlots, lengths: Lengths, data: Bytes) -> int:
        start = self.end
        stored: int = kernels.append(
            self._entries,
            self._registers,
            self.slot_table,
            row,
            epoch_slots,
            lengths,
            self.capacity,
        )
        self._data[start : self.end] = data[: self.end - start]
        self.peak = max(self.peak, self.end)
        return stored

    def _begin_pass(self) -> None:
        self.passes += 1
        kernels.begin_pass(self._registers)
        if self.on_move:
            self.on_move(None)

    def _grow(self, more: int) -> None:
        """Make room for `more` entries in the metadata list."""
        if self.num_entries + more <= len(self._entries):
            return
        before = len(self._entries)
        grown = np.zeros(max(2 * before, before + more), dtype=kernels.ENTRY)
        grown[:before] = self._entries
        self._entries = grown
        kernels.link_free(self._entries, self._registers, before)


@dataclass(eq=False)
class _PendingWrite:
    row: int
    epoch_slots: EpochSlots
    lengths: Lengths
    data: Bytes


class PendingWrites:
    """Queue of samples that have arrived and have no contiguous room in the cache space yet; the
    oldest comes first.

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
        """Remove the samples of these epoch slots from the queue, if they are in it.

        Returns:
            Epoch slot and bytes of each removed sample.
        """
        removed: list[tuple[int, Bytes]] = []
        head = self._head()
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
        if self._head() != head:
            # The sample for which there was no room is gone; a smaller one may follow.
            self._is_full = False
        return removed

    def _head(self) -> tuple[int, int] | None:
        """Return the row and epoch slot of the next sample to be stored; None without one."""
        return (self._queue[0].row, int(self._queue[0].epoch_slots[0])) if self._queue else None

    def drop(self, row: int) -> None:
        """Drop the samples of an aborted epoch, which used this row."""
        self._queue = deque(write for write in self._queue if write.row != row)
        self._is_full = False


def check_fits(largest: int, capacity: int, key: str, share: int = 1) -> None:
    """Raise an error if a sample is larger than the cache.

    Args:
        largest: Bytes of the largest sample.
        capacity: Bytes of the cache.
        key: Key of the largest sample.
        share: Number that the user's capacity was divided by to get `capacity`.

    Raises:
        ConfigError: If the sample does not fit; it names the key.
    """
    if largest > capacity:
        part = f" (1/{share} for this split)" if share > 1 else ""
        raise ConfigError(
            f"capacity must be at least the largest sample, {format_bytes(largest)} ({key!r}), "
            f"got {format_bytes(capacity)}{part}. Use capacity={2 * largest * share}."
        )
