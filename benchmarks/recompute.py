"""What recomputation in idle time costs: the same plan with and without it, in turns.

    python -m benchmarks.recompute           about 8 minutes
    python -m benchmarks.recompute --quick   tiny sizes: the figures mean nothing

Two hosts of unlike speed with as many layers each: the fast one waits for gradients, and recomputes
all of its layers meanwhile. Needs root (see benchmarks/testbed.py).
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import asdict

import msgspec

from benchmarks.command import FairnessError, Figures, conclude_on_testbed, flags
from benchmarks.hetero_pipeline_sides import (
    QUICK,
    Ours,
    Settings,
    cores,
    ready,
    set_shares,
    shown,
)
from benchmarks.report import at_most
from benchmarks.testbed import Host, Testbed
from lightning_dlres import PipelinePlan
from lightning_dlres.pipeline.plan import even_split
from lightning_dlres.pipeline.simulator import step_seconds

NAME = "recompute"
SHARES = (0.8, 0.4)


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print, and return the exit status."""
    settings = QUICK if flags(NAME, __doc__, argv).quick else Settings()
    return conclude_on_testbed(NAME, lambda: compare(settings))


def compare(settings: Settings) -> Figures:
    """Train with and without recomputation in turns."""
    count, turns = settings.microbatches, settings.turns(settings.pairs)
    with Testbed([Host(cpus=core) for core in cores(2)]) as bed:
        plain, again = Ours(bed, 2, settings), Ours(bed, 2, settings, port=50)
        ready(plain, again)
        set_shares(bed, SHARES)
        kept, recomputed = plans(plain.start(count, [settings.first]).json)
        plain.turn()
        plain.end()
        plain.start(count, turns, kept.to_json())
        again.start(count, turns, recomputed.to_json())
        simulated = _ratio(kept, recomputed)
        print(f"CPU shares {shown(SHARES)}, {count} micro-batches\n{recomputed.table()}")
        print(f"simulated: {simulated:.4f} times the step without recomputation", flush=True)
        rows = in_turns(plain, again, settings.pairs)
        if plain.losses != again.losses:
            raise FairnessError("the losses differ: recomputation is not exact")
    ratios = [b / a for a, b in rows]
    print(f"measured: {statistics.median(ratios):.4f} times, {len(rows)} pairs")
    raw = {
        "shares": SHARES,
        "simulated": simulated,
        "seconds": rows,
        "ratios": ratios,
        "settings": asdict(settings),
    }
    return {"step with recomputation over without": at_most(statistics.median(ratios), 1.03)}, raw


def plans(measured: str) -> tuple[PipelinePlan, PipelinePlan]:
    """Return the even split with the faster device first, and the same where that recomputes all of
    its layers."""
    plan = PipelinePlan.from_json(measured)
    split = even_split(len(plan.layers), plan.stages)
    kept = msgspec.structs.replace(plan, machines=((0, 1),), split=split, recompute=())
    return kept, msgspec.structs.replace(kept, recompute=tuple(range(split[0])))


def in_turns(plain: Ours, again: Ours, pairs: int) -> list[tuple[float, float]]:
    """Return the mean steps of every pair of turns: without, with."""
    plain.turn()
    again.turn()
    rows = []
    for number in range(pairs):
        # Who goes first changes, so that a drift of the machine favours nobody.
        first, second = (plain, again) if number % 2 == 0 else (again, plain)
        spent = {side: statistics.fmean(side.turn()[1:]) for side in (first, second)}
        rows.append((spent[plain], spent[again]))
    plain.end()
    again.end()
    return rows


def _ratio(kept: PipelinePlan, recomputed: PipelinePlan) -> float:
    workload = kept.workload()
    return step_seconds(workload, recomputed.split, recomputed.recompute) / step_seconds(
        workload, kept.split
    )


if __name__ == "__main__":
    raise SystemExit(main())
