"""Free list and slab: allocations never overlap, and all bytes are free in the end."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_dlres.core.errors import ConfigError
from lightning_dlres.core.host.slab import ALIGNMENT, Slab, aligned
from lightning_dlres.memory.execute.transfer.free_list import FreeList

TOTAL = 40 * ALIGNMENT


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 10 * ALIGNMENT)), max_size=80))
def test_allocations_never_overlap(requests: list[tuple[bool, int]]) -> None:
    pool, taken = FreeList(TOTAL + 7), dict[int, int]()
    for allocates, number in requests:
        if allocates:
            need = max(aligned(number), ALIGNMENT)
            # A slow oracle: one flag per unit of memory.
            used = {byte for o, n in taken.items() for byte in range(o, o + n, ALIGNMENT)}
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
        is_free = at + length <= 40 and used.isdisjoint(places)
        offset = pool.allocate_at(at * ALIGNMENT, length * ALIGNMENT)
        assert offset == (at * ALIGNMENT if is_free else None)
        if is_free and number % 3 == 0:
            pool.free(at * ALIGNMENT)
        elif is_free:
            used |= places
        assert pool.free_bytes == TOTAL - len(used) * ALIGNMENT


def test_the_file_of_a_slab_has_no_name(tmp_path: Path) -> None:
    slab = Slab(10_000, tmp_path)
    slab.piece(512, 100).fill_(7)
    assert list(tmp_path.iterdir()) == []
    assert slab.piece(500, 24).tolist() == [0] * 12 + [7] * 12


@pytest.mark.parametrize("place", [(-1, 5), (0, 1001), (1000, 1)])
def test_a_piece_beyond_the_slab_is_refused(place: tuple[int, int]) -> None:
    with pytest.raises(ConfigError, match="within its 1000"):
        Slab(1000).piece(*place)


def test_a_slab_that_is_too_large_for_the_disk_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="of free space, got"):
        Slab(1 << 50, tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_missing_directory_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="directory must be writable"):
        Slab(100, tmp_path / "absent")
