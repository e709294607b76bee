"""Where data go that leave the device: the host's memory, or a mapped file."""

from __future__ import annotations

import threading
import weakref
from collections import deque
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from lightning_dlres.core.slab import Slab
from lightning_dlres.memory.pool import FreeList


class Tier:
    """A slab, and what of it is taken.

    Args:
        nbytes: its size.
        directory: of the mapped file; None: the host's memory.

    Raises:
        ConfigError: there is too little room for the file.
    """

    def __init__(self, nbytes: int, directory: Path | None = None) -> None:
        self._slab = Slab(nbytes, directory)
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

    def put(self, data: Tensor) -> Parcel | None:
        """Copy uint8[n] here; None where there is no room. The place is free again once nobody
        holds the parcel."""
        nbytes = data.numel()
        with self._lock:
            self._collect()
            offset = self._free.take(nbytes)
            if offset is None:
                return None
            self._taken += nbytes
        parcel = Parcel(self._slab.piece(offset, nbytes))
        weakref.finalize(parcel, self._returned.append, (offset, nbytes)).atexit = False
        parcel.data.copy_(data)
        return parcel

    def _collect(self) -> None:
        while self._returned:
            offset, nbytes = self._returned.popleft()
            self._free.give_back(offset)
            self._taken -= nbytes


@dataclass(eq=False)
class Parcel:
    """Bytes in a tier, uint8[n]."""

    data: Tensor
