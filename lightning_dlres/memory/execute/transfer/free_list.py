"""Which parts of a slab are free: best fit, neighbours joined. For what no plan has given a place:
the first step, and steps that turn out unlike the planned one."""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort

from lightning_dlres.core.host.slab import aligned


class FreeList:
    """The free pieces of so many bytes."""

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes // aligned(1) * aligned(1)
        self._sizes = {0: self.nbytes} if self.nbytes else {}
        self._starts = sorted(self._sizes)
        self._taken: dict[int, int] = {}

    @property
    def free(self) -> int:
        """Return the bytes that are free, in all pieces together."""
        return sum(self._sizes.values())

    def take(self, nbytes: int) -> int | None:
        """Return the offset of a piece for so many bytes; None where there is none."""
        need = max(aligned(nbytes), aligned(1))
        fits = [(size, start) for start, size in self._sizes.items() if size >= need]
        if not fits:
            return None
        size, start = min(fits)
        self._drop(start)
        if size > need:
            self._add(start + need, size - need)
        self._taken[start] = need
        return start

    def take_at(self, offset: int, nbytes: int) -> int | None:
        """Return this offset if a piece for so many bytes is free there, which is taken then; None
        if not."""
        need = max(aligned(nbytes), aligned(1))
        place = bisect_right(self._starts, offset) - 1
        start = self._starts[place] if place >= 0 else 0
        size = self._sizes.get(start, 0)
        if place < 0 or offset + need > start + size:
            return None
        self._drop(start)
        if offset > start:
            self._add(start, offset - start)
        if offset + need < start + size:
            self._add(offset + need, start + size - offset - need)
        self._taken[offset] = need
        return offset

    def give_back(self, offset: int) -> None:
        """Free a piece that was taken."""
        size = self._taken.pop(offset)
        place = bisect_left(self._starts, offset)
        if place < len(self._starts) and self._starts[place] == offset + size:
            size += self._drop(offset + size)
        if place > 0:
            before = self._starts[place - 1]
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
