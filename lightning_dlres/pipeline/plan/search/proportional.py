"""The first split (Method E, E2): every stage computes for an equal time, so its share is
proportional to its power.

A pure function of the profile. Layers cannot be divided, so "equal" means: the slowest stage is as
fast as it can be (exact dynamic programme over contiguous splits), and among those the one whose
stages are the most alike.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache

from lightning_dlres.core.errors import ConfigError


def proportional_split(work: Sequence[float], powers: Sequence[float]) -> tuple[int, ...]:
    """Split layers into contiguous stages of equal time.

    Args:
        work: seconds of each layer on a device of power 1; all zero counts as all equal.
        powers: power of each stage's device, in stage order.

    Returns:
        Number of layers of each stage, at least one each. The largest stage time is the least
        possible; ties go to the least sum of squared stage times.

    Raises:
        ConfigError: fewer layers than stages, or a power or time that is not a positive number.
    """
    layers, stages = len(work), len(powers)
    if not 1 <= stages <= layers:
        raise ConfigError(
            f"Got {layers} layers for {stages} stages, expected at least one layer per stage."
        )
    if not all(p > 0 for p in powers) or not all(w >= 0 for w in work):
        raise ConfigError(
            f"Got powers {list(powers)}, work {list(work)}, expected positive numbers."
        )
    worst = sum(work) / min(powers)
    if not math.isfinite(worst * worst * stages):
        raise ConfigError(f"Got powers {list(powers)}, work {list(work)}, expected finite numbers.")
    costs = list(work) if any(work) else [1.0] * layers
    prefix = [0.0]
    for cost in costs:
        prefix.append(prefix[-1] + cost)

    def time(stage: int, first: int, stop: int) -> float:
        return (prefix[stop] - prefix[first]) / powers[stage]

    def stops(stage: int, first: int) -> range:
        return (
            range(first + 1, layers - (stages - 1 - stage) + 1)
            if stage < stages - 1
            else range(layers, layers + 1)
        )

    @cache
    def bottleneck(stage: int, first: int) -> float:
        if stage == stages:
            return 0.0
        return min(
            max(time(stage, first, stop), bottleneck(stage + 1, stop))
            for stop in stops(stage, first)
        )

    limit = bottleneck(0, 0) * (1 + 1e-9)

    @cache
    def alike(stage: int, first: int) -> tuple[float, tuple[int, ...]]:
        if stage == stages:
            return 0.0, ()
        options: list[tuple[float, tuple[int, ...]]] = [(float("inf"), ())]
        for stop in stops(stage, first):
            if (seconds := time(stage, first, stop)) <= limit:
                squares, counts = alike(stage + 1, stop)
                options.append((squares + seconds * seconds, (stop - first, *counts)))
        return min(options)

    return alike(0, 0)[1]
