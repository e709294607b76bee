"""Copies from the mirror to the device: in a thread of their own, or on a stream of a GPU.

The copies of a thread release Python's lock. They take one processor, so that the others go on
computing.
"""

from __future__ import annotations

import os
import time
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Protocol

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from lightning_dlres.core.device.copiers import StreamCopier


class StartedFetch(Protocol):
    """Copy that was started."""

    def wait(self) -> None:
        """Let the work that is issued from now on begin after the copy is done."""

    def seconds(self) -> float:
        """Return the time that the copy took, after it is done."""


class Fetcher(Protocol):
    """Copier from the mirror to the device."""

    def start(self, source: Tensor, target: Tensor) -> StartedFetch:
        """Start to copy uint8[n] in the mirror to uint8[n] on the device. Copies run in order."""

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
        arrays = [target.numpy(), source.numpy()]
        if os.getpid() == self._process:
            return _Copy(self._executor.submit(_copy, arrays), arrays)
        # A process that user code has forked has no such thread.
        done = Future[float]()
        done.set_result(_copy(arrays))
        return _Copy(done, arrays)

    def close(self) -> None:
        """See `Fetcher.close`."""
        self._executor.shutdown(wait=True)


class _Copy:
    def __init__(self, future: Future[float], arrays: list[NDArray[np.uint8]]) -> None:
        self._future, self._arrays = future, arrays
        self._process = os.getpid()

    def wait(self) -> None:
        self.seconds()

    def seconds(self) -> float:
        if os.getpid() != self._process:
            # The thread has stayed in the parent of this process. It releases the arrays when the
            # copy is complete. The future's lock may be held for ever here.
            return _copy(self._arrays) if self._arrays else 0.0
        return self._future.result()


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


def _copy(arrays: list[NDArray[np.uint8]]) -> float:
    """Copy the second array to the first one, and release both.

    The executor holds the list for a while after the result is known.
    """
    start = time.perf_counter()
    target, source = arrays
    np.copyto(target, source)
    del target, source
    arrays.clear()
    return time.perf_counter() - start
