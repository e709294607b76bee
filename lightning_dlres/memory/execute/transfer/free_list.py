"""Best-fit allocator of the bytes of a slab.

It serves storages without a planned offset: those of the first step, and of steps that differ from
the planned one.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort

from lightning_dlres.core.host.slab import aligned


class FreeList:
    """Free blocks of a range of bytes. Adjacent free blocks are merged.

    Args:
        nbytes: Size of the range, rounded down to whole alignment units.
    """

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes // aligned(1) * aligned(1)
        # Size of each free block by its offset; `_starts` has the offsets in ascending order.
        self._sizes = {0: self.nbytes} if self.nbytes else {}
        self._starts = sorted(self._sizes)
        self._allocated: dict[int, int] = {}

    @property
    def free_bytes(self) -> int:
        """Return the bytes of all free blocks together."""
        return sum(self._sizes.values())

    def allocate(self, nbytes: int) -> int | None:
        """Return the offset of the smallest block that fits; None if no block does."""
        need = max(aligned(nbytes), aligned(1))
        fits = [(size, start) for start, size in self._sizes.items() if size >= need]
        if not fits:
            return None
        size, start = min(fits)
        self._drop(start)
        if size > need:
            self._add(start + need, size - need)
        self._allocated[start] = need
        return start

    def allocate_at(self, offset: int, nbytes: int) -> int | None:
        """Allocate at an offset and return it; None if these bytes are not free."""
        need = max(aligned(nbytes), aligned(1))
        index = bisect_right(self._starts, offset) - 1
        start = self._starts[index] if index >= 0 else 0
        size = self._sizes.get(start, 0)
        if index < 0 or offset + need > start + size:
            return None
        self._drop(start)
        if offset > start:
            self._add(start, offset - start)
        if offset + need < start + size:
            self._add(offset + need, start + size - offset - need)
        self._allocated[offset] = need
        return offset

    def free(self, offset: int) -> None:
        """Free an allocated block."""
        size = self._allocated.pop(offset)
        index = bisect_left(self._starts, offset)
        if index < len(self._starts) and self._starts[index] == offset + size:
            size += self._drop(offset + size)
        if index > 0:
            before = self._starts[index - 1]
            if before + self._sizes[before] == offset:
                size += self._drop(before)
                offset = before
        self._add(offset, size)

    def _add(self, start: int, size: int) -> None:
        insort(self._starts, start)
        self._sizes[start] = size

    def _drop(self, start: int) -> int:
        del self._starts[bisect_left(self._starts, start)]
        return self._sizes.pop(start)
