"""Where data lie in one slab: data whose lifetimes do not overlap share memory (Method A, A3).

Largest first, each in the lowest gap that holds it among those that live with it: within a few
percent of the least possible on the networks that were tried, and checked by `overlap`, which does
not know how the places were found.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from lightning_dlres.core.host.slab import aligned


@dataclass(frozen=True)
class Lifetime:
    """So many bytes, needed from event `start` to event `stop`, both included."""

    nbytes: int
    start: int
    stop: int

    def meets(self, other: Lifetime) -> bool:
        """Return whether both are needed at some time."""
        return self.start <= other.stop and other.start <= self.stop


def place(lives: Sequence[Lifetime]) -> tuple[list[int], int]:
    """Return an offset for each, and the size of the slab."""
    offsets, size = [0] * len(lives), 0
    placed: list[int] = []
    for index in sorted(range(len(lives)), key=lambda i: (-lives[i].nbytes, lives[i].start)):
        life, at = lives[index], 0
        need = aligned(life.nbytes)
        for other in sorted((i for i in placed if lives[i].meets(life)), key=offsets.__getitem__):
            if offsets[other] - at >= need:
                break
            at = max(at, offsets[other] + aligned(lives[other].nbytes))
        offsets[index], size = at, max(size, at + need)
        placed.append(index)
    return offsets, size


def overlap(lives: Sequence[Lifetime], offsets: Sequence[int]) -> tuple[int, int] | None:
    """Return two data that would be in each other's memory; None is the proof that there are none.

    Sweeps over time: what lives at one moment must be apart when sorted by offset."""
    for moment in sorted({life.start for life in lives}):
        living = [i for i, life in enumerate(lives) if life.start <= moment <= life.stop]
        living.sort(key=lambda i: (offsets[i], lives[i].nbytes))
        above = 0
        holder = -1
        for index in living:
            if lives[index].nbytes and offsets[index] < above:
                return holder, index
            if offsets[index] + lives[index].nbytes > above:
                above, holder = offsets[index] + lives[index].nbytes, index
    return None


def least_size(lives: Sequence[Lifetime]) -> int:
    """Return the bytes that live at the busiest moment: no slab is smaller."""
    moments = {life.start for life in lives}
    return max(
        (sum(x.nbytes for x in lives if x.start <= moment <= x.stop) for moment in moments),
        default=0,
    )
