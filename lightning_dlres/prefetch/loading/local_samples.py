"""Samples that this process has read itself, or that a worker process is to read."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any, overload

import numpy as np

from lightning_dlres.core.errors import StorageError
from lightning_dlres.prefetch.cache.samples import Bytes, Sample
from lightning_dlres.prefetch.order.sequence import Positions
from lightning_dlres.prefetch.storage.base import Reply
from lightning_dlres.prefetch.storage.files import FileStorage
from lightning_dlres.prefetch.storage.manifest import SampleTable
from lightning_dlres.prefetch.storage.readers import Reader

# Seconds between two looks for a read that hangs.
_LOOK_SECONDS = 1.0

# In a worker process: what it reads with.
_worker: WorkerReads | None = None


class LocalSamples(Sequence[Sample]):
    """The samples of a batch, in order. In a worker process they are read when they are looked at.

    Args:
        table: the data set.
        numbers: uint32[n], of the samples.
        data: uint8, the samples one behind the other; None: a worker process is to read them.
    """

    def __init__(self, table: SampleTable, numbers: Positions, data: Bytes | None) -> None:
        self.numbers = numbers
        self.epoch_seed = 0
        self._table, self._data = table, data

    def __len__(self) -> int:
        return len(self.numbers)

    @overload
    def __getitem__(self, index: int) -> Sample: ...
    @overload
    def __getitem__(self, index: slice) -> list[Sample]: ...
    def __getitem__(self, index: int | slice) -> Sample | list[Sample]:
        return list(self)[index]

    def __iter__(self) -> Iterator[Sample]:
        if self._data is None:
            assert _worker is not None
            self._data = _worker.read(self.numbers)
        start = 0
        ends = np.cumsum(self._table.sizes[self.numbers]).tolist()
        for number, end in zip(self.numbers.tolist(), ends, strict=True):
            yield Sample(self._table, number, self._data[start:end], self.epoch_seed)
            start = end

    def __reduce__(self) -> tuple[Any, ...]:
        return _in_worker, (self.numbers, self.epoch_seed)


def set_up_worker(reader: Reader, timeout: float) -> None:
    """Make this process one that reads the samples that are sent to it."""
    global _worker
    _worker = WorkerReads(reader, timeout)


class WorkerReads:
    """Reads the samples of one batch after the other, in a thread of a storage, because nothing
    ends a read that hangs.

    Args:
        reader: of the source.
        timeout: seconds for which it tries.
    """

    def __init__(self, reader: Reader, timeout: float) -> None:
        self.table = reader.table
        self._reader, self._timeout = reader, timeout
        self._storage: FileStorage | None = None
        self._replies: SimpleQueue[Reply] = SimpleQueue()

    def read(self, numbers: Positions) -> Bytes:
        """Return samples, one behind the other.

        Raises:
            StorageError: One cannot be had; it names the sample.
        """
        if self._storage is None:
            # Replies of a thread that hung go to its own queue.
            self._replies = SimpleQueue()
            self._storage = FileStorage(self._reader, 1, 1, self._timeout)
            self._storage.on_reply = partial(_deliver, self._storage, self._replies)
        self._storage.submit(0, 0, numbers)
        while True:
            try:
                data = self._replies.get(timeout=_LOOK_SECONDS).data
                break
            except Empty:
                _deliver(self._storage, self._replies)
        if isinstance(data, StorageError):
            # Its thread may hang: another batch needs another one.
            self._storage.close()
            self._storage = None
            raise data
        return data


def _deliver(storage: FileStorage, replies: SimpleQueue[Reply]) -> None:
    for reply in storage.replies():
        replies.put(reply)


def _in_worker(numbers: Positions, epoch_seed: int) -> LocalSamples:
    # An error while a task is unpacked would end the worker: nothing is read yet.
    assert _worker is not None
    samples = LocalSamples(_worker.table, numbers, None)
    samples.epoch_seed = epoch_seed
    return samples
