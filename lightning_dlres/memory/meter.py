"""How many bytes the device holds, whoever has made them: torch's own count on a GPU, and every
operation watched on the CPU, where nothing counts."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Protocol

import torch
from torch import Tensor

from lightning_dlres.core._compat import LiveBytes


class Meter(Protocol):
    """Bytes on the device.

    Attributes:
        counts_fetched: whether data that come back count, too.
    """

    counts_fetched: bool

    def now(self) -> int:
        """Return the bytes that are there."""

    def peak(self) -> int:
        """Return the most bytes that were there since `start_peak`."""

    def start_peak(self) -> None:
        """Begin to look for the most bytes anew."""

    @contextmanager
    def running(self, tensors: Iterable[Tensor]) -> Iterator[None]:
        """Inside of it bytes are counted, those of these tensors, too."""

    def count(self, is_counting: bool) -> None:
        """Say whether what is made from now on counts, where that can be told apart."""


class WatchedBytes:
    """On the CPU. Slow: every operation passes through Python."""

    counts_fetched = False

    def __init__(self) -> None:
        self._live = LiveBytes()

    def now(self) -> int:
        return self._live.now

    def peak(self) -> int:
        return self._live.peak

    def start_peak(self) -> None:
        self._live.start_peak()

    @contextmanager
    def running(self, tensors: Iterable[Tensor]) -> Iterator[None]:
        self._live = LiveBytes()
        self._live.include(tensors)
        with self._live:
            yield
        # What outlives the step would keep the count alive.
        self._live = LiveBytes()

    def count(self, is_counting: bool) -> None:
        self._live.is_counting = is_counting


class AllocatedBytes:
    """On a GPU, as torch's allocator counts them.

    Args:
        device: the GPU.
    """

    counts_fetched = True

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def now(self) -> int:
        return torch.cuda.memory_allocated(self._device)

    def peak(self) -> int:
        return torch.cuda.max_memory_allocated(self._device)

    def start_peak(self) -> None:
        torch.cuda.reset_peak_memory_stats(self._device)

    @contextmanager
    def running(self, tensors: Iterable[Tensor]) -> Iterator[None]:
        yield

    def count(self, is_counting: bool) -> None:
        pass


class GivenBytes:
    """Where nothing can be counted: what is there before the step is all that is known."""

    counts_fetched = False

    def __init__(self) -> None:
        self._now = 0

    def now(self) -> int:
        return self._now

    def peak(self) -> int:
        return self._now

    def start_peak(self) -> None:
        pass

    @contextmanager
    def running(self, tensors: Iterable[Tensor]) -> Iterator[None]:
        storages = {t.untyped_storage().data_ptr(): t.untyped_storage() for t in tensors}
        self._now = sum(storage.nbytes() for storage in storages.values())
        yield

    def count(self, is_counting: bool) -> None:
        pass
