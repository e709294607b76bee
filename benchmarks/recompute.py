"""What recomputation in idle time costs: the same plan with and without it, in turns.

    python -m benchmarks.recompute           about 25 minutes
    python -m benchmarks.recompute --quick   tiny sizes: the figures mean nothing

Two hosts of different speed with as many layers each: the fast one waits for gradients, and
recomputes all of its layers while it waits. The same processes train both ways: the steps of two
groups of processes with one and the same plan were seen to differ by 14 %. Needs root (see
benchmarks/support/testbed.py).
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import asdict

import msgspec

from benchmarks.hetero_pipeline import noise_of
from benchmarks.support.command import FairnessError, Figures, conclude_on_testbed, flags
from benchmarks.support.hetero_pipeline_contenders import (
    OURS,
    QUICK,
    Ours,
    Settings,
    cores,
    set_shares,
    shown,
)
from benchmarks.support.rank_starter import RankStarter
from benchmarks.support.report import at_most
from benchmarks.support.testbed import Host, Testbed
from lightning_dlres import PipelinePlan
from lightning_dlres.pipeline.plan.cost_model.simulator import step_seconds
from lightning_dlres.pipeline.plan.plan import even_split

NAME = "recompute"
SHARES = (0.8, 0.4)


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print, and return the exit status."""
    settings = QUICK if flags(NAME, __doc__, argv).quick else Settings()
    return conclude_on_testbed(NAME, lambda: compare(settings))


def compare(settings: Settings) -> Figures:
    """Train with and without recomputation in turns."""
    count = settings.microbatches
    with Testbed([Host(cpus=core) for core in cores(2)]) as bed:
        ours = Ours(RankStarter(bed, [OURS]), 2, settings)
        set_shares(bed, SHARES)
        kept, recomputed = plans(ours.start(count, [settings.warmup]).json)
        ours.turn()
        ours.end()
        simulated = _ratio(kept, recomputed)
        print(f"CPU shares {shown(SHARES)}, {count} micro-batches\n{recomputed.table()}")
        print(f"simulated: {simulated:.4f} times the step without recomputation", flush=True)
        rows = in_turns(ours, kept, recomputed, settings)
    ratios = [b / a for a, b in rows]
    noise = noise_of([[ratio] for ratio in ratios])
    print(f"measured: {statistics.median(ratios):.4f} +- {noise:.4f} times, {len(rows)} pairs")
    raw = {
        "shares": SHARES,
        "simulated": simulated,
        "seconds": rows,
        "ratios": ratios,
        "noise": noise,
        "settings": asdict(settings),
    }
    return {"step with recomputation over without": at_most(statistics.median(ratios), 1.03)}, raw


def plans(measured: str) -> tuple[PipelinePlan, PipelinePlan]:
    """Return the even split with the faster device first, and the same where that recomputes all of
    its layers."""
    plan = PipelinePlan.from_json(measured)
    split = even_split(len(plan.layers), plan.stages)
    kept = msgspec.structs.replace(plan, replicas=((0, 1),), split=split, recompute=())
    return kept, msgspec.structs.replace(kept, recompute=tuple(range(split[0])))


def in_turns(
    ours: Ours, kept: PipelinePlan, recomputed: PipelinePlan, settings: Settings
) -> list[tuple[float, float]]:
    """Return the median steps of every pair of training runs: without, with."""
    rows = []
    for number in range(settings.pairs):
        # Who goes first changes, so that a drift of the machine favours nobody.
        order = (kept, recomputed) if number % 2 == 0 else (recomputed, kept)
        steps, losses = zip(*(train(ours, plan, settings) for plan in order), strict=True)
        if losses[0] != losses[1]:
            raise FairnessError("the losses differ: recomputation is not exact")
        without, with_it = steps if number % 2 == 0 else reversed(steps)
        rows.append((without, with_it))
    return rows


def train(ours: Ours, plan: PipelinePlan, settings: Settings) -> tuple[float, list[float]]:
    """Return the median step of one training run after the first ones, and the losses of all."""
    # Ratios of means of two steps went from 0.78 to 1.28: too noisy for a bar of 3 %.
    steps = settings.warmup + 3 * settings.counted
    ours.start(settings.microbatches, [steps], plan.to_json())
    seconds = ours.turn()[settings.warmup :]
    ours.end()
    # Not the mean: before step 8 the loss is checked.
    return statistics.median(seconds), ours.losses


def _ratio(kept: PipelinePlan, recomputed: PipelinePlan) -> float:
    workload = kept.workload()
    return step_seconds(workload, recomputed.split, recomputed.recompute) / step_seconds(
        workload, kept.split
    )


if __name__ == "__main__":
    raise SystemExit(main())
