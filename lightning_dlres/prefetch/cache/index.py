"""The cache index of an epoch and its prefetch lists (C2, C3), and what to ask a storage node for
next: arrays of 32-bit numbers, built and walked in Numba."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numba import boolean, int32, int64, uint32
from numpy.typing import NDArray

from lightning_dlres.core.compiled import compiled
from lightning_dlres.core.errors import ConfigError, got_expected
from lightning_dlres.prefetch.cache.space.entry_kernels import DONE, KEPT, UNASKED
from lightning_dlres.prefetch.order.sequence import Positions

Flags = NDArray[np.bool_]


@dataclass
class CacheIndex:
    """What one host needs in one epoch, in order, and one prefetch list for every storage node.

    `numbers` is uint32[n]: the sample of every position. `lists` is uint32[n]: positions, those of
    node m from `starts[m]` to `starts[m + 1]`, ascending; `starts` and `cursors` are int64. A
    node's cursor is before the first of its list that has not been asked for.
    """

    numbers: Positions
    lists: Positions
    starts: NDArray[np.int64]
    cursors: NDArray[np.int64] = field(init=False)

    def __post_init__(self) -> None:
        self.cursors = self.starts[:-1].copy()

    @staticmethod
    def build(numbers: Positions, nodes: int, kept: Flags | None = None) -> CacheIndex:
        """Return the index of samples in order, sample i being on node i mod `nodes`.

        Args:
            numbers: uint32[n], the samples in the order of the epoch.
            nodes: how many storage nodes there are.
            kept: bool[samples], which need not be asked for.

        Raises:
            ConfigError: there is no node.
        """
        if nodes < 1:
            raise ConfigError(got_expected("nodes", nodes, "at least 1", "nodes=1"))
        flags = np.zeros(0, dtype=np.bool_) if kept is None else kept
        starts = np.zeros(nodes + 1, dtype=np.int64)
        lists = _split(numbers, flags, starts)
        return CacheIndex(numbers, lists, starts)

    @property
    def nodes(self) -> int:
        """How many prefetch lists there are."""
        return len(self.starts) - 1

    def __len__(self) -> int:
        return len(self.numbers)

    def management_bytes(self) -> int:
        """Return the bytes of the arrays."""
        arrays = (self.numbers, self.lists, self.starts, self.cursors)
        return sum(array.nbytes for array in arrays)

    def on_miss(self, position: int, most: int, places: Any) -> Positions:
        """Return a missed position and up to `most` - 1 next ones of its list that have not been
        asked for (C4)."""
        node = int(self.numbers[position]) % self.nodes
        mine = self.lists[self.starts[node] : self.starts[node + 1]]
        at = int(np.searchsorted(mine, position))
        found = np.empty(most, dtype=np.uint32)
        count, _ = _unasked(mine, at, len(mine), places, np.iinfo(np.int64).max, found)
        return found[:count]

    def ahead(self, node: int, most: int, reach: int, places: Any) -> tuple[Positions, bool]:
        """Return up to `most` next positions of a node's list that lie before `reach` and have not
        been asked for, and whether more of them are not worth waiting for: there are as many as
        may be asked for, or the list ends with them."""
        found = np.empty(most, dtype=np.uint32)
        at, stop = int(self.cursors[node]), int(self.starts[node + 1])
        at = _first_unasked(self.lists, at, stop, places)
        self.cursors[node] = at
        count, behind = _unasked(self.lists, at, stop, places, reach, found)
        return found[:count], count == most or behind == stop


def missing(places: Any, positions: Positions) -> int:
    """Return how many positions' samples are neither in the cache nor kept."""
    return int(_missing(places, positions))


@compiled((uint32[::1], int64[::1], int32[::1], int64, int64, int64))
def extend(
    numbers: Any, sizes: Any, places: Any, reach: int, promised: int, budget: int
) -> tuple[int, int]:
    """Return how far positions may be asked for, and the bytes promised to all before: as long as
    everything before, asked for or not, fits into `budget` bytes together with what is in use.

    So room for what is needed first is never taken by what is needed later.
    """
    while reach < len(numbers):
        if places[reach] != DONE and places[reach] != KEPT:
            size = sizes[numbers[reach]]
            if promised + size > budget:
                break
            promised += size
        reach += 1
    return reach, promised


@compiled((uint32[::1], boolean[::1], int64[::1]))
def _split(numbers: Any, kept: Any, starts: Any) -> Any:
    nodes = len(starts) - 1
    total = 0
    for number in numbers:
        if len(kept) == 0 or not kept[number]:
            starts[number % nodes + 1] += 1
            total += 1
    for node in range(nodes):
        starts[node + 1] += starts[node]
    lists = np.empty(total, dtype=np.uint32)
    ends = starts.copy()
    for position in range(len(numbers)):
        number = numbers[position]
        if len(kept) == 0 or not kept[number]:
            node = number % nodes
            lists[ends[node]] = position
            ends[node] += 1
    return lists


@compiled((uint32[::1], int64, int64, int32[::1]))
def _first_unasked(lists: Any, at: int, stop: int, places: Any) -> int:
    while at < stop and places[lists[at]] != UNASKED:
        at += 1
    return at


@compiled((uint32[::1], int64, int64, int32[::1], int64, uint32[::1]))
def _unasked(
    lists: Any, at: int, stop: int, places: Any, reach: int, found: Any
) -> tuple[int, int]:
    count = 0
    while at < stop and count < len(found) and lists[at] < reach:
        if places[lists[at]] == UNASKED:
            found[count] = lists[at]
            count += 1
        at += 1
    return count, at


@compiled((int32[::1], uint32[::1]))
def _missing(places: Any, positions: Any) -> int:
    count = 0
    for position in positions:
        if places[position] < 0 and places[position] != KEPT:
            count += 1
    return count
