"""Direct reads of local files, without a cache: each rank reads its own samples ahead of need.

A cache that ranks share costs a copy and several hops between processes. If the system's page cache
answers, these cost more than the reads.
"""

from __future__ import annotations

import itertools
import os
from concurrent import futures
from concurrent.futures import Future
from typing import Any

import numpy as np

from lightning_dlres.core.errors import StorageError
from lightning_dlres.prefetch.cache.epochs import needed_samples
from lightning_dlres.prefetch.cache.exchange import Counts
from lightning_dlres.prefetch.cache.messages import Begin, HostConfig, Joined, Metrics
from lightning_dlres.prefetch.cache.space.cache_space import EpochSlots
from lightning_dlres.prefetch.loading.local_samples import LocalSamples
from lightning_dlres.prefetch.order.sequence import SampleIds, shuffled
from lightning_dlres.prefetch.storage.file_storage import FileStorage
from lightning_dlres.prefetch.storage.source import open_source

# Initial window: number of batches that are read ahead. More batches would evict each other from
# the processor's caches. The window doubles each time the caller has to wait for the storage.
_INITIAL_WINDOW = 2
# While fewer bytes than this are read ahead, the maximum window applies instead of the present one.
_SMALL_BYTES = 4 << 20
# Seconds between two checks for reads that hang.
_CHECK_SECONDS = 1.0


class DirectClient:
    """Reader with the interface of a `CacheClient`, for one thread.

    Args:
        config: Configuration with a "direct" source. No batch is requested while the batches that
            were requested and not handed over have `lookahead` bytes (or half of the capacity).
        in_workers: True: samples are read in the worker processes that decode them.

    Raises:
        ConfigError: If there is no such source.
    """

    def __init__(self, config: HostConfig, in_workers: bool = False) -> None:
        source = config.source
        self.reader = open_source(source)
        self._in_workers = in_workers
        self._storage = FileStorage(self.reader, 1, source.read_threads, source.timeout)
        self._storage.on_reply = self._deliver
        self._budget = config.lookahead or -(-config.capacity // 2)
        self._window, self._max_window = _INITIAL_WINDOW, source.read_threads
        self._fetch_ids, self._epoch_ids = itertools.count(), itertools.count()
        # The sample_ids of the epoch that was begun, by epoch slot.
        self._epoch_samples: SampleIds | None = None
        # Future and sample_ids of each batch that is being read, by fetch_id.
        self._pending: dict[int, tuple[Future[LocalSamples], SampleIds]] = {}
        # Bytes of each batch that was requested and not handed over, and their sum.
        self._nbytes: dict[Future[LocalSamples], int] = {}
        self._bytes_ahead, self._counts = 0, Counts()
        table = self.reader.table
        # Load compiled functions now, and not while the caller waits for the first batch.
        shuffled(1, 0, 0)
        self.reader.read_joined(np.zeros(0, dtype=np.uint32))
        self.joined = Joined(
            pid=os.getpid(),
            cache_path="",
            cache_bytes=0,
            pinned_path="",
            pinned_bytes=0,
            samples=len(table),
            total_bytes=table.total_bytes,
            largest=int(table.sizes.max()),
            digest=table.digest,
            encoding=table.encoding,
            nodes=1,
            note=self.reader.note,
        )

    def begin_epoch(self, **arguments: Any) -> int:
        """Begin an epoch; arguments as for `messages.Begin`. Return its epoch_id."""
        begin = Begin(epoch_id=next(self._epoch_ids), **arguments)
        # Drop the batches of the last epoch that were not handed over.
        self._pending.clear()
        self._nbytes.clear()
        self._bytes_ahead = 0
        self._epoch_samples = needed_samples(len(self.reader.table), begin)
        return begin.epoch_id

    def may_request(self, waiting: int, max_waiting: int) -> bool:
        """Return true if one more batch may be requested; arguments as in `CacheClient`.

        Up to `max_waiting` batches may wait if the budget in bytes allows, and more if the storage
        is slow.
        """
        if not waiting:
            # Even a batch that is larger than the budget has to be read.
            return True
        if self._bytes_ahead < min(_SMALL_BYTES, self._budget):
            return waiting < max(max_waiting, self._max_window)
        return waiting < max(max_waiting, self._window) and self._bytes_ahead < self._budget

    def request_batch(self, epoch_id: int, epoch_slots: EpochSlots) -> Future[LocalSamples]:
        """Request the samples of some epoch slots (uint32[n]). The future gets them, or the error,
        within the deadline."""
        assert self._epoch_samples is not None
        sample_ids, future = self._epoch_samples[epoch_slots], Future[LocalSamples]()
        nbytes = int(self.reader.table.sizes[sample_ids].sum())
        self._counts.requests += len(sample_ids)
        self._counts.requested_samples += len(sample_ids)
        self._counts.requested_bytes += nbytes
        if self._in_workers:
            future.set_result(LocalSamples(self.reader.table, sample_ids, None))
            nbytes = 0
        else:
            fetch_id = next(self._fetch_ids)
            self._pending[fetch_id] = future, sample_ids
            self._storage.submit(fetch_id, 0, sample_ids)
        self._nbytes[future] = nbytes
        self._bytes_ahead += nbytes
        return future

    def wait(self, future: Future[LocalSamples]) -> LocalSamples:
        """Return the samples of a batch request.

        Raises:
            StorageError: If a sample cannot be read. The message names the sample.
        """
        is_hit = future.done()
        if not is_hit and self._storage.has_waited:
            # More threads help only where they wait for the storage, and not for the processor.
            self._window = min(2 * self._window, self._max_window)
        while not future.done():
            if not futures.wait([future], timeout=_CHECK_SECONDS).done:
                # Reads that hang are reported only by a call of the storage's `replies()`.
                self._deliver()
        nbytes = self._nbytes.pop(future, 0)
        self._bytes_ahead -= nbytes
        samples = future.result()
        self._counts.samples += len(samples)
        self._counts.hits += len(samples) * is_hit
        self._counts.delivered_bytes += nbytes
        return samples

    def metrics(self) -> Metrics:
        """Return the metrics of this rank. Each opened file counts as a request. A hit is a sample
        of a batch that was read before the caller waited for it."""
        return Metrics(
            **vars(self._counts),
            evicted=0,
            passes=0,
            moved_bytes=0,
            cache_bytes=self._bytes_ahead,
            used_bytes=self._bytes_ahead,
            peak_bytes=0,
            capacity=self._budget,
            management_bytes=self.reader.table.sizes.nbytes,
        )

    def close(self) -> None:
        """End the threads; may be called again."""
        self.leave()

    def leave(self) -> None:
        """Begin to end the threads, without waiting."""
        self._storage.close()

    def _deliver(self) -> None:
        """Complete the futures of batches that were read. This also runs in the storage's threads;
        `pop` is atomic, so that each batch is completed once."""
        for reply in self._storage.replies():
            pending = self._pending.pop(reply.fetch_id, None)
            if pending is None:
                # Another epoch has begun since.
                continue
            future, sample_ids = pending
            if isinstance(reply.data, StorageError):
                future.set_exception(reply.data)
            else:
                future.set_result(LocalSamples(self.reader.table, sample_ids, reply.data))
