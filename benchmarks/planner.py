"""Planning time on large models, and simulated step time of the plans.

    python -m benchmarks.planner

Two sizes: 48 layers on 4 heterogeneous devices in any order, and 96 layers on 8 devices in the
ratio order (see `order_by_ratio`). Memory is scarce, so some layers must be recomputed, and the
planner chooses them.
"""

from __future__ import annotations

import math
import platform
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from importlib.metadata import version
from random import Random
from statistics import median
from typing import Any

from benchmarks.support.command import flags
from benchmarks.support.report import at_most, conclude, table
from lightning_dlres.pipeline.plan.cost_model.costs import Workload, layer_ranges
from lightning_dlres.pipeline.plan.search.device_orders import (
    SearchResult,
    search_extra_in_flight,
    search_plan,
    start_order,
    start_split,
)
from lightning_dlres.pipeline.plan.search.grouping import group_into_slots, replicas_of
from tests.support.pipeline_profiles import large_workload, limited

TARGET_SECONDS = 20.0
# The *start* of the planner's search is the ratio order with a split in proportion to power.
# Random memory limits are up to this factor times the smallest limit that has a plan. The start
# does not fit into them.
SCARCE = 1.15
# Memory of each profile. None: random limits. A number from 0 to 1: limits into which the start
# just fits. At 0, it must recompute every layer whose recomputation frees memory; at 1, none.
MEMORY_PARTS = (None, None, 0.2, 0.4, 0.7)


@dataclass(frozen=True)
class Size:
    """Size of a planning problem.

    Attributes:
        name: Name in the report.
        layers: Number of layers.
        stages: Number of stages, each on one device.
        microbatches: Number of micro-batches of a step.
        any_order: True searches every order of the devices; False only the ratio order.
    """

    name: str
    layers: int
    stages: int
    microbatches: int
    any_order: bool


SIZES = (
    Size("planner: 48 layers, 4 stages, 24 orders", 48, 4, 16, True),
    Size("planner: 96 layers, 8 stages, the ratio order", 96, 8, 32, False),
)
QUICK = (
    Size("planner: 8 layers, 3 stages, 6 orders", 8, 3, 6, True),
    Size("planner: 10 layers, 4 stages, the ratio order", 10, 4, 8, False),
)


def profile(size: Size, seed: int, memory_part: float | None) -> Workload:
    """Return a random model on devices in the ratio order.

    Args:
        size: Size of the problem.
        seed: Seed of the model and the devices. Odd seeds give equal blocks, even ones different
            layers.
        memory_part: See `MEMORY_PARTS`.
    """
    random, gpt = Random(seed), seed % 2 == 1
    workload = large_workload(
        random, size.layers, size.stages, size.microbatches, gpt=gpt, slack=SCARCE
    )
    order = replicas_of(start_order(workload, group_into_slots(workload.cluster, size.stages)))
    workload = replace(workload, replicas=order)
    if memory_part is None:
        return workload
    return limited(workload, limits_for_start(workload, memory_part))


def limits_for_start(workload: Workload, memory_part: float) -> list[int]:
    """Return memory limits, in bytes by rank, under which the start just fits.

    Each limit lies between the stage's bytes with and without recomputation; `memory_part` is its
    place between the two.
    """
    limits = {}
    for stage, layers in enumerate(layer_ranges(start_split(workload))):
        freeing = [i for i in layers if workload.freed_by_recompute(stage, layers, i) > 0]
        least, most = (
            workload.bound_bytes(stage, layers, recompute) for recompute in (freeing, ())
        )
        limits[workload.replicas[0][stage]] = least + round(memory_part * (most - least))
    return [limits[rank] for rank in sorted(limits)]


def measure(size: Size, seed: int, memory_part: float | None) -> dict[str, Any]:
    """Plan for one profile; return the row of the report."""
    workload = profile(size, seed, memory_part)
    started = time.perf_counter()
    result = search_plan(workload, size.stages, keep_order=not size.any_order)
    result = search_extra_in_flight(result)
    return {
        "seed": seed,
        "memory_part": memory_part,
        "seconds": round(time.perf_counter() - started, 3),
        "step": result.seconds,
        "over_start": over_start(result),
        "gap": result.gap,
        "split": result.split,
        "order": result.workload.replicas[0],
        "recomputed": len(result.recompute),
    }


def over_start(result: SearchResult) -> float | None:
    """Return the step time over that of the start; None if the start does not fit into memory."""
    if math.isinf(result.start_seconds):
        return None
    return round(result.seconds / result.start_seconds, 4)


def run(size: Size, memory_parts: Sequence[float | None]) -> None:
    """Plan for some profiles of one size, and report."""
    rows = [measure(size, seed, part) for seed, part in enumerate(memory_parts)]
    print(f"\n{size.name}")
    shown = ("seed", "memory_part", "seconds", "step", "over_start", "gap", "recomputed")
    print(table(shown, [[row[name] for name in shown] for row in rows]))
    ratios = [row["over_start"] for row in rows if row["over_start"] is not None]
    conclude(
        size.name,
        {
            "median seconds": at_most(median(row["seconds"] for row in rows), TARGET_SECONDS),
            "step over the ratio order with a proportional split": at_most(max(ratios), 1.0),
            "solver's gap": at_most(max(row["gap"] for row in rows), 1e-3),
        },
        {
            "layers": size.layers,
            "stages": size.stages,
            "microbatches": size.microbatches,
            "profiles": rows,
            "median_over_start": median(ratios),
            "start_fits": len(ratios),
            "versions": {
                "python": platform.python_version(),
                **{name: version(name) for name in ("highspy", "numpy")},
            },
        },
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print, and return the exit status."""
    quick = flags("planner", __doc__, argv, quick="small models, to see that it runs").quick
    for size in QUICK if quick else SIZES:
        run(size, MEMORY_PARTS[1:3] if quick else MEMORY_PARTS)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
