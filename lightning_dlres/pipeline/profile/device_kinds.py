"""Kinds of devices, their layer times and their power, from each rank's measurements."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

# Two devices are of one kind if their times differ by no more than noise does.
_ALIKE = 1.15


def completed(seconds: Sequence[Sequence[float]]) -> list[list[float]]:
    """Return each rank's times of all layers without NaN.

    A rank has no time (NaN) for a layer for which it has no room, and which no plan puts there.
    It is taken to need what the others do, times the factor by which the layers take longer on it
    that both could run; as long as them where there are none of these. Where no rank has room, a
    layer takes as long as the rank's longest one.
    """
    rows = []
    for row in seconds:
        known = [i for i, value in enumerate(row) if not math.isnan(value)]
        filled = list(row)
        for index in set(range(len(row))).difference(known):
            guesses = []
            for other in seconds:
                if not math.isnan(other[index]):
                    both = [i for i in known if not math.isnan(other[i])]
                    of_other = sum(other[i] for i in both)
                    factor = sum(row[i] for i in both) / of_other if of_other > 0 else 1.0
                    guesses.append(other[index] * factor)
            longest = max((row[i] for i in known), default=1.0)
            filled[index] = statistics.median(guesses) if guesses else longest
        rows.append(filled)
    return rows


def kinds_of(names: Sequence[str], seconds: Sequence[Sequence[float]]) -> list[int]:
    """Return the kind of every rank: 0 is the fastest.

    Args:
        names: what each rank's device is called; unlike names are unlike kinds.
        seconds: each rank's times of all layers.
    """
    totals = [sum(row) for row in seconds]
    kinds = [0] * len(totals)
    found: list[tuple[str, float]] = []
    for rank in sorted(range(len(totals)), key=lambda r: (totals[r], r)):
        alike = [
            kind
            for kind, (name, fastest) in enumerate(found)
            if name == names[rank] and totals[rank] <= fastest * _ALIKE
        ]
        if alike:
            kinds[rank] = alike[0]
        else:
            kinds[rank] = len(found)
            found.append((names[rank], totals[rank]))
    return kinds


def times_of_kinds(kinds: Sequence[int], values: Sequence[Sequence[float]]) -> list[list[float]]:
    """Return the median over the ranks of a kind of each of their values."""
    return [
        [
            statistics.median(column)
            for column in zip(
                *(row for k, row in zip(kinds, values, strict=True) if k == kind), strict=True
            )
        ]
        for kind in range(max(kinds) + 1)
    ]


def powers_of(seconds: Sequence[Sequence[float]]) -> list[float]:
    """Return the compute power of each device relative to the fastest, from its seconds for every
    layer.

    A device's power is the median over layers of (fastest device's seconds / its seconds), so that
    one disturbed measurement does not make a device look slow."""
    totals = [sum(row) for row in seconds]
    best = seconds[totals.index(min(totals))]
    raw = [
        statistics.median([b / s for b, s in zip(best, row, strict=True) if s > 0] or [1.0])
        for row in seconds
    ]
    return [power / max(raw) for power in raw]
