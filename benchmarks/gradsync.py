"""Gradient synchronisation over slow links: our codecs against DistributedDataParallel and its fp16
hook, in turns.

    python -m benchmarks.gradsync           about 3 minutes
    python -m benchmarks.gradsync --quick   few steps: the figures mean little

Four hosts with links of 200 Mbit/s train a model with 25.2 MB of gradients. The bound of a
contender is the step without synchronisation, and the time of its bytes on a link. Needs root (see
benchmarks/support/testbed).
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

from benchmarks.support.command import Figures, conclude_on_testbed, flags
from benchmarks.support.rank_starter import RankStarter
from benchmarks.support.ranks import Ranks
from benchmarks.support.report import at_least, table
from benchmarks.support.testbed import Host, Testbed

NAME = "gradsync"
HOSTS, RATE_MBIT = 4, 200
RANK = "benchmarks.support.gradsync_rank"
# Algorithm and options of each contender.
CONTENDERS: dict[str, tuple[str, dict[str, Any]]] = {
    "alone": ("alone", {}),
    "ddp": ("ddp", {}),
    "fp16 hook": ("fp16 hook", {}),
    "tbq, ps": ("tbq", {}),
    "tbq, ps, replayed": ("tbq", {"coordinator": "replay"}),
    "tbq, ps, coordinated": ("tbq", {"coordinator": "always"}),
    "tbq, ring": ("tbq", {"topology": "ring"}),
    "onebit, ps": ("onebit", {}),
    "onebit, ring": ("onebit", {"topology": "ring"}),
}
# Bits of an element on the wire, and elements of a gradient for which they count.
_BITS = {"ddp": 32, "fp16 hook": 16, "tbq": 2, "onebit": 1}
# Steps before the counted ones: DDP sorts its buckets again, and our hook makes its plan.
WARMUP = 4


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print, and return the exit status."""
    rounds = 1 if flags(NAME, __doc__, argv).quick else 4
    return conclude_on_testbed(NAME, lambda: compare(rounds))


def compare(rounds: int) -> Figures:
    """Train with all contenders in turns."""
    with Testbed([Host(rate=f"{RATE_MBIT}mbit") for _ in range(HOSTS)]) as bed:
        ranks = Ranks(RankStarter(bed, [RANK]), RANK, HOSTS, timeout=300.0)
        answers: dict[str, list[dict[str, Any]]] = {name: [] for name in CONTENDERS}
        for number in range(1 + rounds):
            for name, (algorithm, options) in CONTENDERS.items():
                order = {
                    "contender": name,
                    "algorithm": algorithm,
                    "options": options,
                    "steps": 3 if number else WARMUP,
                }
                replies = ranks.ask(order)
                if number:
                    answers[name] += replies
        ranks.close()
    gradient_bytes = answers["ddp"][0]["gradient_bytes"]
    seconds = {name: median_seconds(replies) for name, replies in answers.items()}
    alone = seconds["alone"]
    rows, checks = [], {}
    for name, (algorithm, options) in CONTENDERS.items():
        bound = alone + link_seconds(algorithm, gradient_bytes)
        sent = statistics.median(reply["sent"] for reply in answers[name]) / 1e6
        cpu = statistics.median(reply["cpu"] for reply in answers[name])
        rows.append(
            [name, 1e3 * seconds[name], 1e3 * bound, bound / seconds[name], sent, 1e3 * cpu]
        )
        if algorithm in ("tbq", "onebit") and "coordinator" not in options:
            checks[f"{name}: bound over step"] = at_least(bound / seconds[name], 0.8)
            checks[f"{name}: ddp over step"] = at_least(seconds["ddp"] / seconds[name], 7.0)
            checks[f"{name}: fp16 hook over step"] = at_least(
                seconds["fp16 hook"] / seconds[name], 3.5
            )
    print(table(["contender", "step ms", "bound ms", "bound / step", "MB sent", "CPU ms"], rows))
    return checks, {"seconds": seconds, "rows": rows, "rounds": rounds}


def median_seconds(replies: Sequence[dict[str, Any]]) -> float:
    """Return the median seconds of a step over all ranks."""
    return statistics.median(second for reply in replies for second in reply["seconds"])


def link_seconds(algorithm: str, gradient_bytes: int) -> float:
    """Return the seconds that the bytes of a step take in one direction of a link."""
    nbytes = gradient_bytes * _BITS.get(algorithm, 0) / 32
    return 2 * (HOSTS - 1) / HOSTS * nbytes / (RATE_MBIT * 1e6 / 8)


if __name__ == "__main__":
    raise SystemExit(main())
