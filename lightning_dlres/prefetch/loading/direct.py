"""Local files without a cache: each rank reads what it needs itself, ahead of need, in threads.

A cache that ranks share costs a copy and several hops between processes. Where the system's page
cache answers, these cost more than the reading.
"""

from __future__ import annotations

import itertools
import os
from concurrent import futures
from concurrent.futures import Future
from typing import Any

import numpy as np

from lightning_dlres.core.errors import StorageError
from lightning_dlres.prefetch.cache.epochs import needed
from lightning_dlres.prefetch.cache.exchange import Counts
from lightning_dlres.prefetch.cache.messages import Begin, HostConfig, Joined, Metrics
from lightning_dlres.prefetch.loading.local_samples import LocalSamples
from lightning_dlres.prefetch.order.sequence import Positions, shuffled
from lightning_dlres.prefetch.storage.files import FileStorage
from lightning_dlres.prefetch.storage.source import open_source

# Batches that are read ahead to begin with: more would only push each other out of the processor's
# caches. If they are waited for, there are more.
_FIRST_WINDOW = 2
# So many bytes ahead are never too many.
_SMALL_BYTES = 4 << 20
# How often the storage looks for reads that hang.
_LOOK_SECONDS = 1.0


class DirectClient:
    """Stands in for a `CacheClient` where there is no cache. For one thread.

    Args:
        config: of a "direct" source. No batch is begun while the look-ahead, or half of the
            capacity, is full of batches that were read and not taken.
        in_workers: whether samples are read where they are decoded, in other processes.

    Raises:
        ConfigError: there is no such source.
    """

    def __init__(self, config: HostConfig, in_workers: bool = False) -> None:
        source = config.source
        self.reader = open_source(source)
        self._in_workers = in_workers
        self._storage = FileStorage(self.reader, 1, source.read_threads, source.timeout)
        self._storage.on_reply = self._deliver
        self._budget = config.lookahead or -(-config.capacity // 2)
        self._window, self._most_at_once = _FIRST_WINDOW, source.read_threads
        self._tickets, self._generations = itertools.count(), itertools.count()
        # The samples of the epoch under way; of every take that was not delivered its future and
        # numbers; the bytes of every one that was not handed over.
        self._needed: Positions | None = None
        self._takes: dict[int, tuple[Future[LocalSamples], Positions]] = {}
        self._nbytes: dict[Future[LocalSamples], int] = {}
        self._ahead, self._counts = 0, Counts()
        table = self.reader.table
        # What is compiled is loaded now, and not while the first batch is waited for.
        shuffled(1, 0, 0)
        self.reader.read_joined(np.zeros(0, dtype=np.uint32))
        self.joined = Joined(
            pid=os.getpid(),
            cache_path="",
            cache_bytes=0,
            kept_path="",
            kept_bytes=0,
            samples=len(table),
            total_bytes=table.total_bytes,
            largest=int(table.sizes.max()),
            digest=table.digest,
            encoding=table.encoding,
            nodes=1,
            note=self.reader.note,
        )

    def begin(self, **arguments: Any) -> int:
        """Start an epoch, see `messages.Begin`; return its generation."""
        begin = Begin(generation=next(self._generations), **arguments)
        # What the epoch before has not delivered is not wanted any more.
        self._takes.clear()
        self._nbytes.clear()
        self._ahead = 0
        self._needed = needed(len(self.reader.table), begin)
        return begin.generation

    def may_take(self, waiting: int, least: int) -> bool:
        """Return whether to take more, beside so many takes that wait; `least` may."""
        if not waiting:
            return True
        if self._ahead < min(_SMALL_BYTES, self._budget):
            return waiting < max(least, self._most_at_once)
        return waiting < max(least, self._window) and self._ahead < self._budget

    def take(self, generation: int, positions: Positions) -> Future[LocalSamples]:
        """Ask for samples; the future has them, or the error, within the deadline."""
        assert self._needed is not None
        numbers, future = self._needed[positions], Future[LocalSamples]()
        nbytes = int(self.reader.table.sizes[numbers].sum())
        self._counts.requests += len(numbers)
        self._counts.requested_samples += len(numbers)
        self._counts.requested_bytes += nbytes
        if self._in_workers:
            future.set_result(LocalSamples(self.reader.table, numbers, None))
            nbytes = 0
        else:
            ticket = next(self._tickets)
            self._takes[ticket] = future, numbers
            self._storage.submit(ticket, 0, numbers)
        self._nbytes[future] = nbytes
        self._ahead += nbytes
        return future

    def wait(self, future: Future[LocalSamples]) -> LocalSamples:
        """Return what was asked for.

        Raises:
            StorageError: a sample cannot be had; it names the sample.
        """
        was_there = future.done()
        if not was_there and self._storage.has_waited:
            # More threads are of use where they wait for the storage, not for the processor.
            self._window = min(2 * self._window, self._most_at_once)
        while not future.done():
            if not futures.wait([future], timeout=_LOOK_SECONDS).done:
                # Only replies that are asked for tell of reads that hang.
                self._deliver()
        nbytes = self._nbytes.pop(future, 0)
        self._ahead -= nbytes
        samples = future.result()
        self._counts.samples += len(samples)
        self._counts.hits += len(samples) * was_there
        self._counts.taken_bytes += nbytes
        return samples

    def metrics(self) -> Metrics:
        """Return what was counted. A file that is opened is a request; a hit is a sample of a batch
        that was read before it was waited for."""
        return Metrics(
            **vars(self._counts),
            evicted=0,
            passes=0,
            moved_bytes=0,
            cache_bytes=self._ahead,
            used_bytes=self._ahead,
            peak_bytes=0,
            capacity=self._budget,
            management_bytes=self.reader.table.sizes.nbytes,
        )

    def close(self) -> None:
        """End the threads; may be called again."""
        self.leave()

    def leave(self) -> None:
        """Begin to end the threads, and wait for nothing."""
        self._storage.close()

    def _deliver(self) -> None:
        """Hand over what was read; runs in the storage's threads, too."""
        for reply in self._storage.replies():
            taken = self._takes.pop(reply.fetch_id, None)
            if taken is None:
                continue
            future, numbers = taken
            if isinstance(reply.data, StorageError):
                future.set_exception(reply.data)
            else:
                future.set_result(LocalSamples(self.reader.table, numbers, reply.data))
