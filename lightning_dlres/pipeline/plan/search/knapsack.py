"""Which layers to recompute: the cheapest set that frees enough memory.

A 0/1 knapsack, solved by growing the list of undominated (freed, seconds) pairs layer by layer.
What could not come cheaper than the best set known, even if layers could be divided, is dropped:
without that the list doubles with every layer where all cost the same per byte."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from itertools import accumulate
from math import inf

import numpy as np
from numpy.typing import NDArray

# Relative: a set that is cheaper by less is not looked for.
NEAR = 1e-4
# As many sets are grown at most where devices disagree about what is cheap.
_MOST_SETS = 200


def cheapest_cover(
    seconds: Sequence[float], freed: Sequence[int], need: int
) -> tuple[int, ...] | None:
    """Return the indices, ascending, of items whose `freed` add up to `need`; None where all
    together do not. The sum of their `seconds` is the least there is, to within `NEAR`. What frees
    nothing is never chosen."""
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
    # Bytes freed and seconds both ascending, and what was chosen.
    states: list[tuple[int, float, tuple[int, ...]]] = [(0, 0.0, ())]
    for place, index in enumerate(useful):
        open_ = []
        for state in states:
            freed_by, cost, chosen = state
            # The cheapest layers per byte from here on, the last of them in part or as a whole.
            wanted = sizes[place] + need - freed_by
            stop = bisect_left(sizes, wanted, place)
            if stop == len(sizes):
                continue
            whole = cost + costs[stop] - costs[place]
            if whole < least:
                least, best = whole, (*chosen, *useful[place:stop])
            part = (sizes[stop] - wanted) / freed[useful[stop - 1]] if stop > place else 0.0
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
    """Return sets as `cheapest_cover` does, for devices that disagree about what is cheap: for any
    other set there is one here that no device is slower with. Empty where all items together do
    not free enough.

    Args:
        seconds: those of every item, for each device.
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
        kept = enough[_undominated(np.minimum(got[enough], need), spent[enough])]
        got, spent, chosen = got[kept], spent[kept], chosen[kept]
    return [tuple(map(int, np.flatnonzero(row))) for row in chosen]


def _undominated(got: NDArray[np.int64], spent: NDArray[np.float64]) -> NDArray[np.int64]:
    """Return the sets for which no other one frees as much in as little time on every device."""
    order = np.lexsort((-got, spent.sum(axis=1)))
    got, spent = got[order], spent[order]
    beats = (got[:, None] >= got) & np.all(spent[:, None] <= spent, axis=2)
    kept: NDArray[np.int64] = order[~np.any(np.triu(beats, 1), axis=0)]
    if len(kept) > _MOST_SETS:
        kept = kept[np.linspace(0, len(kept) - 1, _MOST_SETS).astype(np.int64)]
    return kept
