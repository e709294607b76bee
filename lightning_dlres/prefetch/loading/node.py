"""`torchdata` node over the prefetch cache, to combine with torchdata's mappers, batchers and
loaders."""

from __future__ import annotations

import os
import uuid
from collections.abc import Iterator
from typing import Any

from torchdata.nodes import BaseNode
from typing_extensions import override

from lightning_dlres.prefetch.cache.messages import Metrics
from lightning_dlres.prefetch.cache.options import Source, host_config
from lightning_dlres.prefetch.cache.samples import Sample
from lightning_dlres.prefetch.loading.loader import PrefetchLoader
from lightning_dlres.prefetch.loading.ranks import Ranks
from lightning_dlres.prefetch.order.sequence import Tail

# Samples of one batch request. A request costs the same for one sample as for many.
_BATCH_SIZE = 16


class PrefetchCacheNode(BaseNode[Sample]):  # type: ignore[misc]
    """Node that yields the samples of a source out of a cache that fetches them ahead of need.

    A sample's bytes are not copied. They stay in the cache as long as any object looks at them.

    A `reset` without a state starts the next epoch, or the same one if none of its samples was
    yielded. A `reset` with a state resumes with the very next sample, on any number of ranks.

    Args:
        source: See `prefetch.cache.options.host_config`.
        ranks: Rank of this process; None: the only one.
        shuffle: True: every epoch has its own order. False: the order of the data set.
        seed: Seed of the orders.
        tail: See `ShardSpec`; one sample counts as a batch.
        epochs: Number of all epochs, so that nothing is prefetched after the last; None: unknown.
        cache: Name of the cache, the same for all ranks of a host that share it, and for no other
            data set or job. None: this node has a cache of its own.
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
        # The loader's state at the last reset, and the samples that were yielded since.
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
            self._batch = next(self._batches)[::-1]
        self._num_yielded += 1
        return self._batch.pop()

    @override
    def get_state(self) -> dict[str, Any]:
        state = self._state
        consumed = min(state["consumed"] + self._num_yielded * self._ranks.ranks, state["samples"])
        return {**state, "consumed": consumed, "batches": state["batches"] + self._num_yielded}

    def metrics(self) -> Metrics:
        """Return the metrics of the host's cache since it started."""
        return self._loader.metrics()

    def close(self) -> None:
        """Leave the cache. Another `reset` joins it again."""
        self._batch = []
        self._loader.close()


def _identity(value: Any) -> Any:
    return value
