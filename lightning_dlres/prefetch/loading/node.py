"""The cache as a `torchdata` node, so that it composes with mappers, batchers and loaders of
others."""

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
from lightning_dlres.prefetch.loading.loader import PrefetchLoader, Ranks
from lightning_dlres.prefetch.order.sequence import Tail

# Asked for together, since a question and its answer cost the same for one as for many.
_AT_ONCE = 16


class PrefetchCacheNode(BaseNode[Sample]):  # type: ignore[misc]
    """Yields the samples of a source, in another order in every epoch, out of a cache that fetches
    them ahead of need (Method C). A sample's bytes are not copied; they stay in the cache until
    nothing looks at them any more.

    A `reset` without a state starts the next epoch, or the same one again while nothing of it was
    taken; a state goes on with the very next sample, on any number of ranks.

    Args:
        source: see `prefetch.options.host_config`, as all further options.
        ranks: who this is among data-parallel ranks; None: the only one.
        shuffle: whether there is another order in every epoch.
        seed: of the orders.
        tail: see `Deal`; one sample counts as a batch.
        epochs: how many there will be, so that nothing is fetched for one more; None: unknown.
        cache: a name, the same for all ranks of a host that share the cache, and for no other data
            set or job; None: a cache of this node's own.

    Raises:
        ConfigError: a bad value.
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
            batch_size=_AT_ONCE,
            unit=1,
            shuffle=shuffle,
            seed=seed,
            tail=tail,
            decode=_as_it_is,
            collate=_as_it_is,
            epochs=epochs,
        )
        self._chunks: Iterator[list[Sample]] = iter(())
        self._chunk: list[Sample] = []
        self._state: dict[str, Any] = {}
        self._given = 0

    @override
    def reset(self, initial_state: dict[str, Any] | None = None) -> None:
        super().reset(initial_state)
        self._chunk = []
        if initial_state is not None:
            self._loader.load_state_dict(initial_state)
        self._chunks = iter(self._loader)
        self._state, self._given = self._loader.state_dict(), 0

    @override
    def next(self) -> Sample:
        if not self._chunk:
            self._chunk = next(self._chunks)[::-1]
        self._given += 1
        return self._chunk.pop()

    @override
    def get_state(self) -> dict[str, Any]:
        state = self._state
        consumed = min(state["consumed"] + self._given * self._ranks.ranks, state["samples"])
        return {**state, "consumed": consumed, "batches": state["batches"] + self._given}

    def metrics(self) -> Metrics:
        """Return what the host's cache has counted since it started."""
        return self._loader.metrics()

    def close(self) -> None:
        """Leave the cache; another `reset` joins it again."""
        self._chunk = []
        self._loader.close()


def _as_it_is(value: Any) -> Any:
    return value
