"""Counter of the bytes of saved storages on the device."""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Callable

from torch import Tensor


class ByteCounter:
    """Counter of the bytes of saved storages on the device, now and at their peak."""

    def __init__(self) -> None:
        self._now = self._peak = 0
        self._lock = threading.Lock()
        # The garbage collector may drop a storage in any thread at any time, even while that thread
        # holds the lock. Finalizers therefore only append here, which needs no lock.
        self._changes: deque[int] = deque()

    @property
    def now(self) -> int:
        """Return the bytes on the device now."""
        if self._changes:
            self.add(0)
        return self._now

    @property
    def peak(self) -> int:
        """Return the peak of the bytes since the last `reset_peak`."""
        self.add(0)
        return self._peak

    def reset_peak(self) -> None:
        """Restart the peak at the present number of bytes."""
        self.add(0)
        self._peak = self._now

    def add(self, nbytes: int) -> None:
        """Add bytes, or subtract them if negative."""
        self._changes.append(nbytes)
        with self._lock:
            while self._changes:
                self._now += self._changes.popleft()
                self._peak = max(self._peak, self._now)

    def drop(self, nbytes: int) -> None:
        """Subtract bytes without taking the lock, so that finalizers can call it."""
        self._changes.append(-nbytes)

    def count_until_freed(self, data: Tensor) -> Callable[[], object]:
        """Count a tensor's memory until it is freed, or until the returned function is called."""
        storage = data.untyped_storage()
        self.add(storage.nbytes())
        finalizer = weakref.finalize(storage, self.drop, storage.nbytes())
        finalizer.atexit = False
        return finalizer
