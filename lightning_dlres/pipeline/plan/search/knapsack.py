"""Knapsack: the cheapest set of layers whose recomputation frees enough memory.

This 0/1 knapsack is solved by dynamic programming over the layers: each layer extends a list of
undominated sets. A set is dropped if its lower bound is no cheaper than the best known set. The
bound is the fractional relaxation, in which a layer may be taken in part. Without it, the list
would double with every layer if all layers cost the same per byte.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from itertools import accumulate
from math import inf

import numpy as np
from numpy.typing import NDArray

# Relative optimality gap: the search ignores sets that are cheaper by less than this.
RELATIVE_GAP = 1e-4
# Largest number of sets that `cheapest_covers` keeps after each item.
_MAX_SETS = 200


def cheapest_cover(
    seconds: Sequence[float], freed: Sequence[int], need: int
) -> tuple[int, ...] | None:
    """Return the cheapest set of items that frees enough, as ascending indices.

    The sum of its `seconds` is minimal to within `RELATIVE_GAP`. An item that frees nothing is
    never part of it.

    Args:
        seconds: Seconds of each item.
        freed: Bytes that each item frees.
        need: Bytes that the set must free.

    Returns:
        The indices; None if all items together do not free enough.
    """
    useful = sorted(
        (index for index, size in enumerate(freed) if size > 0),
        key=lambda index: seconds[index] / freed[index],
    )
    if sum(freed[index] for index in useful) < need:
        return None
    # Sums over the first items: entry i is over i items.
    freed_sums = list(accumulate((freed[index] for index in useful), initial=0))
    seconds_sums = list(accumulate((seconds[index] for index in useful), initial=0.0))
    best_seconds: float = inf
    best: tuple[int, ...] = ()
    # Undominated sets as (freed bytes, seconds, indices), with ascending bytes and seconds.
    states: list[tuple[int, float, tuple[int, ...]]] = [(0, 0.0, ())]
    for position, index in enumerate(useful):
        promising = []
        for state in states:
            state_freed, state_seconds, chosen = state
            # Complete the set with the next items, which are the cheapest per byte. The last item
            # counts as a whole for a set, and in part for the lower bound.
            target = freed_sums[position] + need - state_freed
            stop = bisect_left(freed_sums, target, position)
            if stop == len(freed_sums):
                continue
            completed_seconds = state_seconds + seconds_sums[stop] - seconds_sums[position]
            if completed_seconds < best_seconds:
                best_seconds, best = completed_seconds, (*chosen, *useful[position:stop])
            # Part of the last item that is not needed.
            excess = 0.0
            if stop > position:
                excess = (freed_sums[stop] - target) / freed[useful[stop - 1]]
            last_seconds = seconds_sums[stop] - seconds_sums[max(stop - 1, position)]
            if completed_seconds - excess * last_seconds < best_seconds * (1 - RELATIVE_GAP):
                promising.append(state)
        extended = [(b + freed[index], s + seconds[index], (*c, index)) for b, s, c in promising]
        states, max_freed = [], -1
        for state in sorted([*promising, *extended], key=lambda state: (state[1], -state[0])):
            if state[0] > max_freed:
                states.append(state)
                max_freed = state[0]
    return tuple(sorted(best))


def cheapest_covers(
    seconds: Sequence[Sequence[float]], freed: Sequence[int], need: int
) -> list[tuple[int, ...]]:
    """Return the candidate sets for several kinds of device, whose cheapest sets may differ.

    For any other set that frees enough, one of the returned sets is at least as fast on every kind.
    This is not guaranteed if there are more than `_MAX_SETS` candidates, since the list is cut
    then.

    Args:
        seconds: One row per kind of device: seconds of each item.
        freed: Bytes that each item frees.
        need: Bytes that a set must free.

    Returns:
        Ascending indices of each set; empty if all items together do not free enough.
    """
    useful = [index for index, size in enumerate(freed) if size > 0]
    # Bytes that the items not yet considered free.
    bytes_left = sum(freed[index] for index in useful)
    if bytes_left < need:
        return []
    # One row per set: its freed bytes, its seconds on each kind of device, and its items.
    set_freed = np.zeros(1, np.int64)
    set_seconds = np.zeros((1, len(seconds)))
    chosen = np.zeros((1, len(freed)), bool)
    for index in useful:
        bytes_left -= freed[index]
        # A set that frees enough is not extended.
        is_short = set_freed < need
        extended = chosen[is_short]
        extended[:, index] = True
        item_seconds = [of_kind[index] for of_kind in seconds]
        set_freed = np.concatenate([set_freed, set_freed[is_short] + freed[index]])
        set_seconds = np.vstack([set_seconds, set_seconds[is_short] + item_seconds])
        chosen = np.vstack([chosen, extended])
        # Drop the sets that free too little even with all items to come.
        feasible = np.flatnonzero(set_freed + bytes_left >= need)
        undominated = _undominated(np.minimum(set_freed[feasible], need), set_seconds[feasible])
        remaining = feasible[undominated]
        set_freed, set_seconds = set_freed[remaining], set_seconds[remaining]
        chosen = chosen[remaining]
    return [tuple(map(int, np.flatnonzero(row))) for row in chosen]


def _undominated(
    set_freed: NDArray[np.int64], set_seconds: NDArray[np.float64]
) -> NDArray[np.int64]:
    """Return the indices of the undominated sets, at most `_MAX_SETS`, fastest first.

    A set is dominated if another one frees as many bytes in as little time on every kind of device.
    """
    order = np.lexsort((-set_freed, set_seconds.sum(axis=1)))
    set_freed, set_seconds = set_freed[order], set_seconds[order]
    dominates = set_freed[:, None] >= set_freed
    dominates &= np.all(set_seconds[:, None] <= set_seconds, axis=2)
    # In this order, a set can be dominated only by an earlier one. So equal sets leave one.
    remaining: NDArray[np.int64] = order[~np.any(np.triu(dominates, 1), axis=0)]
    if len(remaining) > _MAX_SETS:
        remaining = remaining[np.linspace(0, len(remaining) - 1, _MAX_SETS).astype(np.int64)]
    return remaining
