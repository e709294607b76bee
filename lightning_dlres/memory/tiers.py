"""Where data go that leave the device: the host's memory, or a mapped file."""

from __future__ import annotations

import threading
import weakref
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
        self.taken = 0

    def put(self, data: Tensor) -> Parcel | None:
        """Copy uint8[n] here; None where there is no room. The place is free again once nobody
        holds the parcel."""
        nbytes = data.numel()
        with self._lock:
            offset = self._free.take(nbytes)
            if offset is None:
                return None
            self.taken += nbytes
        parcel = Parcel(self._slab.piece(offset, nbytes))
        weakref.finalize(parcel, self._give_back, offset, nbytes).atexit = False
        parcel.data.copy_(data)
        return parcel

    def _give_back(self, offset: int, nbytes: int) -> None:
        with self._lock:
            self._free.give_back(offset)
            self.taken -= nbytes


@dataclass(eq=False)
class Parcel:
    """Bytes in a tier, uint8[n]."""

    data: Tensor
