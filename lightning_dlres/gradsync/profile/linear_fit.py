"""Linear cost of a task, from two measurements."""

from __future__ import annotations

from lightning_dlres.gradsync.plan.costs import LinearCost


def linear_cost(small: tuple[int, float], large: tuple[int, float]) -> LinearCost:
    """Return the line through two points of (size, seconds).

    Noise must not make costs negative. If the larger task is not slower, each item costs nothing.
    If the fixed cost would be negative, the line goes through the origin and the larger point.

    Args:
        small: Size and seconds of the smaller task.
        large: Size and seconds of the larger task.
    """
    slope = max((large[1] - small[1]) / (large[0] - small[0]), 0.0)
    fixed = small[1] - slope * small[0]
    if fixed < 0:
        return LinearCost(fixed_seconds=0.0, seconds_per_item=large[1] / large[0])
    return LinearCost(fixed_seconds=fixed, seconds_per_item=slope)
