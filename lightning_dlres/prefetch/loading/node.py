"""`torchdata` node over the prefetch cache, to combine with torchdata's mappers, batchers and
loaders."""

from __future__ import annotations

import os
import uuid
from collections.abc import Iterator
from typing import Any

from torchdata.nodes import BaseNode
from typing_extensions import override

from lightning_dlres.core.checks import instance
from lightning_dlres.prefetch.cache.messages import Metrics
from lightning_dlres.prefetch.cache.options import Source, host_config
from lightning_dlres.prefetch.cache.samples import Sample
from lightning_dlres.prefetch.loading.loader import PrefetchLoader
from lightning_dlres.prefetch.loading.ranks import Ranks
from lightning_dlres.prefetch.order.sequence import Tail

# Samples of one batch request. A request costs the same for one sample as for many.
_BATCH_SIZE = 16


class PrefetchCacheNode(BaseNode[Sample]):  # type: ignore[misc]
    """Node that yields the samples of a source from a cache that prefetches them.

    By default local files are read without a cache; `storage="embedded"` caches them. A sample's
    bytes in the cache are not copied. They stay there while any object refers to them.

    A `reset` without a state starts the next epoch, or the same one if none of its samples was
    yielded. A `reset` with a state resumes after the last yielded sample, on any number of ranks.

    Args:
        source: See `prefetch.cache.options.host_config`.
        ranks: Rank of this process, and the ranks of its host. None: this is the only rank.
        shuffle: True: every epoch has its own order. False: the order of the data set.
        seed: Seed of the shuffled orders.
        tail: Rule for samples that do not divide evenly among the ranks; see `ShardSpec`. It takes
            each sample as a batch of its own.
        epochs: Total number of epochs. Nothing is prefetched after the last one. None: unknown.
        cache: Name of the cache. Ranks of one host that pass the same name share the cache. Other
            data sets and jobs need other names. None: this node shares its cache with no other.
        options: Further arguments of `prefetch.cache.options.host_config`.

    Raises:
        ConfigError: If an argument is out of its range.
    """

    def __init__(
        self,
        source: Source = ".",
        *,
        ranks: Ranks | None = None,
        shuffle: bool = True,
        seed: int = 0,
        tail: Tail = "pad",
        epochs: int | None = None,
        cache: str | None = None,
        **options: Any,
    ) -> None:
        super().__init__()
        if ranks is not None:
            instance("ranks", ranks, (Ranks,), "a Ranks or None", "ranks=None")
        self._ranks = ranks or Ranks()
        self._loader = PrefetchLoader(
            f"node-{os.getpid()}-{uuid.uuid4().hex[:8]}" if cache is None else cache,
            host_config(source, **options),
            ranks=self._ranks,
            batch_size=_BATCH_SIZE,
            tail_batch_size=1,
            shuffle=shuffle,
            seed=seed,
            tail=tail,
            decode=_identity,
            collate=_identity,
            epochs=epochs,
        )
        self._batches: Iterator[list[Sample]] = iter(())
        self._batch: list[Sample] = []
        # State of the loader at the last reset, and the number of samples yielded since.
        self._state: dict[str, Any] = {}
        self._num_yielded = 0

    @override
    def reset(self, initial_state: dict[str, Any] | None = None) -> None:
        super().reset(initial_state)
        self._batch = []
        if initial_state is not None:
            self._loader.load_state_dict(initial_state)
        self._batches = iter(self._loader)
        self._state, self._num_yielded = self._loader.state_dict(), 0

    @override
    def next(self) -> Sample:
        if not self._batch:
            # Reversed: `pop` takes the last element in constant time.
            self._batch = next(self._batches)[::-1]
        self._num_yielded += 1
        return self._batch.pop()

    @override
    def get_state(self) -> dict[str, Any]:
        state = self._state
        # The minimum, because padding of the last batches does not count as consumed. "batches" has
        # the yielded samples of this rank: in this state each sample is a batch.
        consumed = min(
            state["consumed"] + self._num_yielded * self._ranks.num_ranks, state["samples"]
        )
        return {**state, "consumed": consumed, "batches": state["batches"] + self._num_yielded}

    def metrics(self) -> Metrics:
        """Return the metrics of this host's cache, counted since the cache started."""
        return self._loader.metrics()

    def close(self) -> None:
        """Leave the cache. Another `reset` joins it again."""
        self._batch = []
        self._loader.close()


def _identity(value: Any) -> Any:
    return value
