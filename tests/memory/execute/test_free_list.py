"""Free list: allocations never overlap, and all bytes are free in the end."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from lightning_dlres.core.host.slab import ALIGNMENT, aligned
from lightning_dlres.memory.execute.transfer.free_list import FreeList

UNITS = 40
TOTAL = UNITS * ALIGNMENT


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 10 * ALIGNMENT)), max_size=80))
def test_allocations_never_overlap(requests: list[tuple[bool, int]]) -> None:
    # The free list leaves out the 7 bytes, which are less than a unit of memory.
    pool, taken = FreeList(TOTAL + 7), dict[int, int]()
    for allocates, number in requests:
        if allocates:
            need = max(aligned(number), ALIGNMENT)
            # A slow oracle: one flag per unit of memory.
            used = {byte for at, size in taken.items() for byte in range(at, at + size, ALIGNMENT)}
            runs, run = [0], 0
            for byte in range(0, TOTAL, ALIGNMENT):
                run = 0 if byte in used else run + ALIGNMENT
                runs.append(run)
            offset = pool.allocate(number)
            assert (offset is not None) == (max(runs) >= need)
            if offset is not None:
                assert offset % ALIGNMENT == 0
                assert offset + need <= TOTAL
                assert used.isdisjoint(range(offset, offset + need, ALIGNMENT))
                taken[offset] = need
        elif taken:
            offset = sorted(taken)[number % len(taken)]
            del taken[offset]
            pool.free(offset)
        assert pool.free_bytes == TOTAL - sum(taken.values())
    for offset in taken:
        pool.free(offset)
    assert pool.allocate(TOTAL) == 0


@given(st.lists(st.tuples(st.integers(0, 45), st.integers(1, 6)), max_size=40))
def test_an_offset_is_allocated_only_if_all_bytes_are_free(requests: list[tuple[int, int]]) -> None:
    pool, used = FreeList(TOTAL), set[int]()
    for number, (at, length) in enumerate(requests):
        places = set(range(at, at + length))
        is_free = at + length <= UNITS and used.isdisjoint(places)
        offset = pool.allocate_at(at * ALIGNMENT, length * ALIGNMENT)
        assert offset == (at * ALIGNMENT if is_free else None)
        if is_free and number % 3 == 0:
            pool.free(at * ALIGNMENT)
        elif is_free:
            used |= places
        assert pool.free_bytes == TOTAL - len(used) * ALIGNMENT
