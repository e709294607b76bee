"""`dlres_hetero_pipe` beside torch.distributed.pipelining, on hosts of unlike speed.

    python -m benchmarks.hetero_pipeline            the comparison, about 10 minutes
    python -m benchmarks.hetero_pipeline --matrix   how good predictions are, about 8 minutes

Both sides train the same model on the same hosts and take turns of a few steps, so that whatever
else the machine does hits both; figures are medians over neighbouring turns. Needs root (see
benchmarks/testbed.py).
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import asdict

from benchmarks.command import Figures, conclude_on_testbed, flags
from benchmarks.hetero_pipeline_matrix import matrix
from benchmarks.hetero_pipeline_sides import (
    QUICK,
    Ours,
    Peer,
    Plan,
    Settings,
    cores,
    ready,
    require_same_losses,
    set_shares,
    shown,
)
from benchmarks.report import at_least, at_most, table
from benchmarks.testbed import Host, Testbed

NAME = "hetero_pipeline"
UNEQUAL, EQUAL = (0.8, 0.2), (0.8, 0.8)
_FAR_OFF = 1.5


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print, and return the exit status."""
    others = {"matrix": "measure predictions instead"}
    given = flags(NAME, __doc__, argv, others=others)
    settings = QUICK if given.quick else Settings()

    def measure() -> Figures:
        checks, raw = matrix(settings) if given.matrix else compare(settings)
        return checks, {**raw, "settings": asdict(settings)}

    return conclude_on_testbed(NAME, measure)


def compare(settings: Settings) -> Figures:
    """Compare with the peer on two unequal hosts, then on two equal ones."""
    with Testbed([Host(cpus=core) for core in cores(2)]) as bed:
        ours, peer = Ours(bed, 2, settings), Peer(bed, 2, settings)
        ready(ours, peer)
        set_shares(bed, UNEQUAL)
        unequal = on_unequal(ours, peer, settings)
        set_shares(bed, EQUAL)
        equal = on_equal(ours, peer, settings)
    return {**unequal[0], **equal[0]}, {"unequal": unequal[1], "equal": equal[1]}


def on_unequal(ours: Ours, peer: Peer, settings: Settings) -> Figures:
    """Ours, the peer's even split and the peer with our split, in turns."""
    count = settings.microbatches
    print(f"CPU shares {shown(UNEQUAL)}, {count} micro-batches", flush=True)
    plan, promised = planned(ours, count, settings, settings.rounds)
    swept, threads = sweep(peer, plan, settings)
    even = peer.make("even", even_split(plan), (0, 1), count, threads)
    same = peer.make("same", plan.split, plan.ranks, count, threads)
    rows = in_turns(ours, peer, (even, same), settings.rounds, settings)
    step, evens, sames = (statistics.median(column) for column in zip(*rows, strict=True))
    over_even = [row[1] / row[0] for row in rows]
    over_same = [row[2] / row[0] for row in rows]
    bound, noise, best = bound_on_ratio(UNEQUAL, count), noise_of(over_same), min(swept.values())
    print(
        f"step: ours {step:.3f} s, the peer's with an even split {evens:.3f} s, with our split "
        f"{sames:.3f} s\n"
        f"ours over the peer's even split: {statistics.median(over_even):.3f} times as fast; the "
        f"bound is {bound:.3f} (slowest stage and fill, {count} micro-batches)\n"
        f"ours over the best of the peer's even splits: {best / step:.3f}\n"
        f"ours over the peer with our split: {statistics.median(over_same):.3f} +- {noise:.3f}",
        flush=True,
    )
    error = abs(promised - plan.predicted_seconds) / promised
    checks = {
        "over the peer's even split, part of the bound": at_least(
            statistics.median(over_even) / bound, 0.92
        ),
        "prediction error": at_most(error, 0.10),
        "over the peer with our split, within noise": at_least(
            statistics.median(over_same), 1.0, noise=noise
        ),
    }
    raw = {
        "shares": UNEQUAL,
        "bound": bound,
        "split": plan.split,
        "ranks": plan.ranks,
        "predicted_seconds": plan.predicted_seconds,
        "seconds_after_planning": promised,
        "seconds": [dict(zip(("ours", "even", "same"), row, strict=True)) for row in rows],
        "over_even": over_even,
        "over_same": over_same,
        "noise_over_same": noise,
        "peer_swept": swept,
        "peer_threads": threads,
    }
    return checks, raw


def on_equal(ours: Ours, peer: Peer, settings: Settings) -> Figures:
    """Ours and the peer's even split on devices of one speed, in turns."""
    count = settings.microbatches
    print(f"\nCPU shares {shown(EQUAL)}, {count} micro-batches", flush=True)
    plan, promised = planned(ours, count, settings, settings.pairs)
    even = peer.make("equal", even_split(plan), (0, 1), count, 1)
    rows = in_turns(ours, peer, (even,), settings.pairs, settings)
    step, evens = (statistics.median(column) for column in zip(*rows, strict=True))
    over_even = [row[1] / row[0] for row in rows]
    print(
        f"step: ours {step:.3f} s, the peer's {evens:.3f} s\n"
        f"ours over the peer: {statistics.median(over_even):.3f} +- {noise_of(over_even):.3f}, "
        f"{len(rows)} pairs",
        flush=True,
    )
    checks = {"equal devices, over the peer": at_least(statistics.median(over_even), 0.97)}
    raw = {
        "shares": EQUAL,
        "split": plan.split,
        "ranks": plan.ranks,
        "predicted_seconds": plan.predicted_seconds,
        "seconds_after_planning": promised,
        "seconds": [dict(zip(("ours", "even"), row, strict=True)) for row in rows],
        "over_even": over_even,
        "noise": noise_of(over_even),
    }
    return checks, raw


def planned(ours: Ours, count: int, settings: Settings, turns: int) -> tuple[Plan, float]:
    """Plan, and run the first steps; return the plan, and the median step right after it."""
    plan = ours.start(count, settings.turns_after_planning(turns))
    ours.turn()
    seconds = statistics.median(ours.turn()[1:])
    print(
        f"{plan.text}\nright after planning: {seconds:.3f} s, predicted "
        f"{plan.predicted_seconds:.3f} s",
        flush=True,
    )
    return plan, seconds


def in_turns(
    ours: Ours, peer: Peer, names: Sequence[str], rounds: int, settings: Settings
) -> list[list[float]]:
    """Return the mean step of every turn: ours, then the peer's under each setting."""
    for name in names:
        peer.run(name, settings.first)
    rows = []
    for number in range(rounds):
        row = [0.0] * (1 + len(names))
        # Who goes first changes, so that a drift of the machine favours nobody.
        order = range(len(row)) if number % 2 == 0 else reversed(range(len(row)))
        for place in order:
            steps = 1 + settings.counted
            seconds = peer.run(names[place - 1], steps) if place else ours.turn()
            # Nothing is under way when a turn begins, which its first step pays for.
            row[place] = statistics.fmean(seconds[1:])
        rows.append(row)
    ours.end()
    require_same_losses(ours.losses, *(peer.losses[name] for name in names))
    return rows


def sweep(peer: Peer, plan: Plan, settings: Settings) -> tuple[dict[str, float], int]:
    """Try the peer's settings with an even split; return its step times, and the better number of
    threads for the comparison."""
    tried = [(settings.microbatches, 1), *settings.swept]
    spent: dict[tuple[int, int], list[float]] = {setting: [] for setting in tried}
    names = {
        (count, threads): peer.make(
            f"{count} micro-batches, {threads} threads", even_split(plan), (0, 1), count, threads
        )
        for count, threads in tried
    }
    for setting in tried:
        spent[setting] += peer.run(names[setting], 2)[1:]
    # What is far off at once is not worth minutes of more steps.
    best = min(min(seconds) for seconds in spent.values())
    for setting in tried:
        if min(spent[setting]) < _FAR_OFF * best:
            spent[setting] += peer.run(names[setting], 1 + settings.counted)[1:]
    found = {setting: statistics.median(seconds) for setting, seconds in spent.items()}
    rows = [[*setting, seconds] for setting, seconds in found.items()]
    columns = ("micro-batches", "threads", "step in s")
    print(f"The peer's even split under other settings\n{table(columns, rows)}", flush=True)
    alike = [(found[setting], setting[1]) for setting in tried if setting[0] == tried[0][0]]
    return {names[setting]: seconds for setting, seconds in found.items()}, min(alike)[1]


def even_split(plan: Plan) -> tuple[int, int]:
    """Return half of the layers for each of two stages."""
    layers = sum(plan.split)
    return layers // 2, layers - layers // 2


def bound_on_ratio(shares: Sequence[float], microbatches: int) -> float:
    """Return by what factor the best split beats the even one, if work divided at will and messages
    cost nothing: the slowest stage works through all micro-batches, and each of the others through
    one more, while the pipeline fills and drains."""

    def step(parts: Sequence[float]) -> float:
        busy = [part / share for part, share in zip(parts, shares, strict=True)]
        return microbatches * max(busy) + sum(busy) - max(busy)

    count = len(shares)
    return step([1 / count] * count) / step([share / sum(shares) for share in shares])


def noise_of(ratios: Sequence[float]) -> float:
    """Return the standard error of the median: 1.4826 median absolute deviations are a normal
    standard deviation, and a median's error is 1.2533 times a mean's."""
    middle = statistics.median(ratios)
    deviation = 1.4826 * statistics.median(abs(ratio - middle) for ratio in ratios)
    return 1.2533 * deviation / math.sqrt(len(ratios))


if __name__ == "__main__":
    raise SystemExit(main())
