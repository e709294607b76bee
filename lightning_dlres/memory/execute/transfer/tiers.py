"""Where data go that leave the device: the host's memory, or a mapped file."""

from __future__ import annotations

import threading
import weakref
from collections import deque
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from torch import Tensor

from lightning_dlres.core.host.slab import Slab
from lightning_dlres.memory.execute.pool import FreeList


@dataclass(eq=False)
class Allocation:
    """A place in a tier, uint8[n]; free again once nobody holds it."""

    data: Tensor


class Tier(Protocol):
    """Where there is room for data."""

    def take(self, nbytes: int, offset: int | None = None) -> Allocation | None:
        """Return a place for so many bytes, at this offset if it is free; None if there is
        none."""


class SlabTier:
    """A slab, and what of it is taken.

    Args:
        nbytes: its size.
        directory: of the mapped file; None: the host's memory.
        pinned: whether a GPU copies to and from it; see `Slab`.

    Raises:
        ConfigError: there is too little room for the file.
    """

    def __init__(self, nbytes: int, directory: Path | None = None, pinned: bool = False) -> None:
        self.nbytes = nbytes
        self._slab = Slab(nbytes, directory, pinned)
        self._free = FreeList(nbytes)
        self._lock = threading.Lock()
        self._taken = 0
        # What is given back waits here: the garbage collector may do so in any thread at any time,
        # while that holds the lock, too.
        self._returned: deque[tuple[int, int]] = deque()

    @property
    def taken(self) -> int:
        """Return how many bytes are here."""
        with self._lock:
            self._collect()
            return self._taken

    def take(self, nbytes: int, offset: int | None = None) -> Allocation | None:
        """See `Tier.take`. What an earlier step has left at the offset, and still needs, is never
        written over: then the place is another one."""
        with self._lock:
            self._collect()
            place = None if offset is None else self._free.take_at(offset, nbytes)
            if place is None:
                place = self._free.take(nbytes)
            if place is None:
                return None
            self._taken += nbytes
        parcel = Allocation(self._slab.piece(place, nbytes))
        weakref.finalize(parcel, self._returned.append, (place, nbytes)).atexit = False
        return parcel

    def _collect(self) -> None:
        while self._returned:
            offset, nbytes = self._returned.popleft()
            self._free.give_back(offset)
            self._taken -= nbytes


class GrowingTier:
    """Memory of its own for everything: for steps of which nobody knows yet what they save.

    Args:
        directory, pinned: see `SlabTier`.
    """

    def __init__(self, directory: Path | None = None, pinned: bool = False) -> None:
        self._directory, self._pinned = directory, pinned

    def take(self, nbytes: int, offset: int | None = None) -> Allocation | None:
        """See `Tier.take`.

        Raises:
            ConfigError: the disk is full.
        """
        return Allocation(Slab(nbytes, self._directory, self._pinned).data)
