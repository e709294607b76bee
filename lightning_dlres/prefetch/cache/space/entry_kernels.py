"""Metadata list of the cache space, and the compiled loops over it.

The list is an array of records, linked in the order of their offsets. So there is no object per
sample, and no Python loop over samples. The loops keep the interpreter's lock: they take
microseconds, and getting the lock back from another thread would take longer.

Names: an *entry* is the index of a record. `registers` holds the state of the list and of the
eviction pass, see `REGISTERS`. The `slot_table` is int32[2, n]. For each row (one of two epochs)
and epoch slot, it holds the entry of the sample, or one of the negative states below.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import int32, int64, typeof, uint32

from lightning_dlres.core.compiled import compiled, subroutine

# States of an epoch slot without an entry. FETCHING: a fetch is in flight, or its sample waits for
# room. DONE: used and released, or handed out without being stored. PINNED: in the pinned tier.
# FAILED: the fetch has failed.
UNFETCHED, FETCHING, DONE, PINNED, FAILED = -1, -2, -3, -4, -5
# States of an entry.
WAITING, IN_USE, EVICTABLE = 0, 1, 2
# No entry: the end of a list.
NIL = -1
# Row of an entry whose epoch has ended.
NO_ROW = 255

ENTRY = np.dtype(
    [
        ("offset", np.int64),
        ("length", np.int64),
        ("epoch_slot", np.uint32),
        ("next", np.int32),
        ("previous", np.int32),
        ("row", np.uint8),
        ("state", np.uint8),
    ],
    align=True,
)

# int64[len(REGISTERS)].
REGISTERS = (
    "head",  # first entry
    "tail",  # last entry
    "free",  # first free record; free ones are chained by `next`
    "cursor",  # of a pass: next entry to handle
    "gap",  # of a pass: first entry before which later samples may be moved
    "write",  # of a pass: offset behind the samples that have their final place
    "end",  # offset behind the last sample
    "live",  # bytes of samples that wait or are in use
    "evicting",  # 1 during a pass
    "count",  # number of entries in the list
    "num_evictable",  # number of entries that may be evicted
)
(
    HEAD,
    TAIL,
    FREE,
    CURSOR,
    GAP,
    WRITE,
    END,
    LIVE,
    EVICTING,
    COUNT,
    NUM_EVICTABLE,
) = range(len(REGISTERS))

# Argument types of the loops, for Numba.
_ENTRIES: Any = typeof(np.empty(0, dtype=ENTRY))
_REGISTERS: Any = int64[::1]
_SLOT_TABLE: Any = int32[:, ::1]
_EPOCH_SLOTS: Any = uint32[::1]


@compiled((_ENTRIES, _REGISTERS, int64))
def link_free(entries: Any, registers: Any, first: int) -> None:
    """Chain the records from `first` on as free ones."""
    for entry in range(len(entries) - 1, first - 1, -1):
        entries[entry].next = registers[FREE]
        registers[FREE] = entry


@compiled((_ENTRIES, _REGISTERS, _SLOT_TABLE, int64, _EPOCH_SLOTS, int64[::1], int64))
def append(
    entries: Any,
    registers: Any,
    slot_table: Any,
    row: int,
    epoch_slots: Any,
    lengths: Any,
    capacity: int,
) -> int:
    """Add samples at the end, one behind the other, as many as fit; return their number. The caller
    makes sure that there are enough free records."""
    stored = 0
    for at in range(len(epoch_slots)):
        length = lengths[at]
        if registers[END] + length > capacity:
            break
        new = registers[FREE]
        record = entries[new]
        registers[FREE] = record.next
        record.offset, record.length = registers[END], length
        record.epoch_slot, record.row, record.state = epoch_slots[at], row, WAITING
        record.previous, record.next = registers[TAIL], NIL
        if registers[TAIL] == NIL:
            registers[HEAD] = new
        else:
            entries[registers[TAIL]].next = new
        registers[TAIL] = new
        if registers[EVICTING] and registers[CURSOR] == NIL:
            # The pass began with an empty list. In any other pass, the cursor reaches the new
            # entry by the links.
            registers[CURSOR] = registers[GAP] = new
        slot_table[row, epoch_slots[at]] = new
        registers[END] += length
        registers[LIVE] += length
        registers[COUNT] += 1
        stored += 1
    return stored


@compiled((_ENTRIES, _SLOT_TABLE, int64, _EPOCH_SLOTS, int64[:, ::1]))
def use(entries: Any, slot_table: Any, row: int, epoch_slots: Any, used: Any) -> bool:
    """Mark samples as in use, and write entry, offset and length of each into `used`, int64[n, 3].
    Return False, and change no state, if one of them is not waiting."""
    for at in range(len(epoch_slots)):
        entry = slot_table[row, epoch_slots[at]]
        if entry < 0 or entries[entry].state != WAITING:
            return False
        used[at, 0] = entry
        used[at, 1], used[at, 2] = entries[entry].offset, entries[entry].length
    for at in range(len(epoch_slots)):
        entries[used[at, 0]].state = IN_USE
    return True


@compiled((_ENTRIES, _REGISTERS, _SLOT_TABLE, int64[::1]))
def release(entries: Any, registers: Any, slot_table: Any, used: Any) -> int:
    """Let entries in use be evicted. Return the number of entries that were not in use."""
    wrong = 0
    for at in range(len(used)):
        record = entries[used[at]]
        if record.state != IN_USE:
            wrong += 1
            continue
        record.state = EVICTABLE
        registers[NUM_EVICTABLE] += 1
        registers[LIVE] -= record.length
        if record.row != NO_ROW:
            slot_table[record.row, record.epoch_slot] = DONE
    return wrong


@compiled((_ENTRIES, _REGISTERS, _SLOT_TABLE, int64))
def abandon_row(entries: Any, registers: Any, slot_table: Any, row: int) -> int:
    """End the epoch of a row, which another epoch will use. Let its waiting samples be evicted, and
    detach those in use from the row. Return the number of samples that waited."""
    entry, abandoned = registers[HEAD], 0
    while entry != NIL:
        record = entries[entry]
        if record.row == row:
            if record.state == WAITING:
                record.state = EVICTABLE
                registers[NUM_EVICTABLE] += 1
                registers[LIVE] -= record.length
                abandoned += 1
            record.row = NO_ROW
        entry = record.next
    slot_table[row, :] = UNFETCHED
    return abandoned


@compiled((_REGISTERS,))
def begin_pass(registers: Any) -> None:
    """Begin an eviction pass at the first entry."""
    registers[EVICTING], registers[WRITE] = 1, 0
    registers[CURSOR], registers[GAP] = registers[HEAD], registers[HEAD]


@compiled((_ENTRIES, _REGISTERS, int64[:, ::1], int64))
def evict(entries: Any, registers: Any, moves: Any, max_bytes: int) -> tuple[int, int]:
    """Advance a pass until about `max_bytes` are to be moved or `moves` is full.

    Entries before the gap have their final place. Those from the gap to the cursor were in use when
    the cursor passed them. They do not move, but later samples may be moved before them.

    Args:
        entries: The records.
        registers: See `REGISTERS`.
        moves: int64[m, 3], filled with source, target and length of each copy that the caller has
            to make. Moves of neighbours are joined.
        max_bytes: Approximate number of bytes to move.

    Returns:
        The number of moves, and the number of evicted samples.
    """
    count, moved, evicted = 0, 0, 0
    while registers[CURSOR] != NIL:
        entry = registers[CURSOR]
        record = entries[entry]
        following = record.next
        if record.state == IN_USE:
            registers[CURSOR] = following
            continue
        if record.state == EVICTABLE:
            if registers[GAP] == entry:
                registers[GAP] = following
            _remove(entries, registers, entry)
            evicted += 1
            registers[CURSOR] = following
            continue
        while registers[GAP] != entry:
            # The entry at the gap was in use when the cursor passed it, and may be released now.
            blocking = entries[registers[GAP]]
            if blocking.state == EVICTABLE:
                after = blocking.next
                _remove(entries, registers, registers[GAP])
                evicted += 1
                registers[GAP] = after
            elif registers[WRITE] + record.length > blocking.offset:
                registers[WRITE] = blocking.offset + blocking.length
                registers[GAP] = blocking.next
            else:
                break
        target = registers[WRITE]
        if record.offset != target:
            last = count - 1
            joins = (
                count > 0
                and moves[last, 0] + moves[last, 2] == record.offset
                and moves[last, 1] + moves[last, 2] == target
            )
            if not joins and (count == len(moves) or moved >= max_bytes):
                return count, evicted
            if joins:
                moves[last, 2] += record.length
            else:
                moves[count, 0], moves[count, 1] = record.offset, target
                moves[count, 2] = record.length
                count += 1
            moved += record.length
            record.offset = target
        registers[WRITE] = target + record.length
        if registers[GAP] == entry:
            registers[GAP] = following
        else:
            # The sample was moved before the gap. Keep the list in the order of offsets.
            _remove_links(entries, registers, entry)
            _insert(entries, registers, entry, registers[GAP])
        registers[CURSOR] = following
    evicted += _finish(entries, registers)
    return count, evicted


@subroutine
def _finish(entries: Any, registers: Any) -> int:
    """End a pass, and remove the evictable entries before the first waiting one. They were released
    after the cursor had passed them. Return their number."""
    entry, evicted = registers[HEAD], 0
    while entry != NIL and entries[entry].state != WAITING:
        following = entries[entry].next
        if entries[entry].state == EVICTABLE:
            _remove(entries, registers, entry)
            evicted += 1
        entry = following
    registers[EVICTING] = 0
    registers[END] = 0
    if registers[TAIL] != NIL:
        last = entries[registers[TAIL]]
        registers[END] = last.offset + last.length
    return evicted


@subroutine
def _remove(entries: Any, registers: Any, entry: int) -> None:
    """Remove an evictable entry from the list."""
    _remove_links(entries, registers, entry)
    entries[entry].next = registers[FREE]
    registers[FREE] = entry
    registers[COUNT] -= 1
    registers[NUM_EVICTABLE] -= 1


@subroutine
def _remove_links(entries: Any, registers: Any, entry: int) -> None:
    before, after = entries[entry].previous, entries[entry].next
    if before == NIL:
        registers[HEAD] = after
    else:
        entries[before].next = after
    if after == NIL:
        registers[TAIL] = before
    else:
        entries[after].previous = before


@subroutine
def _insert(entries: Any, registers: Any, entry: int, before: int) -> None:
    """Link an entry in front of another one."""
    earlier = entries[before].previous
    entries[entry].previous, entries[entry].next = earlier, before
    entries[before].previous = entry
    if earlier == NIL:
        registers[HEAD] = entry
    else:
        entries[earlier].next = entry
