"""Cache index of an epoch: its samples in order, and one prefetch list for each storage node.

The lists are arrays of 32-bit numbers, built and walked by compiled functions: a data set may have
many millions of samples.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numba import boolean, int32, int64, uint32
from numpy.typing import NDArray

from lightning_dlres.core.compiled import compiled
from lightning_dlres.core.errors import ConfigError, got_expected
from lightning_dlres.prefetch.cache.space.cache_space import EpochSlots
from lightning_dlres.prefetch.cache.space.entry_kernels import DONE, PINNED, UNFETCHED
from lightning_dlres.prefetch.order.sequence import SampleIds

Flags = NDArray[np.bool_]


@dataclass
class CacheIndex:
    """Samples that one host needs in one epoch, and the prefetch list of each storage node.

    A run is a sequence of epoch slots that are next to each other in a prefetch list, except for
    slots that were fetched before. One fetch gets the samples of one run.

    Attributes:
        sample_ids: uint32[n], the sample of each epoch slot.
        lists: uint32[m], epoch slots. Those of node i are from `starts[i]` to `starts[i + 1]`,
            ascending. Pinned samples are in no list.
        starts: int64[nodes + 1], see `lists`.
        cursors: int64[nodes], positions in `lists`. Every slot of a node's list before its cursor
            was fetched, is being fetched, or could not be fetched.
    """

    sample_ids: SampleIds
    lists: EpochSlots
    starts: NDArray[np.int64]
    cursors: NDArray[np.int64] = field(init=False)

    def __post_init__(self) -> None:
        self.cursors = self.starts[:-1].copy()

    @staticmethod
    def build(sample_ids: SampleIds, nodes: int, is_pinned: Flags | None = None) -> CacheIndex:
        """Return the index of samples in the order of an epoch.

        Args:
            sample_ids: uint32[n], in the order of the epoch.
            nodes: Number of storage nodes; sample i is on node i mod `nodes`.
            is_pinned: bool[samples], true for samples of the pinned tier, which need no fetch.
                None: no sample is pinned.

        Raises:
            ConfigError: If there is no node.
        """
        if nodes < 1:
            raise ConfigError(got_expected("nodes", nodes, "at least 1", "nodes=1"))
        flags = np.zeros(0, dtype=np.bool_) if is_pinned is None else is_pinned
        starts = np.zeros(nodes + 1, dtype=np.int64)
        lists = _build_lists(sample_ids, flags, starts)
        return CacheIndex(sample_ids, lists, starts)

    @property
    def nodes(self) -> int:
        """Number of prefetch lists."""
        return len(self.starts) - 1

    def __len__(self) -> int:
        return len(self.sample_ids)

    def management_bytes(self) -> int:
        """Return the bytes of the arrays."""
        arrays = (self.sample_ids, self.lists, self.starts, self.cursors)
        return sum(array.nbytes for array in arrays)

    def run_on_miss(self, epoch_slot: int, max_slots: int, states: Any) -> EpochSlots:
        """Return the run of a missed epoch slot and the next unfetched ones of its prefetch list.

        Args:
            epoch_slot: The missed epoch slot.
            max_slots: Maximum number of epoch slots to return, the missed one included.
            states: int32[n], the epoch's row of the slot table.
        """
        node = int(self.sample_ids[epoch_slot]) % self.nodes
        node_list = self.lists[self.starts[node] : self.starts[node + 1]]
        # With a Python int, `searchsorted` would first copy the whole list to int64.
        at = int(np.searchsorted(node_list, node_list.dtype.type(epoch_slot)))
        run = np.empty(max_slots, dtype=np.uint32)
        unlimited = np.iinfo(np.int64).max
        count, _ = _collect_unfetched(node_list, at, len(node_list), states, unlimited, run)
        return run[:count]

    def run_ahead(
        self, node: int, max_slots: int, reach: int, states: Any
    ) -> tuple[EpochSlots, bool]:
        """Return the next run of a node's prefetch list, and whether the run is final.

        Args:
            node: The storage node.
            max_slots: Maximum number of epoch slots to return.
            reach: Only epoch slots below it are returned.
            states: int32[n], the epoch's row of the slot table.

        Returns:
            Epoch slots, uint32[0 to `max_slots`]; true if the run is final. A final run does not
            grow when the reach grows, because it has `max_slots` slots or ends the list.
        """
        run = np.empty(max_slots, dtype=np.uint32)
        at, stop = int(self.cursors[node]), int(self.starts[node + 1])
        at = _first_unfetched(self.lists, at, stop, states)
        self.cursors[node] = at
        count, end = _collect_unfetched(self.lists, at, stop, states, reach, run)
        return run[:count], count == max_slots or end == stop


def count_missing(states: Any, epoch_slots: EpochSlots) -> int:
    """Return the number of epoch slots whose sample is neither in the cache space nor pinned."""
    return int(_count_missing(states, epoch_slots))


@compiled((uint32[::1], int64[::1], int32[::1], int64, int64, int64))
def extend_reach(
    sample_ids: Any, sizes: Any, states: Any, reach: int, reserved: int, budget: int
) -> tuple[int, int]:
    """Extend the reach of an epoch as far as the budget goes.

    The reserved bytes are those of the samples in use, and of all samples before the reach, whether
    they were fetched or not. Samples that are done or pinned do not count. So samples that are
    needed first never wait for room that later samples have taken.

    Args:
        sample_ids: uint32[n], by epoch slot.
        sizes: int64[samples], in bytes.
        states: int32[n], the epoch's row of the slot table.
        reach: Epoch slots below it may be fetched already.
        reserved: Bytes that are reserved so far.
        budget: Maximum number of reserved bytes.

    Returns:
        The new reach and the new reserved bytes.
    """
    while reach < len(sample_ids):
        if states[reach] != DONE and states[reach] != PINNED:
            size = sizes[sample_ids[reach]]
            if reserved + size > budget:
                break
            reserved += size
        reach += 1
    return reach, reserved


@compiled((uint32[::1], boolean[::1], int64[::1]))
def _build_lists(sample_ids: Any, is_pinned: Any, starts: Any) -> Any:
    """Return the prefetch lists, concatenated, and fill in `starts`. This is a counting sort."""
    nodes = len(starts) - 1
    total = 0
    for sample_id in sample_ids:
        if len(is_pinned) == 0 or not is_pinned[sample_id]:
            starts[sample_id % nodes + 1] += 1
            total += 1
    for node in range(nodes):
        starts[node + 1] += starts[node]
    lists = np.empty(total, dtype=np.uint32)
    ends = starts.copy()
    for slot in range(len(sample_ids)):
        sample_id = sample_ids[slot]
        if len(is_pinned) == 0 or not is_pinned[sample_id]:
            node = sample_id % nodes
            lists[ends[node]] = slot
            ends[node] += 1
    return lists


@compiled((uint32[::1], int64, int64, int32[::1]))
def _first_unfetched(lists: Any, at: int, stop: int, states: Any) -> int:
    while at < stop and states[lists[at]] != UNFETCHED:
        at += 1
    return at


@compiled((uint32[::1], int64, int64, int32[::1], int64, uint32[::1]))
def _collect_unfetched(
    lists: Any, at: int, stop: int, states: Any, reach: int, run: Any
) -> tuple[int, int]:
    """Fill `run` with unfetched epoch slots below `reach`, from position `at` of `lists` on; return
    their count and the position behind the last one that was looked at."""
    count = 0
    while at < stop and count < len(run) and lists[at] < reach:
        if states[lists[at]] == UNFETCHED:
            run[count] = lists[at]
            count += 1
        at += 1
    return count, at


@compiled((int32[::1], uint32[::1]))
def _count_missing(states: Any, epoch_slots: Any) -> int:
    count = 0
    for slot in epoch_slots:
        if states[slot] < 0 and states[slot] != PINNED:
            count += 1
    return count
