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

# Interval of the checks for a read that hangs, in seconds.
_CHECK_SECONDS = 1.0

# Reader of this process; None except in worker processes that read samples themselves.
_worker: WorkerReader | None = None


class LocalSamples(Sequence[Sample]):
    """Samples of one batch, in order.

    If it is sent to a worker process, only the sample ids are sent. The worker process reads the
    bytes at the first access.

    Args:
        table: Table of the data set.
        sample_ids: uint32[n], the samples of the batch.
        data: uint8[sum of their sizes], the samples concatenated. None: a worker process reads
            them.

    Attributes:
        epoch_seed: Seed of the epoch, from which each sample derives its own. The loader sets it.
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
    """Make this worker process read the samples of the batches that it receives.

    Args:
        reader: Reader of the source.
        timeout: Seconds after which a read fails.
    """
    global _worker
    _worker = WorkerReader(reader, timeout)


class WorkerReader:
    """Reader of a worker process, which reads one batch at a time.

    The threads of a `FileStorage` do the reads, because a read that hangs cannot be interrupted.

    Args:
        reader: Reader of the source.
        timeout: Seconds after which a read fails.
    """

    def __init__(self, reader: Reader, timeout: float) -> None:
        self.table = reader.table
        self._reader, self._timeout = reader, timeout
        self._storage: FileStorage | None = None
        self._replies: SimpleQueue[Reply] = SimpleQueue()

    def read(self, sample_ids: SampleIds) -> Bytes:
        """Return the samples, concatenated, as uint8[sum of their sizes].

        Raises:
            StorageError: If a sample cannot be read. The message names the sample.
        """
        if self._storage is None:
            # A new queue: a hanging thread of the last storage may still reply to the old queue.
            self._replies = SimpleQueue()
            self._storage = FileStorage(
                self._reader, nodes=1, read_threads=1, timeout=self._timeout
            )
            self._storage.on_reply = partial(_forward, self._storage, self._replies)
        self._storage.submit(fetch_id=0, node=0, sample_ids=sample_ids)
        while True:
            try:
                data = self._replies.get(timeout=_CHECK_SECONDS).data
                break
            except Empty:
                # Only `replies()` turns a read that hangs into an error.
                _forward(self._storage, self._replies)
        if isinstance(data, StorageError):
            # The thread of this storage may hang. The next batch gets a new storage.
            self._storage.close()
            self._storage = None
            raise data
        return data


def _forward(storage: FileStorage, replies: SimpleQueue[Reply]) -> None:
    for reply in storage.replies():
        replies.put(reply)


def _unpickle_in_worker(sample_ids: SampleIds, epoch_seed: int) -> LocalSamples:
    # Do not read here: an error while the worker unpickles a task would end the worker.
    assert _worker is not None
    samples = LocalSamples(_worker.table, sample_ids, None)
    samples.epoch_seed = epoch_seed
    return samples
