"""Tiers that hold offloaded storages: the host's memory, or a memory-mapped file."""

from __future__ import annotations

import threading
import weakref
from collections import deque
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from torch import Tensor

from lightning_dlres.core.host.slab import Slab
from lightning_dlres.memory.execute.transfer.free_list import FreeList


@dataclass(eq=False)
class Allocation:
    """Bytes of a tier, uint8[n].

    They are free again when the last reference to this object is dropped. A `SlabTier` may
    overwrite them then, even if a view of `data` is still referenced.
    """

    data: Tensor


class Tier(Protocol):
    """Memory outside of the device."""

    def allocate(self, nbytes: int, offset: int | None = None) -> Allocation | None:
        """Return an allocation, at this offset if it is free; None if the tier is full."""


class SlabTier:
    """Tier with a fixed size, in one slab.

    Args:
        nbytes: Size in bytes.
        directory: Directory of the mapped file; None: the host's memory.
        pinned: Whether a GPU copies to and from it; see `Slab`.

    Raises:
        ConfigError: If the disk has too little space for the file.
    """

    def __init__(self, nbytes: int, directory: Path | None = None, pinned: bool = False) -> None:
        self.nbytes = nbytes
        self._slab = Slab(nbytes, directory, pinned)
        self._free = FreeList(nbytes)
        self._lock = threading.Lock()
        self._used_bytes = 0
        # The garbage collector may drop an allocation in any thread at any time, even while that
        # thread holds the lock. Finalizers therefore only append (offset, nbytes) here.
        self._returned: deque[tuple[int, int]] = deque()

    @property
    def used_bytes(self) -> int:
        """Return the bytes that are allocated."""
        with self._lock:
            self._collect()
            return self._used_bytes

    def allocate(self, nbytes: int, offset: int | None = None) -> Allocation | None:
        """See `Tier.allocate`.

        If an earlier step still uses the offset, another one is allocated: its bytes must not be
        overwritten.
        """
        with self._lock:
            self._collect()
            start = None if offset is None else self._free.allocate_at(offset, nbytes)
            if start is None:
                start = self._free.allocate(nbytes)
            if start is None:
                return None
            self._used_bytes += nbytes
        allocation = Allocation(self._slab.piece(start, nbytes))
        weakref.finalize(allocation, self._returned.append, (start, nbytes)).atexit = False
        return allocation

    def _collect(self) -> None:
        while self._returned:
            offset, nbytes = self._returned.popleft()
            self._free.free(offset)
            self._used_bytes -= nbytes


class GrowingTier:
    """Tier without a fixed size, for steps whose storages are not known yet.

    Each allocation is a slab of its own.

    Args:
        directory: Directory of the mapped files; None: the host's memory.
        pinned: Whether a GPU copies to and from it; see `Slab`.
    """

    def __init__(self, directory: Path | None = None, pinned: bool = False) -> None:
        self._directory, self._pinned = directory, pinned

    def allocate(self, nbytes: int, offset: int | None = None) -> Allocation | None:
        """See `Tier.allocate`.

        Raises:
            ConfigError: If the disk is full.
        """
        return Allocation(Slab(nbytes, self._directory, self._pinned).data)
