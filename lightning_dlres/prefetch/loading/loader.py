"""The loader: batches of one rank, whose state is where the epoch stands and nothing else, so that
any number of ranks can go on from it on the very next sample.
"""

from __future__ import annotations

import time
import uuid
import warnings
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from lightning_dlres.core.checks import flag, function, whole_number
from lightning_dlres.core.errors import ConfigError, got_expected
from lightning_dlres.prefetch.cache.client import CacheClient
from lightning_dlres.prefetch.cache.launch import check_name
from lightning_dlres.prefetch.cache.messages import HostConfig, Joined, Metrics
from lightning_dlres.prefetch.loading.direct import DirectClient
from lightning_dlres.prefetch.loading.workers import (
    BatchMaker,
    Collate,
    Decode,
    DecodePool,
    Workers,
)
from lightning_dlres.prefetch.order.sequence import Positions, ShardSpec, Tail, mixed
from lightning_dlres.prefetch.storage.registry import DIRECT

_VERSION = 1


@dataclass(frozen=True)
class Ranks:
    """Which data-parallel rank this is, of how many, and which of them share this host's cache
    (ascending)."""

    rank: int = 0
    ranks: int = 1
    local: tuple[int, ...] = (0,)

    def __post_init__(self) -> None:
        fits = all(0 <= rank < self.ranks for rank in self.local)
        if self.rank not in self.local or not fits or list(self.local) != sorted(set(self.local)):
            raise ConfigError(
                "local must be the ranks of this host, ascending, with this one among them, got "
                f"{self.local} for rank {self.rank} of {self.ranks}. Use local=({self.rank!r},)."
            )


class PrefetchLoader:
    """An iterable of batches; every `iter` goes through the next epoch.

    Given to a Trainer without a data module its state is in checkpoints, too, but Lightning does
    not give it back where `Trainer.estimated_stepping_batches` was asked for before training.

    Args:
        cache: the name of the host's cache, see `CacheClient`.
        config: of the cache.
        ranks: who this is.
        batch_size: samples of a batch of this rank.
        shuffle: whether every epoch has an order of its own; else it is that of the data set.
        seed: of the orders.
        tail: see `ShardSpec`.
        decode, collate: see `BatchMaker`.
        num_workers, worker_type, pin_memory: see `DecodePool`.
        epoch: the number of the first.
        unit: how many samples of a rank "drop" does not split; None: a batch.
        epochs: how many there will be, so that nothing is fetched for one more; None: unknown.
        report: called when a batch is about to be handed over.
        unfinished: says how many of the last batches that were handed over do not count yet: they
            are dealt again after a resume, because they were not trained on. None: all count.
        ended: says whether the last batch that was handed over ends the epoch though samples are
            left. None: no batch does.

    Raises:
        ConfigError: a bad value.
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
        unit: int | None = None,
        report: Callable[[PrefetchLoader], None] | None = None,
        unfinished: Callable[[], int] | None = None,
        ended: Callable[[], bool] | None = None,
    ) -> None:
        check_name(cache)
        self._cache, self._config = cache, config
        self._ranks = ranks or Ranks()
        # What cannot be is said now.
        whole_number("batch_size", batch_size, "batch_size=32")
        whole_number("seed", seed, "seed=0", least=0)
        if epochs is not None:
            whole_number("epochs", epochs, "epochs=None")
        flag("shuffle", shuffle)
        function("decode", decode)
        function("collate", collate)
        ShardSpec(0, 0, self._ranks.ranks, batch_size, tail)
        DecodePool(BatchMaker(decode, collate, "raw"), num_workers, worker_type)
        self._batch_size, self._shuffle, self._tail = batch_size, shuffle, tail
        self._seed, self._epochs = seed, epochs
        self._report, self._unfinished, self._ended = report, unfinished, ended
        self._decode, self._collate = decode, collate
        self._num_workers, self._worker_type = num_workers, worker_type
        self._pin_memory = pin_memory
        self._client: CacheClient | DirectClient | None = None
        self._data_set: Joined | None = None
        self._pool: DecodePool | None = None
        self._unit = unit or batch_size
        self._epoch, self._start, self._before, self._yielded = epoch, 0, 0, 0
        self._iteration: weakref.ref[_Iteration] | None = None
        self._finished = False
        # Seconds that the caller has waited for samples and workers; its own decoding is work.
        self.stalled = 0.0

    def __len__(self) -> int:
        """How many batches this rank has in the epoch under way or, between epochs, in the next;
        after a resume with other ranks those before it count as they were."""
        if self._exhausted(self._yielded):
            return self._batches(0)
        return self._before + self._batches(self._start)

    def __iter__(self) -> Iterator[Any]:
        self._end_iteration()
        if self._yielded or self._finished:
            self._next_epoch()
        iteration = _Iteration(self)
        # A weak one, or the connection would stay until the garbage collector comes by.
        self._iteration = weakref.ref(iteration)
        return iteration

    def state_dict(self) -> dict[str, Any]:
        """Return where the epoch stands; the same on all ranks."""
        done = self._yielded
        if self._unfinished is not None:
            done -= min(done, self._unfinished())
        epoch, before = self._epoch, self._before + done
        dealt = done * self._batch_size * self._ranks.ranks
        consumed = min(self._start + dealt, self.data_set.samples)
        cut = done and self._ended is not None and self._ended()
        if cut or self._exhausted(done):
            epoch, consumed, before = epoch + 1, 0, 0
        return {
            "version": _VERSION,
            "epoch": epoch,
            "consumed": consumed,
            "batches": before,
            "seed": self._seed,
            "shuffle": self._shuffle,
            "samples": self.data_set.samples,
            "digest": self.data_set.digest,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a state, with the next `iter` or the first batch of one that has not begun.

        Raises:
            ConfigError: the state is of another data set, or amid an epoch of another order.
        """
        joined = self.data_set
        if state.get("version") != _VERSION:
            raise ConfigError(
                got_expected(
                    "version of a loader's state", state.get("version"), f"{_VERSION}", "another"
                )
            )
        if (state["samples"], state["digest"]) != (joined.samples, joined.digest):
            raise ConfigError(
                f"The state of a loader must be of this data set ({joined.samples} samples with "
                f"digest {joined.digest}), got one of {state['samples']} samples with "
                f"{state['digest']}. Start with the data set that the checkpoint was made with: "
                "another one has another order."
            )
        if state["consumed"] and state.get("shuffle", self._shuffle) != self._shuffle:
            # The rest of another order has samples that were trained on, and lacks others.
            raise ConfigError(
                f"shuffle must be {state['shuffle']}, as in the checkpoint, which was made amid an "
                f"epoch, got {self._shuffle} (overfit_batches turns it off). Go on from the end of "
                "an epoch to change it."
            )
        iteration = self._iteration() if self._iteration is not None else None
        if iteration is not None and iteration.started:
            self._end_iteration()
        self._epoch, self._start = state["epoch"], state["consumed"]
        self._before, self._yielded, self._finished = state["batches"], 0, False
        self._seed = state["seed"]

    @property
    def client(self) -> CacheClient | DirectClient:
        """The connection to the cache, or what reads without one; made when it is first needed."""
        if self._client is None:
            if self._config.source.storage == DIRECT:
                self._client = DirectClient(self._config, self._reads_in_workers)
            else:
                self._client = CacheClient(self._cache, self._config)
            self._leaving = weakref.finalize(self, self._client.leave)
        return self._client

    @property
    def data_set(self) -> Joined:
        """What the cache says of the data set; known also after `close`."""
        if self._data_set is None:
            self._data_set = self.client.joined
            if self._data_set.note and self._ranks.rank == 0:
                warnings.warn(self._data_set.note, stacklevel=2)
        return self._data_set

    def metrics(self) -> Metrics:
        """Return what the host's cache has counted since it started."""
        return self.client.metrics()

    def close(self) -> None:
        """Leave the cache, and end the workers; the loader can be used again."""
        self._end_iteration()
        if self._pool is not None:
            self._pool.close()
            self._pool = None
        if self._client is not None:
            self._leaving.detach()
            self._client.close()
            self._client = None

    def __getstate__(self) -> dict[str, Any]:
        """A copy has a cache of its own: in one cache every sample is taken once in an epoch."""
        return {
            **vars(self),
            "_cache": f"{self._cache.partition('~')[0]}~{uuid.uuid4().hex[:8]}",
            "_ranks": replace(self._ranks, local=(self._ranks.rank,)),
            **dict.fromkeys(
                ("_client", "_pool", "_iteration", "_leaving", "_report", "_unfinished", "_ended")
            ),
        }

    @property
    def batch_size(self) -> int:
        """Samples of a batch of this rank."""
        return self._batch_size

    @property
    def next_epoch(self) -> int:
        """The number of the epoch that the next `iter` goes through."""
        return self._epoch + int(self._yielded > 0 or self._finished)

    @property
    def _reads_in_workers(self) -> bool:
        return self._num_workers > 0 and self._worker_type == "process"

    def _end_iteration(self) -> None:
        iteration = self._iteration() if self._iteration is not None else None
        if iteration is not None:
            iteration.end(
                ConfigError(
                    "this iterator of a PrefetchLoader has ended: the loader was closed, got a "
                    "state, or started another iterator. It has one at a time; a copy "
                    "(copy.copy) goes through the epoch by itself."
                )
            )
        self._iteration = None

    def _exhausted(self, done: int) -> bool:
        """Return whether the epoch is over after so many batches."""
        finished = self._finished and done == self._yielded
        return finished or 0 < self._batches(self._start) <= done

    def _batches(self, consumed: int) -> int:
        """Return how many batches of this rank are left of an epoch."""
        return -(-self._deal(consumed).num_samples(self._ranks.rank) // self._batch_size)

    def _next_epoch(self) -> None:
        self._epoch += 1
        self._start = self._before = self._yielded = 0
        self._finished = False

    def _deal(self, consumed: int) -> ShardSpec:
        samples = self.data_set.samples
        return ShardSpec(samples, consumed, self._ranks.ranks, self._unit, self._tail)

    def _start_epoch(self) -> int:
        return self.client.begin(
            seed=self._seed,
            epoch=self._epoch,
            shuffle=self._shuffle,
            consumed=self._start,
            ranks=self._ranks.ranks,
            local_ranks=self._ranks.local,
            batch=self._unit,
            tail=self._tail,
            more=self._epochs is None or self._epoch + 1 < self._epochs,
        )

    def _decoders(self) -> DecodePool:
        if self._pool is None:
            classes = self._config.source.classes
            maker = BatchMaker(self._decode, self._collate, self.data_set.encoding, classes)
            client, reads = self.client, None
            if isinstance(client, DirectClient):
                reads = client.reader, self._config.source.timeout
            self._pool = DecodePool(
                maker, self._num_workers, self._worker_type, self._pin_memory, reads
            )
        return self._pool


class _Iteration(Iterator[Any]):
    """One pass through what is left of an epoch. It starts with the first batch that is asked for:
    Lightning makes iterators only to see that it can."""

    def __init__(self, loader: PrefetchLoader) -> None:
        self._loader = loader
        self._takes: deque[Future[Any]] = deque()
        self._making: deque[Callable[[], Any]] = deque()
        # Whether a batch was asked for.
        self.started = False
        # What every further call raises.
        self._over: Exception | None = None

    def _start(self) -> None:
        loader, ranks = self._loader, self._loader._ranks
        deal = loader._deal(loader._start)
        self._generation = loader._start_epoch()
        self._stride, self._lane = len(ranks.local), ranks.local.index(ranks.rank)
        self._mine = deal.num_samples(ranks.rank)
        self._batches = -(-self._mine // loader._batch_size)
        self._asked = 0
        self._pool = loader._decoders()
        # Method C as published takes one sample after the other.
        self._plain = loader._config.lookahead == 0
        # Two batches for each worker, as torch's DataLoader has it, and one that is handed over.
        self._most_takes = 1 if self._plain else 2 + 2 * self._pool.num_workers
        self._most_making = 1 + 2 * self._pool.num_workers
        self._seed = mixed(mixed(loader._seed % 2**64) + loader._epoch)
        self.started = True

    def __next__(self) -> Any:
        if self._over is not None:
            raise self._over
        try:
            return self._next()
        except Exception as error:
            # To go on behind a batch that is lost would leave it out.
            self.end(error)
            raise
        except BaseException:
            self.end(
                ConfigError("this iterator of a PrefetchLoader was interrupted: start another one.")
            )
            raise

    def end(self, reason: Exception) -> None:
        """Give up what is left."""
        if self._over is None:
            self._over = reason
            self._takes.clear()
            self._making.clear()

    def _next(self) -> Any:
        if not self.started:
            self._start()
        self._ask()
        if not self._making and not self._takes:
            self._loader._finished = True
            raise StopIteration
        self._fill()
        make = self._making.popleft()
        started = time.monotonic()
        batch = make()
        if self._pool.num_workers:
            self._loader.stalled += time.monotonic() - started
        # What it holds is let go now.
        del make
        if not self._plain:
            self._fill(waits=False)
        if self._loader._report:
            self._loader._report(self._loader)
        # Last: what is counted is handed over.
        self._loader._yielded += 1
        return batch

    def _fill(self, waits: bool = True) -> None:
        """Hand what has come to the workers, and ask for more; wait for the first if there is
        nothing to return. Without waiting nothing is raised, either."""
        while self._takes and len(self._making) < self._most_making:
            first = self._takes[0]
            if (self._making or not waits) and not first.done():
                return
            if not waits and first.exception() is not None:
                return
            started = time.monotonic()
            samples = self._loader.client.wait(self._takes.popleft())
            self._loader.stalled += time.monotonic() - started
            samples.epoch_seed = self._seed
            self._making.append(self._pool.submit(samples))
            del samples
            if not self._plain:
                self._ask()

    def _ask(self) -> None:
        client = self._loader.client
        while self._asked < self._batches and client.may_take(len(self._takes), self._most_takes):
            take = client.take(self._generation, self._positions(self._asked))
            self._takes.append(take)
            self._asked += 1

    def _positions(self, batch: int) -> Positions:
        size = self._loader._batch_size
        mine = np.arange(batch * size, min((batch + 1) * size, self._mine), dtype=np.int64)
        return (mine * self._stride + self._lane).astype(np.uint32)
