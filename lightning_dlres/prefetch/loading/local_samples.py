"""Samples that a rank reads itself, in its own process or in a worker process."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any, overload

import numpy as np

from lightning_dlres.core.errors import StorageError
from lightning_dlres.prefetch.cache.samples import Bytes, Sample
from lightning_dlres.prefetch.order.sequence import SampleIds
from lightning_dlres.prefetch.storage.base import Reply
from lightning_dlres.prefetch.storage.file_storage import FileStorage
from lightning_dlres.prefetch.storage.manifest import SampleTable
from lightning_dlres.prefetch.storage.readers import Reader

# Seconds between two checks for a read that hangs.
_CHECK_SECONDS = 1.0

# Reader of this process, if it is a worker that reads.
_worker: WorkerReads | None = None


class LocalSamples(Sequence[Sample]):
    """Samples of one batch, in order. In a worker process they are read at the first look at them.

    Args:
        table: Table of the data set.
        sample_ids: uint32[n].
        data: uint8, the samples one behind the other. None: a worker process is to read them.

    Attributes:
        epoch_seed: Seed that the samples' own are made of; set by the loader.
    """

    def __init__(self, table: SampleTable, sample_ids: SampleIds, data: Bytes | None) -> None:
        self.sample_ids = sample_ids
        self.epoch_seed = 0
        self._table, self._data = table, data

    def __len__(self) -> int:
        return len(self.sample_ids)

    @overload
    def __getitem__(self, index: int) -> Sample: ...
    @overload
    def __getitem__(self, index: slice) -> list[Sample]: ...
    def __getitem__(self, index: int | slice) -> Sample | list[Sample]:
        return list(self)[index]

    def __iter__(self) -> Iterator[Sample]:
        if self._data is None:
            assert _worker is not None
            self._data = _worker.read(self.sample_ids)
        start = 0
        ends = np.cumsum(self._table.sizes[self.sample_ids]).tolist()
        for sample_id, end in zip(self.sample_ids.tolist(), ends, strict=True):
            yield Sample(self._table, sample_id, self._data[start:end], self.epoch_seed)
            start = end

    def __reduce__(self) -> tuple[Any, ...]:
        return _unpickle_in_worker, (self.sample_ids, self.epoch_seed)


def set_up_worker(reader: Reader, timeout: float) -> None:
    """Let this process read the samples of the batches that are sent to it."""
    global _worker
    _worker = WorkerReads(reader, timeout)


class WorkerReads:
    """Reader of a worker process, for one batch after the other.

    It reads in a thread of a storage, because a read that hangs cannot be interrupted.

    Args:
        reader: Reader of the source.
        timeout: Seconds for which a read is tried.
    """

    def __init__(self, reader: Reader, timeout: float) -> None:
        self.table = reader.table
        self._reader, self._timeout = reader, timeout
        self._storage: FileStorage | None = None
        self._replies: SimpleQueue[Reply] = SimpleQueue()

    def read(self, sample_ids: SampleIds) -> Bytes:
        """Return samples, one behind the other.

        Raises:
            StorageError: If a sample cannot be had; it names the sample.
        """
        if self._storage is None:
            # A new queue: a thread that hangs may still put its reply into the old one.
            self._replies = SimpleQueue()
            self._storage = FileStorage(self._reader, 1, 1, self._timeout)
            self._storage.on_reply = partial(_forward, self._storage, self._replies)
        self._storage.submit(0, 0, sample_ids)
        while True:
            try:
                data = self._replies.get(timeout=_CHECK_SECONDS).data
                break
            except Empty:
                # The storage reports reads that hang only in `replies()`.
                _forward(self._storage, self._replies)
        if isinstance(data, StorageError):
            # Its thread may hang: the next batch gets another storage.
            self._storage.close()
            self._storage = None
            raise data
        return data


def _forward(storage: FileStorage, replies: SimpleQueue[Reply]) -> None:
    for reply in storage.replies():
        replies.put(reply)


def _unpickle_in_worker(sample_ids: SampleIds, epoch_seed: int) -> LocalSamples:
    # Nothing is read yet: an error while a task is unpickled would end the worker.
    assert _worker is not None
    samples = LocalSamples(_worker.table, sample_ids, None)
    samples.epoch_seed = epoch_seed
    return samples
