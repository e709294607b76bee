"""Best-fit allocator for the memory of a tier.

A plan gives most storages an offset. A storage without one, or whose offset an earlier step still
uses, goes to the smallest free block that fits.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort

from lightning_dlres.core.host.slab import aligned


class FreeList:
    """Free blocks of a range of bytes. Adjacent free blocks are merged.

    Args:
        nbytes: Size of the range in bytes; rounded down to a multiple of the alignment.
    """

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes // aligned(1) * aligned(1)
        # Size of each free block by its offset; `_starts` has the offsets in ascending order.
        self._sizes = {0: self.nbytes} if self.nbytes else {}
        self._starts = sorted(self._sizes)
        # Size of each allocated block, with its padding, by its offset.
        self._allocated: dict[int, int] = {}

    @property
    def free_bytes(self) -> int:
        """Return the bytes of all free blocks together."""
        return sum(self._sizes.values())

    def allocate(self, nbytes: int) -> int | None:
        """Allocate in the smallest block that fits; return its offset, or None if none fits."""
        padded_size = max(aligned(nbytes), aligned(1))
        candidates = [(size, start) for start, size in self._sizes.items() if size >= padded_size]
        if not candidates:
            return None
        size, start = min(candidates)
        self._remove(start)
        if size > padded_size:
            self._add(start + padded_size, size - padded_size)
        self._allocated[start] = padded_size
        return start

    def allocate_at(self, offset: int, nbytes: int) -> int | None:
        """Allocate at an offset and return it; None if these bytes are not free."""
        padded_size = max(aligned(nbytes), aligned(1))
        index = bisect_right(self._starts, offset) - 1
        start = self._starts[index] if index >= 0 else 0
        size = self._sizes.get(start, 0)
        if index < 0 or offset + padded_size > start + size:
            return None
        self._remove(start)
        if offset > start:
            self._add(start, offset - start)
        if offset + padded_size < start + size:
            self._add(offset + padded_size, start + size - offset - padded_size)
        self._allocated[offset] = padded_size
        return offset

    def free(self, offset: int) -> None:
        """Free an allocated block.

        Raises:
            KeyError: If no allocated block starts at this offset.
        """
        size = self._allocated.pop(offset)
        index = bisect_left(self._starts, offset)
        if index < len(self._starts) and self._starts[index] == offset + size:
            size += self._remove(offset + size)
        if index > 0:
            previous = self._starts[index - 1]
            if previous + self._sizes[previous] == offset:
                size += self._remove(previous)
                offset = previous
        self._add(offset, size)

    def _add(self, start: int, size: int) -> None:
        insort(self._starts, start)
        self._sizes[start] = size

    def _remove(self, start: int) -> int:
        del self._starts[bisect_left(self._starts, start)]
        return self._sizes.pop(start)
