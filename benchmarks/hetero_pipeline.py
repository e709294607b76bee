"""`dlres_hetero_pipe` beside torch.distributed.pipelining, on heterogeneous hosts.

    python -m benchmarks.hetero_pipeline            the comparison, about 30 minutes
    python -m benchmarks.hetero_pipeline --equal    equal hosts only, about 12 minutes
    python -m benchmarks.hetero_pipeline --matrix   errors of predictions, about 12 minutes

Both contenders train the same model on the same hosts. They take turns of a few steps, so that
other load on the machine affects both. A ratio of two step times is the median of the ratios of
neighbouring turns. Both contenders are started several times, since the speeds of equal processes
differ by some percent. Needs root (see benchmarks/support/testbed).
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from itertools import chain
from typing import TypeVar

from benchmarks.support.command import Figures, conclude_on_testbed, flags
from benchmarks.support.hetero_pipeline.contenders import (
    OURS,
    PEER,
    QUICK,
    Ours,
    Peer,
    Plan,
    Setting,
    Settings,
    cores,
    require_same_losses,
    set_shares,
    shown,
)
from benchmarks.support.hetero_pipeline.matrix import matrix
from benchmarks.support.rank_starter import RankStarter
from benchmarks.support.report import at_least, at_most, table
from benchmarks.support.testbed import Host, Testbed

NAME = "hetero_pipeline"
T = TypeVar("T")
# CPU shares of the hosts, in cores.
UNEQUAL, EQUAL = (0.8, 0.2), (0.8, 0.8)
# A setting of the peer that takes longer than the best one by this factor is not measured further.
_HOPELESS_RATIO = 1.5


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print, and return the exit status."""
    others = {"matrix": "measure predictions instead", "equal": "measure equal hosts only"}
    chosen = flags(NAME, __doc__, argv, others=others)
    settings = QUICK if chosen.quick else Settings()

    def measure() -> Figures:
        if chosen.matrix:
            checks, raw = matrix(settings)
        else:
            checks, raw = compare(settings, only_equal=chosen.equal)
        return checks, {**raw, "settings": asdict(settings)}

    return conclude_on_testbed(NAME, measure)


def compare(settings: Settings, *, only_equal: bool) -> Figures:
    """Compare both contenders on two unequal hosts, then on two equal ones."""
    with Testbed([Host(cpus=core) for core in cores(2)]) as bed:
        starters = Starters(bed, settings.fresh)
        if only_equal:
            return compare_on_equal_hosts(starters, settings)
        unequal = compare_on_unequal_hosts(starters, settings)
        equal = compare_on_equal_hosts(starters, settings)
    return {**unequal[0], **equal[0]}, {"unequal": unequal[1], "equal": equal[1]}


def compare_on_unequal_hosts(starters: Starters, settings: Settings) -> Figures:
    """Measure our pipeline, the peer's even split, and the peer with our split, in turns."""
    count = settings.microbatches
    print(f"CPU shares {shown(UNEQUAL)}, {count} micro-batches", flush=True)
    with starters.on(UNEQUAL) as starter:
        plan, seconds_after_planning = planned(starter, count, settings)
        swept, threads, best = sweep(starter, plan, settings)
    even = Setting("even", even_split(plan), (0, 1), count, threads)
    same = Setting("same", plan.split, plan.ranks, count, threads)
    starts = in_turns(
        starters, UNEQUAL, plan, (even, same, best), settings, settings.starts, settings.rounds
    )
    step, evens, sames, bests, *_ = medians(starts)
    over_even, over_same, over_best = (ratios(starts, place) for place in (1, 2, 3))
    bound, noise = bound_on_ratio(UNEQUAL, count), noise_of(over_same)
    print(
        f"ours over the peer's best setting ({best.name}): "
        f"{median_over_turns(over_best):.3f} times as fast\n"
        f"step: ours {step:.3f} s, the peer's with an even split {evens:.3f} s, with our split "
        f"{sames:.3f} s, under its best setting {bests:.3f} s\n"
        f"ours over the peer's even split: {median_over_turns(over_even):.3f} times as fast; the "
        f"bound is {bound:.3f} (slowest stage and fill, {count} micro-batches)\n"
        f"ours over the peer with our split: {median_over_turns(over_same):.3f} +- {noise:.3f}, "
        f"{len(starts)} starts: {shown_ratios(over_same)}",
        flush=True,
    )
    error = abs(seconds_after_planning - plan.predicted_seconds) / seconds_after_planning
    checks = {
        "over the peer's even split, part of the bound": at_least(
            median_over_turns(over_even) / bound, 0.92
        ),
        "prediction error": at_most(error, 0.10),
        "over the peer with our split, within noise": at_least(
            median_over_turns(over_same), 1.0, noise=noise
        ),
    }
    raw = {
        "shares": UNEQUAL,
        "bound": bound,
        "split": plan.split,
        "ranks": plan.ranks,
        "predicted_seconds": plan.predicted_seconds,
        "seconds_after_planning": seconds_after_planning,
        "seconds": starts,
        "over_even": over_even,
        "over_same": over_same,
        "over_best": over_best,
        "noise_over_same": noise,
        "peer_swept": swept,
        "peer_threads": threads,
    }
    return checks, raw


def compare_on_equal_hosts(starters: Starters, settings: Settings) -> Figures:
    """Measure our pipeline, and the peer with an even split and with ours, in turns on devices of
    equal speed."""
    count = settings.microbatches
    print(f"\nCPU shares {shown(EQUAL)}, {count} micro-batches", flush=True)
    with starters.on(EQUAL) as starter:
        plan, seconds_after_planning = planned(starter, count, settings)
    even = Setting("even", even_split(plan), (0, 1), count, 1)
    same = Setting("same", plan.split, plan.ranks, count, 1)
    starts = in_turns(starters, EQUAL, plan, (even, same), settings, settings.pairs)
    step, evens, sames, *busy = medians(starts)
    over_even, over_same = ratios(starts, 1), ratios(starts, 2)
    # Columns 3 to 5 are processor seconds.
    processor = median_over_turns(ratios(starts, 3, base=5))
    noise = noise_of(over_same)
    print(
        f"step: ours {step:.3f} s, the peer's {evens:.3f} s, with our split {sames:.3f} s\n"
        f"ours over the peer: {median_over_turns(over_even):.3f} +- {noise_of(over_even):.3f}, "
        f"{len(starts)} pairs, one per start: {shown_ratios(over_even)}\n"
        f"ours over the peer with our split: {median_over_turns(over_same):.3f} +- {noise:.3f}: "
        f"{shown_ratios(over_same)}\n"
        f"processor seconds of a step on all ranks: ours {busy[0]:.3f}, the peer's {busy[1]:.3f}, "
        f"with our split {busy[2]:.3f}; ours over that: {processor:.3f}",
        flush=True,
    )
    checks = {
        "equal devices, over the peer": at_least(median_over_turns(over_even), 0.97),
        "equal devices, over the peer with our split": at_least(median_over_turns(over_same), 0.98),
        "processor seconds, over the peer with our split": at_most(processor, 1.02),
    }
    raw = {
        "shares": EQUAL,
        "split": plan.split,
        "ranks": plan.ranks,
        "predicted_seconds": plan.predicted_seconds,
        "seconds_after_planning": seconds_after_planning,
        "seconds": starts,
        "over_even": over_even,
        "over_same": over_same,
        "processor_seconds": busy,
        "noise": noise_of(over_even),
        "noise_over_same": noise,
    }
    return checks, raw


class Starters:
    """Source of the `RankStarter`, whose process forks the ranks.

    Args:
        bed: The testbed.
        fresh: True makes a new process for every use; False uses one process for all.
    """

    def __init__(self, bed: Testbed, fresh: bool) -> None:
        self._bed = bed
        self._shared = None if fresh else self._make()

    @contextmanager
    def on(self, shares: Sequence[float]) -> Iterator[RankStarter]:
        """Context manager that yields a starter, on hosts with these CPU shares.

        The starter's imports run before the shares are set, so at full speed.
        """
        set_shares(self._bed, ())
        starter = self._shared or self._make()
        set_shares(self._bed, shares)
        yield starter
        if starter is not self._shared:
            starter.close()

    def _make(self) -> RankStarter:
        return RankStarter(self._bed, [OURS, PEER])


def planned(starter: RankStarter, count: int, settings: Settings) -> tuple[Plan, float]:
    """Plan and run a few steps; return the plan, and the median step seconds after planning."""
    ours = Ours(starter, 2, settings)
    plan = ours.start(count, [settings.warmup, 1 + settings.after_planning])
    ours.turn()
    seconds = statistics.median(ours.turn().seconds[1:])
    ours.close()
    print(
        f"{plan.text}\nright after planning: {seconds:.3f} s, predicted "
        f"{plan.predicted_seconds:.3f} s",
        flush=True,
    )
    return plan, seconds


def in_turns(
    starters: Starters,
    shares: Sequence[float],
    plan: Plan,
    peer_settings: Sequence[Setting],
    settings: Settings,
    count: int,
    turns: int = 1,
) -> list[list[list[float]]]:
    """Return the mean step seconds of every turn: ours, then the peer's under each setting. Then
    come the mean processor seconds of a step, in the same order.

    Args:
        starters: Source of the processes that fork the ranks.
        shares: CPU shares of the hosts.
        plan: Plan of our pipeline.
        peer_settings: Settings of the peer.
        settings: Settings of the benchmark.
        count: Number of times that both contenders are started.
        turns: Number of turns of each start.

    Returns:
        One list per start, with one list of seconds per turn.

    Raises:
        FairnessError: If the contenders' losses differ.
    """
    starts = []
    for number in range(count):
        with starters.on(shares) as starter:
            ours, peer = Ours(starter, 2, settings), Peer(starter, 2, settings)
            ours.start(settings.microbatches, settings.turns(turns), plan.json)
            for setting in peer_settings:
                peer.prepare(setting)
            first_steps = [
                ours.turn,
                *(partial(peer.run, s, settings.warmup) for s in peer_settings),
            ]
            for run in _alternating(first_steps, number):
                run()
            rows = [
                one_turn(ours, peer, peer_settings, number + turn, settings)
                for turn in range(turns)
            ]
            ours.end()
            require_same_losses(ours.losses, *(peer.losses[setting] for setting in peer_settings))
            ours.close()
            peer.close()
        starts.append(rows)
    return starts


def one_turn(
    ours: Ours, peer: Peer, peer_settings: Sequence[Setting], number: int, settings: Settings
) -> list[float]:
    """Run one turn of each; return the mean step seconds: ours, then the peer's per setting. Then
    come the mean processor seconds of a step, in the same order."""
    count = 1 + len(peer_settings)
    row = [0.0] * (2 * count)
    for place in _alternating(range(count), number):
        steps = peer.run(peer_settings[place - 1], 1 + settings.counted) if place else ours.turn()
        # The first step of a turn does not count: the pipeline is empty when the turn begins.
        row[place] = statistics.fmean(steps.seconds[1:])
        row[count + place] = statistics.fmean(steps.processor_seconds[1:])
    return row


def _alternating(contenders: Sequence[T], number: int) -> Iterable[T]:
    """Return the contenders in alternating order.

    A drift of the machine's speed thus affects all alike.
    """
    return contenders if number % 2 == 0 else reversed(contenders)


def sweep(
    starter: RankStarter, plan: Plan, settings: Settings
) -> tuple[dict[str, float], int, Setting]:
    """Measure the peer's settings with an even split.

    Returns:
        Step seconds by name of the setting, the number of threads for the comparison, and the
        fastest setting.
    """
    peer, split = Peer(starter, 2, settings), even_split(plan)
    peer_settings = [
        Setting(f"{count} micro-batches, {threads} threads", split, (0, 1), count, threads)
        for count, threads in [(settings.microbatches, 1), *settings.swept]
    ]
    seconds_by_name: dict[str, list[float]] = {}
    for setting in peer_settings:
        peer.prepare(setting)
        seconds_by_name[setting.name] = peer.run(setting, 2).seconds[1:]
    # A setting that is much slower than the best one is not measured for minutes.
    best = min(min(seconds) for seconds in seconds_by_name.values())
    for setting in peer_settings:
        if min(seconds_by_name[setting.name]) < _HOPELESS_RATIO * best:
            seconds_by_name[setting.name] += peer.run(setting, 1 + settings.counted).seconds[1:]
    peer.close()
    medians_by_name = {name: statistics.median(s) for name, s in seconds_by_name.items()}
    rows = [
        [setting.microbatches, setting.threads, medians_by_name[setting.name]]
        for setting in peer_settings
    ]
    columns = ("micro-batches", "threads", "step in s")
    print(f"The peer's even split under other settings\n{table(columns, rows)}", flush=True)
    same_count = [
        setting for setting in peer_settings if setting.microbatches == settings.microbatches
    ]
    threads = min(same_count, key=lambda s: medians_by_name[s.name]).threads
    return medians_by_name, threads, min(peer_settings, key=lambda s: medians_by_name[s.name])


def medians(starts: Sequence[Sequence[Sequence[float]]]) -> list[float]:
    """Return the median step seconds of every contender, in the order of the rows."""
    rows = chain.from_iterable(starts)
    return [statistics.median(column) for column in zip(*rows, strict=True)]


def ratios(
    starts: Sequence[Sequence[Sequence[float]]], place: int, base: int = 0
) -> list[list[float]]:
    """Return one column of the rows over another, per start and turn.

    By default this is the speed of ours over that of another contender.

    Args:
        starts: Rows per start and turn; see `in_turns`.
        place: Index of a column.
        base: Index of the column by which it is divided.
    """
    return [[row[place] / row[base] for row in rows] for rows in starts]


def median_over_turns(ratios_of_starts: Sequence[Sequence[float]]) -> float:
    """Return the median over all turns."""
    return statistics.median(chain.from_iterable(ratios_of_starts))


def even_split(plan: Plan) -> tuple[int, int]:
    """Return half of the layers for each of two stages."""
    layers = sum(plan.split)
    return layers // 2, layers - layers // 2


def bound_on_ratio(shares: Sequence[float], microbatches: int) -> float:
    """Return the step time of the even split over that of the best split, in an ideal pipeline.

    An ideal pipeline can be split at any point, and its messages take no time. A step takes the
    time of the slowest stage for all micro-batches. To that, each other stage adds the time of one
    micro-batch, while the pipeline fills and drains.
    """

    def step(parts: Sequence[float]) -> float:
        busy = [part / share for part, share in zip(parts, shares, strict=True)]
        return microbatches * max(busy) + sum(busy) - max(busy)

    count = len(shares)
    return step([1 / count] * count) / step([share / sum(shares) for share in shares])


def noise_of(ratios_of_starts: Sequence[Sequence[float]]) -> float:
    """Return an estimate of the standard error of the median.

    It uses one median per start, because the turns of a start are not independent. The standard
    error of a median is 1.2533 times that of a mean. With five starts, the estimate has an error of
    about a third; with fifteen, of about a fifth.
    """
    start_medians = [statistics.median(turns) for turns in ratios_of_starts]
    return 1.2533 * statistics.stdev(start_medians) / math.sqrt(len(start_medians))


def shown_ratios(ratios_of_starts: Sequence[Sequence[float]]) -> str:
    """Return the medians of all starts as text."""
    return ", ".join(f"{statistics.median(turns):.3f}" for turns in ratios_of_starts)


if __name__ == "__main__":
    raise SystemExit(main())
