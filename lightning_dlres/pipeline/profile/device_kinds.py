"""Kinds of devices, their layer times and their power, from each rank's measurements."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

# Largest ratio of the total layer times of two devices of one kind. Noise alone stays below it.
_SAME_KIND_FACTOR = 1.15


def fill_missing_times(seconds: Sequence[Sequence[float]]) -> list[list[float]]:
    """Return each rank's times of all layers, with an estimate in place of each NaN.

    A rank has no time (NaN) for a layer that does not fit into its memory; no plan puts the layer
    there. The estimate is the median of the other ranks' times, each scaled by a factor: the ratio
    of the total times of the layers that both ranks have run, or 1 without such layers. If no rank
    has a time for a layer, the estimate is the longest time of the rank's own layers.

    Args:
        seconds: One row per rank, in the same columns: for example the time of forward and of
            backward of every layer.
    """
    rows = []
    for row in seconds:
        measured = [i for i, value in enumerate(row) if not math.isnan(value)]
        filled = list(row)
        for index in set(range(len(row))).difference(measured):
            estimates = []
            for other in seconds:
                if not math.isnan(other[index]):
                    common = [i for i in measured if not math.isnan(other[i])]
                    total = sum(other[i] for i in common)
                    factor = sum(row[i] for i in common) / total if total > 0 else 1.0
                    estimates.append(other[index] * factor)
            longest = max((row[i] for i in measured), default=1.0)
            filled[index] = statistics.median(estimates) if estimates else longest
        rows.append(filled)
    return rows


def kinds_of(names: Sequence[str], seconds: Sequence[Sequence[float]]) -> list[int]:
    """Return the kind of every rank's device; kind 0 is the fastest.

    Args:
        names: Name of each rank's device model. Devices of different names are of different kinds.
        seconds: Each rank's times of all layers.
    """
    totals = [sum(row) for row in seconds]
    kinds = [0] * len(totals)
    # Name and total time of the fastest device of each kind.
    fastest_of_kind: list[tuple[str, float]] = []
    for rank in sorted(range(len(totals)), key=lambda r: (totals[r], r)):
        same = [
            kind
            for kind, (name, fastest) in enumerate(fastest_of_kind)
            if name == names[rank] and totals[rank] <= fastest * _SAME_KIND_FACTOR
        ]
        if same:
            kinds[rank] = same[0]
        else:
            kinds[rank] = len(fastest_of_kind)
            fastest_of_kind.append((names[rank], totals[rank]))
    return kinds


def times_of_kinds(kinds: Sequence[int], values: Sequence[Sequence[float]]) -> list[list[float]]:
    """Return one row per kind: the median of each value over the ranks of the kind."""
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
    """Return the compute power of each device relative to the fastest, from its layer times.

    A device's power is the median over layers of (fastest device's seconds / its seconds). With the
    median, one disturbed measurement does not make a device look slow.
    """
    totals = [sum(row) for row in seconds]
    fastest = seconds[totals.index(min(totals))]
    ratios = [
        statistics.median([f / s for f, s in zip(fastest, row, strict=True) if s > 0] or [1.0])
        for row in seconds
    ]
    return [ratio / max(ratios) for ratio in ratios]


def kind_names(kinds: Sequence[int], names: Sequence[str], powers: Sequence[float]) -> list[str]:
    """Return a name for every kind: the device model, and its power in parentheses.

    Args:
        kinds: Kind of every rank's device.
        names: Name of each rank's device model.
        powers: Power of each kind.
    """
    by_kind = dict(zip(kinds, names, strict=True))
    return [f"{by_kind[kind]} ({powers[kind]:.2f})" for kind in range(len(powers))]
