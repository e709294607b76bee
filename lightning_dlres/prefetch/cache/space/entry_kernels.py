"""The metadata list of the cache space (C6) as an array of records, linked in the order of their
offsets, and the loops over it: no object per sample, and no loop over samples in Python. They keep
the interpreter's lock: they take microseconds, and to get it back from another thread takes longer.

`places` is int32[2, n]: for each of two epochs and each position of the cache index, which entry
holds its sample, or one of the negative states below.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import int32, int64, typeof, uint32

from lightning_dlres.core.compiled import compiled, part

UNASKED, ASKED, DONE, KEPT, BROKEN = -1, -2, -3, -4, -5
WAITING, IN_USE, HIT = 0, 1, 2
NIL = -1
NO_ROW = 255

ENTRY = np.dtype(
    [
        ("offset", np.int64),
        ("length", np.int64),
        ("position", np.uint32),
        ("next", np.int32),
        ("previous", np.int32),
        ("row", np.uint8),
        ("state", np.uint8),
    ],
    align=True,
)

# Where the list and a pass stand: int64[len(REGISTERS)].
REGISTERS = (
    "head",
    "tail",
    "free",
    "cursor",
    "gap",
    "write",
    "end",
    "live",
    "passing",
    "count",
    "hits",
)
HEAD, TAIL, FREE, CURSOR, GAP, WRITE, END, LIVE, PASSING, COUNT, HITS = range(len(REGISTERS))

# What the loops are called with, as Numba has it.
_ENTRIES: Any = typeof(np.empty(0, dtype=ENTRY))
_AT: Any = int64[::1]
_PLACES: Any = int32[:, ::1]
_POSITIONS: Any = uint32[::1]


@compiled((_ENTRIES, _AT, int64))
def link_free(entries: Any, at: Any, first: int) -> None:
    """Chain the entries from `first` on as free ones."""
    for number in range(len(entries) - 1, first - 1, -1):
        entries[number].next = at[FREE]
        at[FREE] = number


@compiled((_ENTRIES, _AT, _PLACES, int64, _POSITIONS, int64[::1], int64))
def append(
    entries: Any, at: Any, places: Any, row: int, positions: Any, lengths: Any, capacity: int
) -> int:
    """Enter samples at the end, one behind the other, and return how many there was room for. There
    are enough free entries."""
    stored = 0
    for number in range(len(positions)):
        length = lengths[number]
        if at[END] + length > capacity:
            break
        new = at[FREE]
        entry = entries[new]
        at[FREE] = entry.next
        entry.offset, entry.length = at[END], length
        entry.position, entry.row, entry.state = positions[number], row, WAITING
        entry.previous, entry.next = at[TAIL], NIL
        if at[TAIL] == NIL:
            at[HEAD] = new
        else:
            entries[at[TAIL]].next = new
        at[TAIL] = new
        if at[PASSING] and at[CURSOR] == NIL:
            # A pass that has begun over nothing; any other meets the new entry by its links.
            at[CURSOR] = at[GAP] = new
        places[row, positions[number]] = new
        at[END] += length
        at[LIVE] += length
        at[COUNT] += 1
        stored += 1
    return stored


@compiled((_ENTRIES, _PLACES, int64, _POSITIONS, int64[:, ::1]))
def use(entries: Any, places: Any, row: int, positions: Any, found: Any) -> bool:
    """Mark samples as in use, and note entry, offset and length of each in int64[n, 3]; return
    False, and change nothing, where one of them is not waiting."""
    for number in range(len(positions)):
        place = places[row, positions[number]]
        if place < 0 or entries[place].state != WAITING:
            return False
        found[number, 0] = place
        found[number, 1], found[number, 2] = entries[place].offset, entries[place].length
    for number in range(len(positions)):
        entries[found[number, 0]].state = IN_USE
    return True


@compiled((_ENTRIES, _AT, _PLACES, int64[::1]))
def release(entries: Any, at: Any, places: Any, used: Any) -> int:
    """Mark entries in use as hit: nobody looks at them any more. Return how many were not in
    use."""
    wrong = 0
    for number in range(len(used)):
        entry = entries[used[number]]
        if entry.state != IN_USE:
            wrong += 1
            continue
        entry.state = HIT
        at[HITS] += 1
        at[LIVE] -= entry.length
        if entry.row != NO_ROW:
            places[entry.row, entry.position] = DONE
    return wrong


@compiled((_ENTRIES, _AT, _PLACES, int64))
def abandon(entries: Any, at: Any, places: Any, row: int) -> int:
    """Mark what waits for an epoch that is over as hit, and part what is in use from its row;
    return how many samples waited."""
    number, found = at[HEAD], 0
    while number != NIL:
        entry = entries[number]
        if entry.row == row:
            if entry.state == WAITING:
                entry.state = HIT
                at[HITS] += 1
                at[LIVE] -= entry.length
                found += 1
            entry.row = NO_ROW
        number = entry.next
    places[row, :] = UNASKED
    return found


@compiled((_AT,))
def begin_pass(at: Any) -> None:
    """Start a pass over everything that is there."""
    at[PASSING], at[CURSOR], at[GAP], at[WRITE] = 1, at[HEAD], at[HEAD], 0


@compiled((_ENTRIES, _AT, int64[:, ::1], int64))
def evict(entries: Any, at: Any, moves: Any, most_bytes: int) -> tuple[int, int]:
    """Go on with a pass until so many bytes have to move or `moves` (int64[m, 3]: source, target,
    length) is full; return how many moves there are and how many samples were evicted.

    Entries before the gap have their final place; those from the gap to the cursor are in use and
    cannot move, but later samples may be put before them.
    """
    count, moved, evicted = 0, 0, 0
    while at[CURSOR] != NIL:
        number = at[CURSOR]
        entry = entries[number]
        following = entry.next
        if entry.state == IN_USE:
            at[CURSOR] = following
            continue
        if entry.state == HIT:
            if at[GAP] == number:
                at[GAP] = following
            _remove(entries, at, number)
            evicted += 1
            at[CURSOR] = following
            continue
        while at[GAP] != number:
            # What is in the way may have been let go since the pass went by.
            blocking = entries[at[GAP]]
            if blocking.state == HIT:
                after = blocking.next
                _remove(entries, at, at[GAP])
                evicted += 1
                at[GAP] = after
            elif at[WRITE] + entry.length > blocking.offset:
                at[WRITE] = blocking.offset + blocking.length
                at[GAP] = blocking.next
            else:
                break
        target = at[WRITE]
        if entry.offset != target:
            last = count - 1
            joins = (
                count > 0
                and moves[last, 0] + moves[last, 2] == entry.offset
                and moves[last, 1] + moves[last, 2] == target
            )
            if not joins and (count == len(moves) or moved >= most_bytes):
                return count, evicted
            if joins:
                moves[last, 2] += entry.length
            else:
                moves[count, 0], moves[count, 1] = entry.offset, target
                moves[count, 2] = entry.length
                count += 1
            moved += entry.length
            entry.offset = target
        at[WRITE] = target + entry.length
        if at[GAP] == number:
            at[GAP] = following
        else:
            _remove_links(entries, at, number)
            _insert(entries, at, number, at[GAP])
        at[CURSOR] = following
    evicted += _finish(entries, at)
    return count, evicted


@part
def _finish(entries: Any, at: Any) -> int:
    """End a pass: what was let go behind its back, up to the first sample to be hit, goes too
    (C10); return how many."""
    number, evicted = at[HEAD], 0
    while number != NIL and entries[number].state != WAITING:
        following = entries[number].next
        if entries[number].state == HIT:
            _remove(entries, at, number)
            evicted += 1
        number = following
    at[PASSING] = 0
    at[END] = 0
    if at[TAIL] != NIL:
        last = entries[at[TAIL]]
        at[END] = last.offset + last.length
    return evicted


@part
def _remove(entries: Any, at: Any, number: int) -> None:
    """Take a hit entry out of the list."""
    _remove_links(entries, at, number)
    entries[number].next = at[FREE]
    at[FREE] = number
    at[COUNT] -= 1
    at[HITS] -= 1


@part
def _remove_links(entries: Any, at: Any, number: int) -> None:
    before, after = entries[number].previous, entries[number].next
    if before == NIL:
        at[HEAD] = after
    else:
        entries[before].next = after
    if after == NIL:
        at[TAIL] = before
    else:
        entries[after].previous = before


@part
def _insert(entries: Any, at: Any, number: int, before: int) -> None:
    earlier = entries[before].previous
    entries[number].previous, entries[number].next = earlier, before
    entries[before].previous = number
    if earlier == NIL:
        at[HEAD] = number
    else:
        entries[earlier].next = number
