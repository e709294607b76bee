"""Speed of a captured GPT-2 beside the same model as a list of blocks, and time to the first step.

    python -m benchmarks.captured_speed        about 15 minutes

Both trainings have the same parameters and the same blocks on each of two ranks. One calls the
model of transformers, which the pipeline cuts; the other applies the blocks in `training_step`.
They take turns of a few steps. The ratio of their steps is the median over pairs of turns. It is
measured for blocks of the size of GPT-2's smallest model, and for tiny ones, which show what each
micro-batch costs. Then a model of 48 blocks is captured, profiled and planned. Needs root (see
benchmarks/support/testbed).
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from benchmarks.support.command import Figures, conclude_on_testbed, flags
from benchmarks.support.hetero_pipeline.contenders import cores
from benchmarks.support.rank_starter import RankStarter
from benchmarks.support.ranks import Ranks
from benchmarks.support.report import at_least, at_most
from benchmarks.support.testbed import Host, Testbed

NAME = "captured_speed"
RANK = "benchmarks.support.captured_speed_rank"


@dataclass(frozen=True)
class Settings:
    """Sizes of the comparison.

    Attributes:
        layers: Blocks of GPT-2.
        width: Width of the blocks.
        heads: Heads of attention.
        context: Tokens of a sample.
        batch: Samples of a batch.
        microbatches: Micro-batches of a batch.
        warmup: First steps, which do not count: in some of them the loss is checked.
        counted: Steps of a turn that count; one more comes before them.
        starts: Number of times that both are started.
        rounds: Turns of each of these starts.
        many: Blocks of the model whose start is timed.
        timeout: Time limit of a turn, in seconds.
    """

    layers: int = 12
    width: int = 768
    heads: int = 12
    context: int = 64
    batch: int = 4
    microbatches: int = 4
    warmup: int = 5
    counted: int = 3
    starts: int = 3
    rounds: int = 5
    many: int = 48
    timeout: float = 180.0

    @property
    def turns(self) -> list[int]:
        """Number of steps of each turn: the warm-up, then the others."""
        return [self.warmup, *[1 + self.counted] * self.rounds]


TINY = Settings(
    width=128, heads=4, context=32, batch=32, microbatches=8, warmup=9, starts=5, rounds=3
)
QUICK = Settings(layers=4, width=32, heads=4, context=32, batch=8, starts=1, rounds=1, many=8)


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print, and return the exit status."""
    chosen = flags(NAME, __doc__, argv)
    settings = QUICK if chosen.quick else Settings()
    tiny = QUICK if chosen.quick else TINY

    def measure() -> Figures:
        with Testbed([Host(cpus=core) for core in cores(2)]) as bed:
            ratios, tiny_ratios = (
                [pair for _ in range(sizes.starts) for pair in compare(bed, sizes)]
                for sizes in (settings, tiny)
            )
            seconds = start_seconds(bed, tiny)
        for sizes, values in ((settings, ratios), (tiny, tiny_ratios)):
            shown = ", ".join(f"{value:.3f}" for value in sorted(values))
            print(
                f"blocks of width {sizes.width}, captured over list, speed of steps: "
                f"{statistics.median(values):.3f}, {len(values)} pairs: {shown}",
                flush=True,
            )
        print(f"first step of a model of {tiny.many} blocks after {seconds:.1f} s", flush=True)
        checks = {
            "captured over a list of blocks": at_least(statistics.median(ratios), 0.98),
            "seconds to the first step": at_most(seconds, 60.0),
        }
        raw = {"ratios": ratios, "tiny_ratios": tiny_ratios, "seconds": seconds}
        return checks, {**raw, "settings": asdict(settings), "tiny": asdict(tiny)}

    return conclude_on_testbed(NAME, measure)


def compare(bed: Testbed, settings: Settings) -> list[float]:
    """Start both trainings; return the ratio of their speeds for each pair of turns."""
    starter = RankStarter(bed, [RANK])
    groups = {}
    for kind in ("captured", "list"):
        groups[kind] = Ranks(starter, RANK, 2, settings.timeout)
        groups[kind].ask(order_of(settings, kind, settings.layers, settings.turns))
    for group in groups.values():
        group.ask({"turn": True})
    ratios = []
    for number in range(settings.rounds):
        kinds = ("captured", "list") if number % 2 == 0 else ("list", "captured")
        seconds = {kind: step_seconds(groups[kind].ask({"turn": True})) for kind in kinds}
        print({kind: round(value, 4) for kind, value in seconds.items()}, flush=True)
        ratios.append(seconds["list"] / seconds["captured"])
    for group in groups.values():
        group.close()
    starter.close()
    return ratios


def step_seconds(answers: Sequence[dict[str, Any]]) -> float:
    """Return the median seconds of a turn's steps but the first, on the slowest rank."""
    return max(statistics.median(answer["seconds"][1:]) for answer in answers)


def start_seconds(bed: Testbed, settings: Settings) -> float:
    """Return the seconds to the first step of a model of many blocks."""
    starter = RankStarter(bed, [RANK])
    ranks = Ranks(starter, RANK, 2, settings.timeout)
    answers = ranks.ask(order_of(settings, "captured", settings.many, []))
    ranks.close()
    starter.close()
    return float(max(answer["seconds"] for answer in answers))


def order_of(settings: Settings, kind: str, layers: int, turns: list[int]) -> dict[str, Any]:
    """Return the order that starts a training."""
    return {
        "kind": kind,
        "layers": layers,
        "turns": turns,
        "width": settings.width,
        "heads": settings.heads,
        "context": settings.context,
        "batch": settings.batch,
        "microbatches": settings.microbatches,
        "timeout": settings.timeout,
    }


if __name__ == "__main__":
    raise SystemExit(main())
