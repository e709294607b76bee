"""Oracle of the plan search: the fastest of all plans, and the smallest limit, by brute force."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from itertools import chain, combinations, pairwise, permutations, product
from math import inf
from random import Random

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

from lightning_dlres.core.errors import ConfigError
from lightning_dlres.pipeline.plan.cost_model.costs import Workload, layer_ranges
from lightning_dlres.pipeline.plan.cost_model.simulator import simulate, step_seconds
from lightning_dlres.pipeline.plan.search.device_orders import SearchResult, search_plan
from lightning_dlres.pipeline.plan.search.grouping import group_into_slots, replicas_of
from tests.support.pipeline_profiles import SCHEDULES, limited

# Relative gap that the search may leave to the optimum.
OPTIMALITY_GAP = 1e-3
schedules = st.sampled_from(SCHEDULES)
exhaustive = settings(
    derandomize=True,
    database=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)


def orders(workload: Workload, stages: int) -> Iterator[Workload]:
    """Yield the workload in every order of its stages."""
    for slots in permutations(group_into_slots(workload.cluster, stages)):
        yield replace(workload, replicas=replicas_of(slots))


def splits(workload: Workload) -> Iterator[tuple[int, ...]]:
    """Yield every split of the layers."""
    count = len(workload.layers)
    for cuts in combinations(range(1, count), workload.stages - 1):
        yield tuple(b - a for a, b in pairwise((0, *cuts, count)))


def choices(workload: Workload, layers: range) -> Iterator[tuple[int, ...]]:
    """Yield all sets of layers that a stage may recompute, small ones first; memory is ignored."""
    if workload.recompute == "always":
        return iter([tuple(layers)])
    most = 0 if workload.recompute == "never" else len(layers)
    return chain.from_iterable(combinations(layers, count) for count in range(most + 1))


def minimal_recompute_sets(workload: Workload, stage: int, layers: range) -> list[tuple[int, ...]]:
    """Return the minimal sets of layers whose recomputation makes a stage fit into memory.

    Larger sets are left out: `test_simulator` shows that their steps are no shorter.
    """
    limit, minimal = workload.memory_limit(stage), list[tuple[int, ...]]()
    for chosen in choices(workload, layers):
        if any(set(smaller) <= set(chosen) for smaller in minimal):
            continue
        if limit is None or workload.bound_bytes(stage, layers, chosen) <= limit:
            minimal.append(chosen)
    return minimal


def fastest_of_all(workload: Workload, stages: int) -> float:
    """Return the seconds of the fastest of all plans; infinite if none fits into memory."""
    best = inf
    for arranged in orders(workload, stages):
        fits = cache(
            lambda stage, layers, arranged=arranged: minimal_recompute_sets(arranged, stage, layers)
        )
        for split in splits(arranged):
            for recompute in product(*(fits(*run) for run in enumerate(layer_ranges(split)))):
                best = min(best, step_seconds(arranged, split, list(chain(*recompute))))
    return best


def least_memory(workload: Workload, stages: int) -> int:
    """Return the smallest memory limit, equal for all devices, under which some plan fits."""
    arranged = next(orders(workload, stages))
    return min(
        max(
            min(arranged.bound_bytes(stage, layers, chosen) for chosen in choices(arranged, layers))
            for stage, layers in enumerate(layer_ranges(split))
        )
        for split in splits(arranged)
    )


def with_memory_limit(workload: Workload, limit: int | None) -> Workload:
    """Return the workload with one memory limit for all devices."""
    return limited(workload, [limit] * len(workload.cluster.devices))


def randomly_limited(random: Random, workload: Workload, stages: int) -> Workload:
    """Return the workload with random memory limits: mostly scarce, sometimes too small."""
    least = least_memory(workload, stages)
    return limited(
        workload,
        [
            random.choice([None, *(round(least * factor) for factor in (0.9, 1, 1.05, 1.2, 1.5))])
            for _ in workload.cluster.devices
        ],
    )


def check_sound(result: SearchResult) -> None:
    """Assert that a plan is valid, fits into memory, and takes as long as simulated."""
    workload = result.workload
    timeline = simulate(workload, result.split, result.recompute)
    assert result.seconds == pytest.approx(timeline.step_seconds, rel=1e-9, abs=1e-12)
    assert min(result.split) >= 1
    assert sum(result.split) == len(workload.layers)
    for stage, peak in enumerate(timeline.peak_bytes):
        limit = workload.memory_limit(stage)
        assert limit is None or peak <= limit


def check_optimal(workload: Workload, stages: int) -> None:
    """Assert that the search finds the fastest plan, or refuses where none fits."""
    optimum = fastest_of_all(workload, stages)
    if optimum == inf:
        with pytest.raises(ConfigError, match="no plan fits"):
            search_plan(workload, stages)
        return
    result = search_plan(workload, stages)
    check_sound(result)
    assert result.seconds <= optimum * (1 + OPTIMALITY_GAP)
    assert result.seconds >= optimum * (1 - 1e-9)
