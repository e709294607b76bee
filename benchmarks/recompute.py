"""Cost of recomputation in idle time: the same plan with and without it, in turns.

    python -m benchmarks.recompute           about 25 minutes
    python -m benchmarks.recompute --quick   tiny sizes: the figures mean nothing

Two hosts of different speed have the same number of layers. The fast host waits for gradients, and
recomputes all of its layers while it waits. The same processes train both ways, because the step
times of two groups of processes with the same plan differed by 14 %. Needs root (see
benchmarks/support/testbed).
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import asdict

import msgspec

from benchmarks.hetero_pipeline import noise_of
from benchmarks.support.command import FairnessError, Figures, conclude_on_testbed, flags
from benchmarks.support.hetero_pipeline.contenders import (
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
# CPU shares of the hosts, in cores.
SHARES = (0.8, 0.4)


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print, and return the exit status."""
    settings = QUICK if flags(NAME, __doc__, argv).quick else Settings()
    return conclude_on_testbed(NAME, lambda: compare(settings))


def compare(settings: Settings) -> Figures:
    """Measure the ratio of step times with and without recomputation."""
    count = settings.microbatches
    with Testbed([Host(cpus=core) for core in cores(2)]) as bed:
        ours = Ours(RankStarter(bed, [OURS]), 2, settings)
        set_shares(bed, SHARES)
        without, recomputed = plans(ours.start(count, [settings.warmup]).json)
        ours.turn()
        ours.end()
        simulated = _simulated_ratio(without, recomputed)
        print(f"CPU shares {shown(SHARES)}, {count} micro-batches\n{recomputed.table()}")
        print(f"simulated: {simulated:.4f} times the step without recomputation", flush=True)
        rows = in_turns(ours, without, recomputed, settings)
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
    """Return two plans with an even split and the faster device first: one recomputes nothing, the
    other all layers of the first stage.

    Args:
        measured: Plan as JSON, with the profile of this run.
    """
    plan = PipelinePlan.from_json(measured)
    split = even_split(len(plan.layers), plan.stages)
    without = msgspec.structs.replace(plan, replicas=((0, 1),), split=split, recompute=())
    return without, msgspec.structs.replace(without, recompute=tuple(range(split[0])))


def in_turns(
    ours: Ours, without: PipelinePlan, recomputed: PipelinePlan, settings: Settings
) -> list[tuple[float, float]]:
    """Train with both plans in turns; return pairs of median step seconds (without, recomputed).

    Raises:
        FairnessError: If the losses of a pair differ.
    """
    rows = []
    for number in range(settings.pairs):
        # The order alternates, so that a drift of the machine's speed affects both alike.
        order = (without, recomputed) if number % 2 == 0 else (recomputed, without)
        steps, losses = zip(*(train(ours, plan, settings) for plan in order), strict=True)
        if losses[0] != losses[1]:
            raise FairnessError("both plans must give equal losses: recomputation is not exact")
        first, second = steps
        rows.append((first, second) if number % 2 == 0 else (second, first))
    return rows


def train(ours: Ours, plan: PipelinePlan, settings: Settings) -> tuple[float, list[float]]:
    """Run one training; return the median step seconds after the warm-up, and all losses."""
    # Three times the usual number of counted steps. With the usual two per training, the ratios
    # ranged from 0.78 to 1.28, which is too noisy for a target of 3 %.
    steps = settings.warmup + 3 * settings.counted
    ours.start(settings.microbatches, [steps], plan.to_json())
    seconds = ours.turn().seconds[settings.warmup :]
    ours.end()
    # Our pipeline checks its loss before step 8, which makes that step slower (see `Settings`). The
    # median hides this.
    return statistics.median(seconds), ours.losses


def _simulated_ratio(without: PipelinePlan, recomputed: PipelinePlan) -> float:
    workload = without.workload()
    return step_seconds(workload, recomputed.split, recomputed.recompute) / step_seconds(
        workload, without.split
    )


if __name__ == "__main__":
    raise SystemExit(main())
