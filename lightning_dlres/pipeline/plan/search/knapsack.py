"""Knapsack: the cheapest set of layers whose recomputation frees enough memory.

This 0/1 knapsack is solved by growing the list of undominated (freed, seconds) pairs layer by
layer. A pair is dropped if it cannot lead to a cheaper set than the best known one, even if layers
could be divided. Without this, the list would double with every layer where all layers cost the
same per byte.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from itertools import accumulate
from math import inf

import numpy as np
from numpy.typing import NDArray

# Relative gap: the search ignores sets that are cheaper by less than this.
NEAR = 1e-4
# Largest number of sets that are grown for several devices.
_MAX_SETS = 200


def cheapest_cover(
    seconds: Sequence[float], freed: Sequence[int], need: int
) -> tuple[int, ...] | None:
    """Return the cheapest set of items that frees enough, as ascending indices.

    The sum of its `seconds` is minimal to within `NEAR`. An item that frees nothing is never part
    of it.

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
    sizes = list(accumulate((freed[index] for index in useful), initial=0))
    costs = list(accumulate((seconds[index] for index in useful), initial=0.0))
    least: float = inf
    best: tuple[int, ...] = ()
    # Undominated sets as (freed bytes, seconds, indices), with ascending bytes and seconds.
    states: list[tuple[int, float, tuple[int, ...]]] = [(0, 0.0, ())]
    for place, index in enumerate(useful):
        open_ = []
        for state in states:
            freed_by, cost, chosen = state
            # Complete the set with the next items, which are the cheapest per byte. The last item
            # counts as a whole for a set, and in part for the lower bound.
            target = sizes[place] + need - freed_by
            stop = bisect_left(sizes, target, place)
            if stop == len(sizes):
                continue
            whole = cost + costs[stop] - costs[place]
            if whole < least:
                least, best = whole, (*chosen, *useful[place:stop])
            part = (sizes[stop] - target) / freed[useful[stop - 1]] if stop > place else 0.0
            if whole - part * (costs[stop] - costs[max(stop - 1, place)]) < least * (1 - NEAR):
                open_.append(state)
        grown = [(b + freed[index], s + seconds[index], (*c, index)) for b, s, c in open_]
        states, most = [], -1
        for state in sorted([*open_, *grown], key=lambda state: (state[1], -state[0])):
            if state[0] > most:
                states.append(state)
                most = state[0]
    return tuple(sorted(best))


def cheapest_covers(
    seconds: Sequence[Sequence[float]], freed: Sequence[int], need: int
) -> list[tuple[int, ...]]:
    """Return the candidate sets for several devices, which may have different cheapest sets.

    For any other set that frees enough, one of the returned sets is at least as fast on every
    device. The list is cut to `_MAX_SETS`.

    Args:
        seconds: One row per device: seconds of each item.
        freed: Bytes that each item frees.
        need: Bytes that a set must free.

    Returns:
        Ascending indices of each set; empty if all items together do not free enough.
    """
    useful = [index for index, size in enumerate(freed) if size > 0]
    left = sum(freed[index] for index in useful)
    if left < need:
        return []
    got, chosen = np.zeros(1, np.int64), np.zeros((1, len(freed)), bool)
    spent = np.zeros((1, len(seconds)))
    for index in useful:
        left -= freed[index]
        grow = got < need
        grown = chosen[grow]
        grown[:, index] = True
        got = np.concatenate([got, got[grow] + freed[index]])
        spent = np.vstack([spent, spent[grow] + [own[index] for own in seconds]])
        chosen = np.vstack([chosen, grown])
        enough = np.flatnonzero(got + left >= need)
        remaining = enough[_undominated(np.minimum(got[enough], need), spent[enough])]
        got, spent, chosen = got[remaining], spent[remaining], chosen[remaining]
    return [tuple(map(int, np.flatnonzero(row))) for row in chosen]


def _undominated(got: NDArray[np.int64], spent: NDArray[np.float64]) -> NDArray[np.int64]:
    """Return the indices of sets for which no other set frees as much in as little time on every
    device."""
    order = np.lexsort((-got, spent.sum(axis=1)))
    got, spent = got[order], spent[order]
    beats = (got[:, None] >= got) & np.all(spent[:, None] <= spent, axis=2)
    remaining: NDArray[np.int64] = order[~np.any(np.triu(beats, 1), axis=0)]
    if len(remaining) > _MAX_SETS:
        remaining = remaining[np.linspace(0, len(remaining) - 1, _MAX_SETS).astype(np.int64)]
    return remaining
