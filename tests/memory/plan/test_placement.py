"""Placement: storages with overlapping lifetimes never share memory."""

from __future__ import annotations

from itertools import combinations

from hypothesis import given
from hypothesis import strategies as st

from lightning_dlres.core.host.slab import aligned
from lightning_dlres.memory.plan.placement import Lifetime, least_size, overlap, place

LIVES = st.lists(
    st.builds(
        lambda nbytes, start, length: Lifetime(nbytes, start, start + length),
        st.integers(0, 5000),
        st.integers(0, 30),
        st.integers(0, 15),
    ),
    max_size=25,
)


def overlap_by_pairs(lives: list[Lifetime], offsets: list[int]) -> bool:
    """Return True if two storages share a byte while both live; compares every pair."""
    for (a, a_offset), (b, b_offset) in combinations(zip(lives, offsets, strict=True), 2):
        live_together = set(range(a.start, a.stop + 1)) & set(range(b.start, b.stop + 1))
        begin = max(a_offset, b_offset)
        end = min(a_offset + a.nbytes, b_offset + b.nbytes)
        if live_together and begin < end:
            return True
    return False


@given(lives=LIVES)
def test_no_two_live_storages_overlap(lives: list[Lifetime]) -> None:
    offsets, size = place(lives)
    assert overlap(lives, offsets) is None
    assert not overlap_by_pairs(lives, offsets)
    ends = [at + aligned(x.nbytes) for x, at in zip(lives, offsets, strict=True)]
    assert size >= max(ends, default=0)
    assert size >= least_size(lives)


@given(lives=LIVES, data=st.data())
def test_the_overlap_check_agrees_with_brute_force(
    lives: list[Lifetime], data: st.DataObject
) -> None:
    offsets = [data.draw(st.integers(0, 8000)) for _ in lives]
    assert (overlap(lives, offsets) is not None) == overlap_by_pairs(lives, offsets)


def test_storages_with_disjoint_lifetimes_share_memory() -> None:
    lives = [Lifetime(1024, 0, 3), Lifetime(1024, 4, 7), Lifetime(512, 2, 5)]
    offsets, size = place(lives)
    assert offsets[0] == offsets[1]
    assert size == 1536
