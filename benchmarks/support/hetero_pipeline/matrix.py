"""Errors of the planner's predicted step time, over CPU shares, links and micro-batches.

`python -m benchmarks.hetero_pipeline --matrix` runs this.
"""

from __future__ import annotations

import statistics
from typing import Any

from benchmarks.support.command import Figures
from benchmarks.support.hetero_pipeline.contenders import (
    OURS,
    Ours,
    Settings,
    cores,
    set_shares,
    shown,
)
from benchmarks.support.rank_starter import RankStarter
from benchmarks.support.report import at_most, table
from benchmarks.support.testbed import Host, Testbed

# CPU shares of the hosts, in cores, and rates of their links; None does not limit them.
SHARES = ((1.0, 0.5), (1.0, 0.25), (1.0, 0.5, 0.25))
RATES = (None, "500mbit")
_COLUMNS = ("shares", "link", "micro-batches", "split", "predicted s", "measured s", "error")


def matrix(settings: Settings) -> Figures:
    """Measure each combination of shares, link and micro-batches; return checks and figures."""
    cells: list[dict[str, Any]] = []
    sizes = sorted({len(shares) for shares in SHARES})
    for rate in RATES:
        with Testbed([Host(rate=rate, cpus=core) for core in cores(max(sizes))]) as bed:
            starter = RankStarter(bed, [OURS])
            ours = {size: Ours(starter, size, settings) for size in sizes}
            for shares in SHARES:
                set_shares(bed, shares)
                for count in settings.matrix:
                    cell = _measure(ours[len(shares)], count, settings)
                    cells.append({"shares": shares, "link": rate or "unshaped", **cell})
                    print(", ".join(map(str, _row(cells[-1]))), flush=True)
    errors = [cell["error"] for cell in cells]
    print(f"\n{table(_COLUMNS, [_row(cell) for cell in cells])}")
    print(f"errors: median {statistics.median(errors):.1%}, largest {max(errors):.1%}")
    checks = {"median prediction error": at_most(statistics.median(errors), 0.10)}
    return checks, {"cells": cells}


def _measure(ours: Ours, count: int, settings: Settings) -> dict[str, Any]:
    """Train for a few steps; return the plan, and the predicted and measured step seconds."""
    plan = ours.start(count, [settings.warmup + settings.after_planning])
    measured = statistics.median(ours.turn().seconds[settings.warmup :])
    ours.end()
    return {
        "microbatches": count,
        "split": plan.split,
        "ranks": plan.ranks,
        "predicted": plan.predicted_seconds,
        "measured": measured,
        "error": abs(measured - plan.predicted_seconds) / measured,
    }


def _row(cell: dict[str, Any]) -> list[Any]:
    error = f"{(cell['predicted'] - cell['measured']) / cell['measured']:+.1%}"
    shares, split = shown(cell["shares"]), shown(cell["split"])
    times = [round(cell["predicted"], 3), round(cell["measured"], 3)]
    return [shares, cell["link"], cell["microbatches"], split, *times, error]
