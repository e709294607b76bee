"""Copies from the mirror to the device: in a thread of their own, or on a stream of a GPU.

The copies of a thread release Python's lock. They take one processor, so that the others go on
computing.
"""

from __future__ import annotations

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

    def start(self, source: Tensor, target: Tensor) -> StartedFetch:
        """See `Fetcher.start`."""
        # The arrays are made here: in the other thread, it would compete for Python's lock.
        return _Copy(self._executor.submit(_copy, [target.numpy(), source.numpy()]))

    def close(self) -> None:
        """See `Fetcher.close`."""
        self._executor.shutdown(wait=True)


class _Copy:
    def __init__(self, future: Future[float]) -> None:
        self._future = future

    def wait(self) -> None:
        self._future.result()

    def seconds(self) -> float:
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
