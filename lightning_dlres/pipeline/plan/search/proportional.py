"""Split in proportion to power: all stages compute for an equal time.

A pure function of the profile. Layers cannot be divided, so "equal" means that the slowest stage is
as fast as possible, found by an exact dynamic programme over contiguous splits. Among such splits
the one with the most equal stages is taken.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache

from lightning_dlres.core.errors import ConfigError


def proportional_split(work: Sequence[float], powers: Sequence[float]) -> tuple[int, ...]:
    """Split layers into contiguous stages of equal time.

    Args:
        work: Seconds of each layer on a device of power 1. If all are 0, all count as equal.
        powers: Power of each stage's device, in stage order.

    Returns:
        Number of layers of each stage, at least one each. The largest stage time is minimal; among
        equal ones, the sum of squared stage times is minimal.

    Raises:
        ConfigError: If there are fewer layers than stages, or a power or time is not a positive,
            finite number.
    """
    layers, stages = len(work), len(powers)
    if not 1 <= stages <= layers:
        raise ConfigError(
            f"The model must have at least one layer per stage ({stages}), got {layers} layers. "
            "Use fewer stages."
        )
    if not all(p > 0 for p in powers) or not all(w >= 0 for w in work):
        raise ConfigError(
            f"powers must be positive and work at least 0, got powers {list(powers)}, work "
            f"{list(work)}. Profile again."
        )
    worst = sum(work) / min(powers)
    if not math.isfinite(worst * worst * stages):
        raise ConfigError(
            f"powers and work must be finite, got powers {list(powers)}, work {list(work)}. "
            "Profile again."
        )
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
    def most_equal(stage: int, first: int) -> tuple[float, tuple[int, ...]]:
        if stage == stages:
            return 0.0, ()
        options: list[tuple[float, tuple[int, ...]]] = [(float("inf"), ())]
        for stop in stops(stage, first):
            if (seconds := time(stage, first, stop)) <= limit:
                squares, counts = most_equal(stage + 1, stop)
                options.append((squares + seconds * seconds, (stop - first, *counts)))
        return min(options)

    return most_equal(0, 0)[1]
