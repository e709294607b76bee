"""Copies from the mirror to the device: in a thread of their own, or on a stream of a GPU.

The copies of a thread release Python's lock. They take one processor, so that the others go on
computing. A thread that waits for a copy computes nothing, and helps.
"""

from __future__ import annotations

import math
import os
import threading
import time
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Protocol

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from lightning_dlres.core.device.copiers import StreamCopier

# Size of a part in bytes, about. With smaller parts, the thread needs Python's lock more often.
_PART_BYTES = 2 << 20


class StartedFetch(Protocol):
    """Copy that was started."""

    def wait(self) -> None:
        """Let the work that is issued from now on begin after the copy is done."""

    def seconds(self) -> float:
        """Return the time of the copy by one thread or stream, after it is done."""


class Fetcher(Protocol):
    """Copier from the mirror to the device."""

    def start(self, source: Tensor, target: Tensor) -> StartedFetch:
        """Start to copy uint8[n] in the mirror to uint8[n] on the device.

        Copies run in order, but one that is waited for may overtake others.
        """

    def close(self) -> None:
        """Wait for all copies, and release the threads."""


class ThreadFetcher:
    """Fetcher for a device that is the CPU."""

    def __init__(self) -> None:
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="dlres-mirror")
        self._process = os.getpid()

    def start(self, source: Tensor, target: Tensor) -> StartedFetch:
        """See `Fetcher.start`."""
        # The arrays are made here: in the other thread, it would compete for Python's lock.
        copy = _Copy(target.numpy(), source.numpy())
        # A process that user code has forked has no such thread, and copies when it waits.
        if os.getpid() == self._process:
            copy.future = self._executor.submit(copy.copy_parts)
        return copy

    def close(self) -> None:
        """See `Fetcher.close`."""
        self._executor.shutdown(wait=True)


class _Copy:
    """Copy in parts. The fetcher's thread takes them from the front, and one that waits from the
    back.

    Attributes:
        future: Work of the fetcher's thread; None without one.
    """

    def __init__(self, target: NDArray[np.uint8], source: NDArray[np.uint8]) -> None:
        # Empty once all is copied: the executor holds this object for longer.
        self._arrays = [target, source]
        self._nbytes = len(source)
        self._part_bytes = math.ceil(self._nbytes / max(1, round(self._nbytes / _PART_BYTES)))
        self._parts = deque(range(0, self._nbytes, self._part_bytes or 1))
        self._unfinished = len(self._parts)
        if not self._parts:
            self._arrays.clear()
        self._seconds: list[float] = []
        self._lock, self._wait_lock = threading.Lock(), threading.Lock()
        self._process = os.getpid()
        self.future: Future[None] | None = None

    def wait(self) -> None:
        if os.getpid() != self._process:
            # The process was forked during the copy: the thread is missing, and locks may be held
            # for ever.
            self._copy_all()
            return
        with self._wait_lock:
            self.copy_parts(from_front=False)
            if self._arrays and self.future is not None:
                self.future.result()
            # An exception, as of a signal, may have ended a part.
            self._copy_all()

    def seconds(self) -> float:
        self.wait()
        return sum(self._seconds)

    def copy_parts(self, from_front: bool = True) -> None:
        """Copy parts until none is left."""
        while True:
            try:
                first = self._parts.popleft() if from_front else self._parts.pop()
            except IndexError:
                return
            start = time.perf_counter()
            target, source = (array[first : first + self._part_bytes] for array in self._arrays)
            np.copyto(target, source)
            del target, source
            self._seconds.append(time.perf_counter() - start)
            with self._lock:
                self._unfinished -= 1
                if not self._unfinished:
                    self._arrays.clear()

    def _copy_all(self) -> None:
        """Copy everything, unless all parts are copied."""
        if self._arrays:
            target, source = self._arrays
            np.copyto(target, source)
            self._arrays.clear()


class StreamFetcher:
    """Fetcher for a GPU.

    Args:
        copier: Copier between the GPU and the mirror, which is `timed`.
    """

    def __init__(self, copier: StreamCopier) -> None:
        self._copier = copier

    def start(self, source: Tensor, target: Tensor) -> StartedFetch:
        """See `Fetcher.start`."""
        # Tensors over this memory may be saved for backward. It has their old values again when
        # backward asks for them, so autograd must not count the copy as a change.
        return self._copier.fill(target.data, source)

    def close(self) -> None:
        """See `Fetcher.close`."""
        self._copier.synchronize()
