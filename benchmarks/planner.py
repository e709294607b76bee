"""How long the planner takes on large models, and what its plans are worth in the simulator.

Two sizes: 48 layers on 4 heterogeneous devices in any order, and 96 layers on 8 in the ratio
order. Memory limits bind: some layers must be recomputed, and the planner chooses which."""

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
    search_plan,
    start_order,
    start_split,
)
from lightning_dlres.pipeline.plan.search.grouping import group, replicas_of
from tests.support.pipeline_profiles import large_workload, limited

TARGET_SECONDS = 20.0
# Scarce memory: limits up to 1.15 times the smallest one that has a plan at all. The ratio order
# with a split in proportion to power does not fit then. Otherwise it just fits, where so much of it
# is recomputed: all that frees memory at 0, nothing at 1.
SCARCE = 1.15
ROOM = (None, None, 0.2, 0.4, 0.7)


@dataclass(frozen=True)
class Size:
    """Attributes:
    any_order: whether every order of the devices is searched, or splits in the ratio order only.
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


def profile(size: Size, seed: int, room: float | None) -> Workload:
    """Return a random model, of different layers or of equal blocks by turns, on devices in
    the ratio order."""
    random, gpt = Random(seed), seed % 2 == 1
    workload = large_workload(
        random, size.layers, size.stages, size.microbatches, gpt=gpt, slack=SCARCE
    )
    order = replicas_of(start_order(workload, group(workload.cluster, size.stages)))
    workload = replace(workload, replicas=order)
    return workload if room is None else limited(workload, room_for_start(workload, room))


def room_for_start(workload: Workload, room: float) -> list[int]:
    """Return limits, by rank, in which the ratio order with a split in proportion to power fits."""
    limits = {}
    for stage, layers in enumerate(layer_ranges(start_split(workload))):
        helps = [i for i in layers if workload.freed_by_recompute(stage, layers, i) > 0]
        least, most = (workload.bound_bytes(stage, layers, again) for again in (helps, ()))
        limits[workload.replicas[0][stage]] = least + round(room * (most - least))
    return [limits[rank] for rank in sorted(limits)]


def measure(size: Size, seed: int, room: float | None) -> dict[str, Any]:
    """Plan for one profile."""
    workload = profile(size, seed, room)
    started = time.perf_counter()
    found = search_plan(workload, size.stages, keep_order=not size.any_order)
    return {
        "seed": seed,
        "room": room,
        "seconds": round(time.perf_counter() - started, 3),
        "step": found.seconds,
        "over_start": over_start(found),
        "gap": found.gap,
        "split": found.split,
        "order": found.workload.replicas[0],
        "recomputed": len(found.recompute),
    }


def over_start(found: SearchResult) -> float | None:
    """Return the step over that of the ratio order with a split in proportion to power; None
    where memory does not hold that."""
    if math.isinf(found.start_seconds):
        return None
    return round(found.seconds / found.start_seconds, 4)


def run(size: Size, rooms: Sequence[float | None]) -> None:
    """Plan for some profiles of one size, and report."""
    rows = [measure(size, seed, room) for seed, room in enumerate(rooms)]
    print(f"\n{size.name}")
    shown = ("seed", "room", "seconds", "step", "over_start", "gap", "recomputed")
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
        run(size, ROOM[1:3] if quick else ROOM)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
