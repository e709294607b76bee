"""Loader of one rank: an iterable of batches that can be resumed.

Its state is the position in the epoch, and no state of a rank. So any number of ranks can resume
from it, with the very next sample.
"""

from __future__ import annotations

import time
import uuid
import warnings
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import replace
from typing import Any

import numpy as np

from lightning_dlres.core.checks import flag, function, whole_number
from lightning_dlres.core.errors import ConfigError
from lightning_dlres.prefetch.cache.client import CacheClient
from lightning_dlres.prefetch.cache.launch import check_name
from lightning_dlres.prefetch.cache.messages import HostConfig, Joined, Metrics
from lightning_dlres.prefetch.cache.space.cache_space import EpochSlots
from lightning_dlres.prefetch.loading.direct import DirectClient
from lightning_dlres.prefetch.loading.ranks import Ranks
from lightning_dlres.prefetch.loading.workers import (
    BatchMaker,
    Collate,
    Decode,
    DecodePool,
    Workers,
)
from lightning_dlres.prefetch.order.sequence import ShardSpec, Tail, splitmix64
from lightning_dlres.prefetch.storage.registry import DIRECT

# Version of the state in checkpoints.
_VERSION = 1


class PrefetchLoader:
    """Iterable of batches; each `iter` runs through the next epoch.

    A Trainer also saves the loader's state in checkpoints if it gets the loader without a data
    module. But Lightning does not restore the state if `Trainer.estimated_stepping_batches` was
    read before training.

    Args:
        cache: Name of the host's cache, see `CacheClient`.
        config: Configuration of the cache.
        ranks: Rank of this process, and the ranks of its host. None: this is the only rank.
        batch_size: Number of samples in one batch of this rank.
        shuffle: True: every epoch has its own order. False: the order of the data set.
        seed: Seed of the orders, and of the samples' own seeds. A restored state has its own.
        tail: See `ShardSpec`.
        decode: See `BatchMaker`.
        collate: See `BatchMaker`.
        num_workers: See `DecodePool`.
        worker_type: See `DecodePool`.
        pin_memory: See `DecodePool`.
        epoch: Number of the first epoch.
        epochs: Total number of epochs. Nothing is prefetched after the last one. None: unknown.
        tail_batch_size: Number of samples of a rank that the tail rule treats as one batch. None:
            `batch_size`.
        on_batch: Called before each batch is handed over.
        count_unfinished: Returns the number of batches that were handed over last and not trained
            on. They come again after a resume. None: all were trained on.
        is_epoch_cut: Returns true if the last batch ends the epoch although samples are left. None:
            no batch does.

    Attributes:
        stalled_seconds: Seconds that the caller has waited for samples and workers. Decoding in
            the caller does not count.

    Raises:
        ConfigError: If an argument is out of its range.
    """

    def __init__(
        self,
        cache: str,
        config: HostConfig,
        *,
        ranks: Ranks | None = None,
        batch_size: int = 1,
        shuffle: bool = True,
        seed: int = 0,
        tail: Tail = "pad",
        decode: Decode | None = None,
        collate: Collate | None = None,
        num_workers: int = 0,
        worker_type: Workers = "thread",
        pin_memory: bool = False,
        epoch: int = 0,
        epochs: int | None = None,
        tail_batch_size: int | None = None,
        on_batch: Callable[[PrefetchLoader], None] | None = None,
        count_unfinished: Callable[[], int] | None = None,
        is_epoch_cut: Callable[[], bool] | None = None,
    ) -> None:
        check_name(cache)
        self._cache, self._config = cache, config
        self._ranks = ranks or Ranks()
        # Check here also the arguments that are first used later.
        whole_number("batch_size", batch_size, "batch_size=32")
        whole_number("seed", seed, "seed=0", least=0)
        if epochs is not None:
            whole_number("epochs", epochs, "epochs=10")
        flag("shuffle", shuffle)
        function("decode", decode)
        function("collate", collate)
        ShardSpec(0, 0, self._ranks.num_ranks, batch_size, tail)
        DecodePool(BatchMaker(decode, collate, "raw"), num_workers, worker_type)
        self._batch_size, self._shuffle, self._tail = batch_size, shuffle, tail
        self._seed, self._epochs = seed, epochs
        self._on_batch = on_batch
        self._count_unfinished, self._is_epoch_cut = count_unfinished, is_epoch_cut
        self._decode, self._collate = decode, collate
        self._num_workers, self._worker_type = num_workers, worker_type
        self._pin_memory = pin_memory
        self._client: CacheClient | DirectClient | None = None
        self._data_set: Joined | None = None
        self._pool: DecodePool | None = None
        self._tail_batch_size = tail_batch_size or batch_size
        # Number of the current epoch. Of this epoch: the number of samples that all ranks consumed
        # before the last resume, and the number of batches that this rank yielded before it.
        self._epoch, self._consumed_before, self._batches_before = epoch, 0, 0
        # Number of batches of this epoch that this rank has yielded since the last resume.
        self._batches_yielded = 0
        # True if the epoch was iterated to its end.
        self._is_finished = False
        # A strong reference would make a cycle. Then the connection to the cache would stay open
        # until the garbage collector runs.
        self._iterator: weakref.ref[_EpochIterator] | None = None
        self.stalled_seconds = 0.0

    def __len__(self) -> int:
        """Return the number of this rank's batches in the current epoch or, between epochs, in the
        next one.

        It is the number of batches that a rank had yielded before the last resume, plus those that
        are left. After a resume with another number of ranks, a whole epoch may have another one.
        """
        if self._is_exhausted(self._batches_yielded):
            return self._num_batches(0)
        return self._batches_before + self._num_batches(self._consumed_before)

    def __iter__(self) -> Iterator[Any]:
        self._end_iterator()
        if self._batches_yielded or self._is_finished:
            self._epoch += 1
            self._consumed_before = self._batches_before = self._batches_yielded = 0
            self._is_finished = False
        iterator = _EpochIterator(self)
        self._iterator = weakref.ref(iterator)
        return iterator

    def state_dict(self) -> dict[str, Any]:
        """Return the position in the epoch; it is the same on all ranks."""
        done = self._batches_yielded
        if self._count_unfinished is not None:
            done -= min(done, self._count_unfinished())
        epoch, batches = self._epoch, self._batches_before + done
        assigned = done * self._batch_size * self._ranks.num_ranks
        consumed = min(self._consumed_before + assigned, self.data_set.samples)
        is_cut = done and self._is_epoch_cut is not None and self._is_epoch_cut()
        if is_cut or self._is_exhausted(done):
            epoch, consumed, batches = epoch + 1, 0, 0
        return {
            "version": _VERSION,
            "epoch": epoch,
            "consumed": consumed,
            "batches": batches,
            "seed": self._seed,
            "shuffle": self._shuffle,
            "samples": self.data_set.samples,
            "digest": self.data_set.digest,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resume from a state, with the next `iter` or with an iterator that has not begun.

        Raises:
            ConfigError: If the state is of another data set, or of an unfinished epoch with another
                order.
        """
        data_set = self.data_set
        if state.get("version") != _VERSION:
            raise ConfigError(
                f"version of a loader's state must be {_VERSION}, got {state.get('version')!r}. "
                "Resume with the version of lightning-dlres that saved it."
            )
        if (state["samples"], state["digest"]) != (data_set.samples, data_set.digest):
            raise ConfigError(
                f"The state of a loader must be of this data set ({data_set.samples} samples with "
                f"digest {data_set.digest}), got one of {state['samples']} samples with digest "
                f"{state['digest']}. Resume with the data set of the checkpoint, because another "
                "data set has another order."
            )
        if state["consumed"] and state.get("shuffle", self._shuffle) != self._shuffle:
            # The rest of the epoch in another order would repeat some samples and lack others.
            raise ConfigError(
                f"shuffle must be {state['shuffle']}, as in the checkpoint, which was saved within "
                f"an epoch, got {self._shuffle} (overfit_batches turns it off). To change it, "
                "resume from the end of an epoch."
            )
        iterator = self._iterator() if self._iterator is not None else None
        if iterator is not None and iterator.has_started:
            self._end_iterator()
        self._epoch, self._consumed_before = state["epoch"], state["consumed"]
        self._batches_before, self._batches_yielded = state["batches"], 0
        self._is_finished = False
        self._seed = state["seed"]

    @property
    def client(self) -> CacheClient | DirectClient:
        """Connection to the cache, or with direct reads the reader; made at its first use."""
        if self._client is None:
            if self._config.source.storage == DIRECT:
                self._client = DirectClient(self._config, self._reads_in_workers)
            else:
                self._client = CacheClient(self._cache, self._config)
            self._leave_at_end = weakref.finalize(self, self._client.leave)
        return self._client

    @property
    def data_set(self) -> Joined:
        """Facts about the data set; also known after `close`."""
        if self._data_set is None:
            self._data_set = self.client.joined
            if self._data_set.note and self._ranks.rank == 0:
                warnings.warn(self._data_set.note, stacklevel=2)
        return self._data_set

    def metrics(self) -> Metrics:
        """Return the metrics of the host's cache since it started."""
        return self.client.metrics()

    def close(self) -> None:
        """Leave the cache and end the workers. The loader can be used again."""
        self._end_iterator()
        if self._pool is not None:
            self._pool.close()
            self._pool = None
        if self._client is not None:
            self._leave_at_end.detach()
            self._client.close()
            self._client = None

    def __getstate__(self) -> dict[str, Any]:
        """Return the attributes of a copy. The copy has a cache of its own, because one cache
        delivers each sample of an epoch only once."""
        return {
            **vars(self),
            "_cache": f"{self._cache.partition('~')[0]}~{uuid.uuid4().hex[:8]}",
            "_ranks": replace(self._ranks, local_ranks=(self._ranks.rank,)),
            **dict.fromkeys(("_client", "_pool", "_iterator", "_leave_at_end")),
            **dict.fromkeys(("_on_batch", "_count_unfinished", "_is_epoch_cut")),
        }

    @property
    def batch_size(self) -> int:
        """Samples of one batch of this rank."""
        return self._batch_size

    @property
    def next_epoch(self) -> int:
        """Number of the epoch that the next `iter` runs through."""
        return self._epoch + int(self._batches_yielded > 0 or self._is_finished)

    @property
    def _reads_in_workers(self) -> bool:
        return self._num_workers > 0 and self._worker_type == "process"

    def _end_iterator(self) -> None:
        iterator = self._iterator() if self._iterator is not None else None
        if iterator is not None:
            iterator.end(
                ConfigError(
                    "A PrefetchLoader must have one iterator at a time, got a call of an iterator "
                    "that has ended: the loader was closed, loaded a state, or started another "
                    "iterator. To iterate twice at a time, use a copy (copy.copy) of the loader."
                )
            )
        self._iterator = None

    def _is_exhausted(self, done: int) -> bool:
        """Return true if the epoch is over after `done` batches since the last resume."""
        is_finished = self._is_finished and done == self._batches_yielded
        return is_finished or 0 < self._num_batches(self._consumed_before) <= done

    def _num_batches(self, consumed: int) -> int:
        """Return the number of this rank's batches after `consumed` samples of an epoch."""
        return -(-self._shards(consumed).num_samples(self._ranks.rank) // self._batch_size)

    def _shards(self, consumed: int) -> ShardSpec:
        samples = self.data_set.samples
        return ShardSpec(
            samples, consumed, self._ranks.num_ranks, self._tail_batch_size, self._tail
        )

    def _begin_epoch(self) -> int:
        return self.client.begin_epoch(
            rank=self._ranks.rank,
            seed=self._seed,
            epoch=self._epoch,
            shuffle=self._shuffle,
            consumed=self._consumed_before,
            ranks=self._ranks.num_ranks,
            local_ranks=self._ranks.local_ranks,
            batch=self._tail_batch_size,
            tail=self._tail,
            has_next=self._epochs is None or self._epoch + 1 < self._epochs,
        )

    def _decode_pool(self) -> DecodePool:
        if self._pool is None:
            classes = self._config.source.classes
            maker = BatchMaker(self._decode, self._collate, self.data_set.encoding, classes)
            client, timeout = self.client, self._config.source.timeout
            reader = client.reader if isinstance(client, DirectClient) else None
            self._pool = DecodePool(
                maker, self._num_workers, self._worker_type, self._pin_memory, reader, timeout
            )
        return self._pool


class _EpochIterator(Iterator[Any]):
    """One pass through the rest of an epoch. The epoch begins with the first batch, because
    Lightning makes iterators that it never uses."""

    def __init__(self, loader: PrefetchLoader) -> None:
        self._loader = loader
        # Samples of requested batches, oldest first.
        self._requested: deque[Future[Any]] = deque()
        # Batches that workers are making, oldest first. Each function waits for its batch and
        # returns it.
        self._in_progress: deque[Callable[[], Any]] = deque()
        # True once the caller has asked for a batch.
        self.has_started = False
        # Error of every further call once the iterator has ended.
        self._end_error: Exception | None = None

    def __next__(self) -> Any:
        if self._end_error is not None:
            raise self._end_error
        try:
            return self._next()
        except Exception as error:
            # A further batch would come in the place of the failed one, which would be left out.
            self.end(error)
            raise
        except BaseException:
            self.end(
                ConfigError(
                    "An iterator of a PrefetchLoader must not be used after an interruption, got "
                    "another call. Start another iterator."
                )
            )
            raise

    def end(self, reason: Exception) -> None:
        """Drop the remaining batches; every further call raises `reason`."""
        if self._end_error is None:
            self._end_error = reason
            self._requested.clear()
            self._in_progress.clear()

    def _start(self) -> None:
        loader, ranks = self._loader, self._loader._ranks
        shards = loader._shards(loader._consumed_before)
        self._epoch_id = loader._begin_epoch()
        # The epoch slots of a host alternate between its ranks. This rank has the slots lane,
        # lane + stride, lane + 2 * stride, ...
        self._stride, self._lane = len(ranks.local_ranks), ranks.local_ranks.index(ranks.rank)
        self._num_samples = shards.num_samples(ranks.rank)
        self._num_batches = -(-self._num_samples // loader._batch_size)
        self._num_requested = 0
        self._pool = loader._decode_pool()
        # With lookahead=0, as in the published method, nothing is requested ahead of need.
        self._is_on_miss = loader._config.lookahead == 0
        # Two batches for each worker, as in torch's DataLoader, and one for the caller.
        self._max_requested = 1 if self._is_on_miss else 2 + 2 * self._pool.num_workers
        self._max_in_progress = 1 + 2 * self._pool.num_workers
        self._epoch_seed = splitmix64(splitmix64(loader._seed % 2**64) + loader._epoch)
        self.has_started = True

    def _next(self) -> Any:
        if not self.has_started:
            self._start()
        self._request()
        if not self._in_progress and not self._requested:
            self._loader._is_finished = True
            raise StopIteration
        self._pass_to_workers()
        make = self._in_progress.popleft()
        started = time.monotonic()
        batch = make()
        if self._pool.num_workers:
            self._loader.stalled_seconds += time.monotonic() - started
        # `make` holds the samples, and their room in the cache is needed.
        del make
        if not self._is_on_miss:
            self._pass_to_workers(waits=False)
        if self._loader._on_batch:
            self._loader._on_batch(self._loader)
        # This comes last, because a batch must not count if anything above fails.
        self._loader._batches_yielded += 1
        return batch

    def _pass_to_workers(self, waits: bool = True) -> None:
        """Pass delivered samples to the workers, and request more.

        Args:
            waits: True: wait for the first batch if workers make none. False: never wait, and leave
                the error of a failed batch to the call that needs the batch.
        """
        while self._requested and len(self._in_progress) < self._max_in_progress:
            first = self._requested[0]
            if (self._in_progress or not waits) and not first.done():
                return
            if not waits and first.exception() is not None:
                return
            started = time.monotonic()
            samples = self._loader.client.wait(self._requested.popleft())
            self._loader.stalled_seconds += time.monotonic() - started
            samples.epoch_seed = self._epoch_seed
            self._in_progress.append(self._pool.submit(samples))
            # Otherwise this frame would hold the samples until the next iteration.
            del samples
            if not self._is_on_miss:
                self._request()

    def _request(self) -> None:
        client = self._loader.client
        while self._num_requested < self._num_batches and client.may_request(
            len(self._requested), self._max_requested
        ):
            slots = self._epoch_slots(self._num_requested)
            self._requested.append(client.request_batch(self._epoch_id, slots))
            self._num_requested += 1

    def _epoch_slots(self, batch: int) -> EpochSlots:
        size = self._loader._batch_size
        end = min((batch + 1) * size, self._num_samples)
        own = np.arange(batch * size, end, dtype=np.int64)
        return (own * self._stride + self._lane).astype(np.uint32)
