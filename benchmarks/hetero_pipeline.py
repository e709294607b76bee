"""`dlres_hetero_pipe` beside torch.distributed.pipelining, on hosts of unlike speed.

    python -m benchmarks.hetero_pipeline            the comparison, about 30 minutes
    python -m benchmarks.hetero_pipeline --matrix   how good predictions are, about 12 minutes

Both sides train the same model on the same hosts and take turns of a few steps, so that whatever
else the machine does hits both; figures are medians over neighbouring turns. Both are started anew
several times, since processes that do the same differ by some percent. Needs root (see
benchmarks/support/testbed.py).
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
from benchmarks.support.hetero_pipeline_contenders import (
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
from benchmarks.support.hetero_pipeline_matrix import matrix
from benchmarks.support.rank_starter import RankStarter
from benchmarks.support.report import at_least, at_most, table
from benchmarks.support.testbed import Host, Testbed

NAME = "hetero_pipeline"
T = TypeVar("T")
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
        starters = Starters(bed, settings.anew)
        unequal = on_unequal(starters, settings)
        equal = on_equal(starters, settings)
    return {**unequal[0], **equal[0]}, {"unequal": unequal[1], "equal": equal[1]}


def on_unequal(starters: Starters, settings: Settings) -> Figures:
    """Ours, the peer's even split and the peer with our split, in turns."""
    count = settings.microbatches
    print(f"CPU shares {shown(UNEQUAL)}, {count} micro-batches", flush=True)
    with starters.on(UNEQUAL) as hosts:
        plan, promised = planned(hosts, count, settings)
        swept, threads = sweep(hosts, plan, settings)
    even = Setting("even", even_split(plan), (0, 1), count, threads)
    same = Setting("same", plan.split, plan.ranks, count, threads)
    starts = in_turns(
        starters, UNEQUAL, plan, (even, same), settings, settings.starts, settings.rounds
    )
    step, evens, sames = medians(starts)
    over_even, over_same = ratios(starts, 1), ratios(starts, 2)
    bound, noise = bound_on_ratio(UNEQUAL, count), noise_of(over_same)
    print(
        f"step: ours {step:.3f} s, the peer's with an even split {evens:.3f} s, with our split "
        f"{sames:.3f} s\n"
        f"ours over the peer's even split: {middle(over_even):.3f} times as fast; the "
        f"bound is {bound:.3f} (slowest stage and fill, {count} micro-batches)\n"
        f"ours over the best of the peer's even splits: {min(swept.values()) / step:.3f}\n"
        f"ours over the peer with our split: {middle(over_same):.3f} +- {noise:.3f}, "
        f"{len(starts)} starts: {shown_ratios(over_same)}",
        flush=True,
    )
    error = abs(promised - plan.predicted_seconds) / promised
    checks = {
        "over the peer's even split, part of the bound": at_least(middle(over_even) / bound, 0.92),
        "prediction error": at_most(error, 0.10),
        "over the peer with our split, within noise": at_least(middle(over_same), 1.0, noise=noise),
    }
    raw = {
        "shares": UNEQUAL,
        "bound": bound,
        "split": plan.split,
        "ranks": plan.ranks,
        "predicted_seconds": plan.predicted_seconds,
        "seconds_after_planning": promised,
        "seconds": starts,
        "over_even": over_even,
        "over_same": over_same,
        "noise_over_same": noise,
        "peer_swept": swept,
        "peer_threads": threads,
    }
    return checks, raw


def on_equal(starters: Starters, settings: Settings) -> Figures:
    """Ours and the peer's even split on devices of one speed, in turns."""
    count = settings.microbatches
    print(f"\nCPU shares {shown(EQUAL)}, {count} micro-batches", flush=True)
    with starters.on(EQUAL) as hosts:
        plan, promised = planned(hosts, count, settings)
    even = Setting("even", even_split(plan), (0, 1), count, 1)
    starts = in_turns(starters, EQUAL, plan, (even,), settings, settings.pairs)
    step, evens = medians(starts)
    over_even = ratios(starts, 1)
    print(
        f"step: ours {step:.3f} s, the peer's {evens:.3f} s\n"
        f"ours over the peer: {middle(over_even):.3f} +- {noise_of(over_even):.3f}, "
        f"{len(starts)} pairs, each of a start of its own: {shown_ratios(over_even)}",
        flush=True,
    )
    checks = {"equal devices, over the peer": at_least(middle(over_even), 0.97)}
    raw = {
        "shares": EQUAL,
        "split": plan.split,
        "ranks": plan.ranks,
        "predicted_seconds": plan.predicted_seconds,
        "seconds_after_planning": promised,
        "seconds": starts,
        "over_even": over_even,
        "noise": noise_of(over_even),
    }
    return checks, raw


class Starters:
    """What ranks are forked of: other processes every time, if `anew`."""

    def __init__(self, bed: Testbed, anew: bool) -> None:
        self._bed = bed
        self._same = None if anew else self._make()

    @contextmanager
    def on(self, shares: Sequence[float]) -> Iterator[RankStarter]:
        """Give the hosts these shares, once all that is needed is imported."""
        set_shares(self._bed, ())
        hosts = self._same or self._make()
        set_shares(self._bed, shares)
        yield hosts
        if hosts is not self._same:
            hosts.close()

    def _make(self) -> RankStarter:
        return RankStarter(self._bed, [OURS, PEER])


def planned(hosts: RankStarter, count: int, settings: Settings) -> tuple[Plan, float]:
    """Plan, and run the first steps; return the plan, and the median step right after it."""
    ours = Ours(hosts, 2, settings)
    plan = ours.start(count, [settings.first, 1 + settings.promised])
    ours.turn()
    seconds = statistics.median(ours.turn()[1:])
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
    tried: Sequence[Setting],
    settings: Settings,
    count: int,
    turns: int = 1,
) -> list[list[list[float]]]:
    """Return the mean step of every turn of every start: ours, then the peer's under each setting.

    Args:
        count: how often both sides are started.
        turns: of each start.
    """
    starts = []
    for number in range(count):
        with starters.on(shares) as hosts:
            ours, peer = Ours(hosts, 2, settings), Peer(hosts, 2, settings)
            ours.start(settings.microbatches, settings.turns(turns), plan.json)
            for setting in tried:
                peer.make(setting)
            first_steps = [ours.turn, *(partial(peer.run, s, settings.first) for s in tried)]
            for run in _order(first_steps, number):
                run()
            rows = [one_turn(ours, peer, tried, number + turn, settings) for turn in range(turns)]
            ours.end()
            require_same_losses(ours.losses, *(peer.losses[setting] for setting in tried))
            ours.close()
            peer.close()
        starts.append(rows)
    return starts


def one_turn(
    ours: Ours, peer: Peer, tried: Sequence[Setting], number: int, settings: Settings
) -> list[float]:
    """Return the mean step of ours, then of the peer's under each setting."""
    row = [0.0] * (1 + len(tried))
    for place in _order(range(len(row)), number):
        seconds = peer.run(tried[place - 1], 1 + settings.counted) if place else ours.turn()
        # Nothing is under way when a turn begins, which its first step pays for.
        row[place] = statistics.fmean(seconds[1:])
    return row


def _order(sides: Sequence[T], number: int) -> Iterable[T]:
    """Who goes first changes, so that a drift of the machine favours nobody."""
    return sides if number % 2 == 0 else reversed(sides)


def sweep(hosts: RankStarter, plan: Plan, settings: Settings) -> tuple[dict[str, float], int]:
    """Try the peer's settings with an even split; return its step times, and the better number of
    threads for the comparison."""
    peer, split = Peer(hosts, 2, settings), even_split(plan)
    tried = [
        Setting(f"{count} micro-batches, {threads} threads", split, (0, 1), count, threads)
        for count, threads in [(settings.microbatches, 1), *settings.swept]
    ]
    spent: dict[str, list[float]] = {}
    for setting in tried:
        peer.make(setting)
        spent[setting.name] = peer.run(setting, 2)[1:]
    # What is far off at once is not worth minutes of more steps.
    best = min(min(seconds) for seconds in spent.values())
    for setting in tried:
        if min(spent[setting.name]) < _FAR_OFF * best:
            spent[setting.name] += peer.run(setting, 1 + settings.counted)[1:]
    peer.close()
    found = {name: statistics.median(seconds) for name, seconds in spent.items()}
    rows = [[setting.microbatches, setting.threads, found[setting.name]] for setting in tried]
    columns = ("micro-batches", "threads", "step in s")
    print(f"The peer's even split under other settings\n{table(columns, rows)}", flush=True)
    alike = [setting for setting in tried if setting.microbatches == settings.microbatches]
    return found, min(alike, key=lambda setting: found[setting.name]).threads


def medians(starts: Sequence[Sequence[Sequence[float]]]) -> list[float]:
    """Return the median step of every side."""
    rows = chain.from_iterable(starts)
    return [statistics.median(column) for column in zip(*rows, strict=True)]


def ratios(starts: Sequence[Sequence[Sequence[float]]], place: int) -> list[list[float]]:
    """Return by what factor ours was faster than the other, in every turn of every start."""
    return [[row[place] / row[0] for row in rows] for rows in starts]


def middle(found: Sequence[Sequence[float]]) -> float:
    """Return the median over all turns."""
    return statistics.median(chain.from_iterable(found))


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


def noise_of(found: Sequence[Sequence[float]]) -> float:
    """Return an estimate of the median's standard error from the starts' medians, as turns of one
    start are alike: 1.2533 times a mean's. It is off by a third itself from five starts, by a fifth
    from fifteen."""
    of_starts = [statistics.median(turns) for turns in found]
    return 1.2533 * statistics.stdev(of_starts) / math.sqrt(len(of_starts))


def shown_ratios(found: Sequence[Sequence[float]]) -> str:
    """Return the median of every start, as it is printed."""
    return ", ".join(f"{statistics.median(turns):.3f}" for turns in found)


if __name__ == "__main__":
    raise SystemExit(main())
