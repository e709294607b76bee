"""Split in proportion to power: all stages compute for about the same time.

The split is a pure function of the profile. Layers cannot be divided, so stages rarely take exactly
equal times. An exact dynamic program minimises the time of the slowest stage. Among the splits with
this minimum, it chooses the one with the smallest sum of squared stage times.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache

from lightning_dlres.core.errors import ConfigError


def proportional_split(work: Sequence[float], powers: Sequence[float]) -> tuple[int, ...]:
    """Return the split of layers into contiguous stages of about equal time.

    Args:
        work: Seconds of each layer on a device of power 1. Without measured times, another weight
            of each layer, such as its parameter bytes. If all are 0, all layers count as equal.
        powers: Power of each stage's device relative to a device of power 1, in stage order.

    Returns:
        Number of layers of each stage, at least one each. The largest stage time is minimal. Among
        such splits, the sum of squared stage times is minimal.

    Raises:
        ConfigError: If there is no stage, if there are fewer layers than stages, if a power is not
            positive and finite, if a layer's work is negative or NaN, or if the squares of the
            stage times may not be finite.
    """
    layers, stages = len(work), len(powers)
    if not 1 <= stages <= layers:
        raise ConfigError(
            f"The number of stages must be at least 1 and at most the number of layers ({layers}), "
            f"got {stages}. Change the number of stages."
        )
    if not all(0 < p < math.inf for p in powers) or not all(w >= 0 for w in work):
        raise ConfigError(
            "powers must be positive and finite, and work at least 0, got powers "
            f"{list(powers)} and work {list(work)}. Profile again."
        )
    # Largest possible time of a stage. `most_equal` sums the squares, which must not overflow.
    worst = sum(work) / min(powers)
    if not math.isfinite(worst * worst * stages):
        raise ConfigError(
            f"powers and work must be finite, with finite squares of work / power, got powers "
            f"{list(powers)} and work {list(work)}. Profile again."
        )
    costs = list(work) if any(work) else [1.0] * layers
    prefix = [0.0]
    for cost in costs:
        prefix.append(prefix[-1] + cost)

    def time(stage: int, first: int, stop: int) -> float:
        """Return the seconds of layers [first, stop) on a stage."""
        return (prefix[stop] - prefix[first]) / powers[stage]

    def stops(stage: int, first: int) -> range:
        """Return the possible ends of a stage (exclusive) that leave a layer for each later one."""
        return (
            range(first + 1, layers - (stages - 1 - stage) + 1)
            if stage < stages - 1
            else range(layers, layers + 1)
        )

    @cache
    def bottleneck(stage: int, first: int) -> float:
        """Return the time of the slowest stage in the best split of layers [first, layers).

        The split is over the stages from `stage` on.
        """
        if stage == stages:
            return 0.0
        return min(
            max(time(stage, first, stop), bottleneck(stage + 1, stop))
            for stop in stops(stage, first)
        )

    # The tolerance keeps rounding from excluding the best split.
    limit = bottleneck(0, 0) * (1 + 1e-9)

    @cache
    def most_equal(stage: int, first: int) -> tuple[float, tuple[int, ...]]:
        """Return the smallest sum of squared stage times, and the layer counts of that split.

        The layers and stages are those of `bottleneck`. No stage may be slower than `limit`; if no
        split meets it, the sum is infinite.
        """
        if stage == stages:
            return 0.0, ()
        options: list[tuple[float, tuple[int, ...]]] = [(float("inf"), ())]
        for stop in stops(stage, first):
            if (seconds := time(stage, first, stop)) <= limit:
                squares, counts = most_equal(stage + 1, stop)
                options.append((squares + seconds * seconds, (stop - first, *counts)))
        return min(options)

    return most_equal(0, 0)[1]
