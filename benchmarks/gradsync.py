"""Gradient synchronisation between hosts: our codecs against DistributedDataParallel and the hooks
of PyTorch, in turns.

    python -m benchmarks.gradsync           about half an hour
    python -m benchmarks.gradsync --quick   few steps of a small model: the figures mean nothing
    python -m benchmarks.gradsync --slow --unshaped   only these parts

The model has 25.2 MB of gradients in layers of 512 x 512; the scaling is also that of 100.8 MB in
layers of 1024 x 1024. The bound of a contender is the time of a step without synchronisation, plus
the time of the contender's bytes on a link. The bound of the gain of shares that follow the links
is the ratio of two such bounds, with the bytes that the slowest link carried.

All hosts share the processors of this machine. So a step also takes at least the processor time of
all ranks, divided by the number of processors. Needs root (see benchmarks/support/testbed).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any

from benchmarks.support.command import Figures, conclude_on_testbed, flags
from benchmarks.support.gradsync_contender import WIDE, WIDTH
from benchmarks.support.gradsync_speeds import compare_speeds
from benchmarks.support.gradsync_turns import QUICK, Contenders, Extent, Turns
from benchmarks.support.report import Check, at_least, at_most, table
from benchmarks.support.testbed import Host
from lightning_dlres.gradsync.plan.measured_steps import COORDINATOR_GAIN

NAME = "gradsync"
# Number of hosts, and rates of their links in Mbit/s; the last one is that of the uneven link.
HOSTS, SLOW_MBIT, FAST_MBIT, ODD_MBIT = 4, 200, 1000, 50
# Bits that each element of a gradient takes on the wire, by algorithm. Others have no bound.
_BITS = {"ddp": 32, "fp16 hook": 16, "tbq": 2, "onebit": 1}
# Least size of a link's token bucket, in bytes: a little more than the 64 KiB segments that the
# kernel hands to a network card. A smaller bucket makes the kernel cut segments into packets, and
# the processor time of that hides the differences between the contenders.
_BURST_BYTES = 80 << 10
# Options that leave the cost model no choice of topology, and send payloads as soon as they are
# ready.
_FIXED = {"topology": "ps", "coordinator": "none"}
_RING = {**_FIXED, "topology": "ring"}
# DistributedDataParallel without a hook, with small buckets, its default size, and one bucket. Its
# scaling is best with small ones.
_BUCKETS_MB = (4, 25, 1000)
_DDP = {f"ddp, {cap} MB": ("ddp", {"bucket_cap_mb": cap}) for cap in _BUCKETS_MB}
# Range of DistributedDataParallel's efficiency that the emulated computation is chosen for.
_DDP_EFFICIENCY = (0.25, 0.30)


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print, and return the exit status."""
    parts: dict[str, tuple[Callable[[Extent], Figures], str]] = {
        "slow": (slow_links, f"links of {SLOW_MBIT} Mbit/s"),
        "scaling": (scaling, f"links of {FAST_MBIT} Mbit/s, and emulated computation"),
        "unshaped": (unshaped, "links as fast as this machine"),
        "uneven": (uneven_links, f"one link of {ODD_MBIT} Mbit/s"),
        "ablation": (ablation, "our design, built up part by part"),
        "speeds": (compare_speeds, "hosts of different speed"),
    }
    arguments = flags(
        NAME,
        __doc__,
        argv,
        quick="few steps of a small model: the figures mean nothing",
        others={part: f"only: {text}" for part, (_, text) in parts.items()},
    )
    extent = QUICK if arguments.quick else Extent()
    chosen = [part for part in parts if getattr(arguments, part)] or list(parts)
    return conclude_on_testbed(NAME, lambda: _measure([parts[part] for part in chosen], extent))


def _measure(parts: Sequence[tuple[Callable[[Extent], Figures], str]], extent: Extent) -> Figures:
    checks: dict[str, Check] = {}
    raw: dict[str, Any] = {"rounds": extent.rounds}
    for measure, text in parts:
        print(f"\n{text[0].upper()}{text[1:]}")
        part_checks, part_raw = measure(extent)
        checks |= part_checks
        raw[measure.__name__] = part_raw
    return checks, raw


def slow_links(extent: Extent) -> Figures:
    """Compare codecs with DistributedDataParallel and PyTorch's hooks over slow links."""
    ours: Contenders = {
        "tbq, ps": ("tbq", _FIXED),
        "tbq, ring": ("tbq", _RING),
        "tbq, planned": ("tbq", {}),
        "onebit, ps": ("onebit", _FIXED),
        "onebit, ring": ("onebit", _RING),
        "onebit, planned": ("onebit", {}),
        "auto": ("auto", {}),
    }
    contenders: Contenders = {
        "alone": ("alone", {}),
        **_DDP,
        "fp16 hook": ("fp16 hook", {}),
        "powersgd": ("powersgd", {}),
        **ours,
    }
    hosts = [_host(SLOW_MBIT)] * HOSTS
    checks, rows = {}, []
    with Turns(hosts, contenders, layers=extent.layers) as turns:
        turns.warm_up()
        turns.run(extent.rounds)
        gradient_bytes = turns.figure("alone", "gradient_bytes")
        best_ddp = min(_DDP, key=turns.seconds)
        for name, (algorithm, _) in contenders.items():
            seconds, cpu = turns.seconds(name), turns.figure(name, "cpu")
            busy_seconds = HOSTS * cpu / len(os.sched_getaffinity(0))
            row = [name, 1e3 * seconds, turns.figure(name, "sent") / 1e6, 1e3 * cpu]
            if algorithm in _BITS:
                bound = turns.seconds("alone") + link_seconds(algorithm, gradient_bytes)
                row += [1e3 * bound, bound / seconds]
                if name in ours and "planned" not in name:
                    checks[f"{name}: bound over step"] = at_least(bound / seconds, 0.8)
            else:
                row += ["-", "-"]
            rows.append([*row, busy_seconds / seconds, turns.chosen(name)])
            if name in ours and name != "auto":
                checks[f"{name}: ddp over step"] = at_least(turns.ratio(best_ddp, name), 7.0)
                checks[f"{name}: fp16 hook over step"] = at_least(
                    turns.ratio("fp16 hook", name), 3.5
                )
        columns = ["contender", "step ms", "MB sent", "CPU ms", "bound ms", "bound / step"]
        print(table([*columns, "part of processors busy", "chosen"], rows))
        return checks, turns.raw()


def _host(mbit: int) -> Host:
    """Return a host whose link has a rate in Mbit/s."""
    # 2 ms of traffic, as the testbed's default, but at least `_BURST_BYTES`.
    return Host(rate=f"{mbit}mbit", burst=max(_BURST_BYTES, mbit * 250))


def link_seconds(algorithm: str, gradient_bytes: float) -> float:
    """Return the seconds that the bytes of a step take in one direction of a slow link.

    Args:
        algorithm: Key of `_BITS`.
        gradient_bytes: Bytes of all gradients in float32.
    """
    nbytes = gradient_bytes * _BITS[algorithm] / 32
    # A host sends all gradients but its own part to the hosts that add them, and then the sums of
    # its own part to each other host. A ring takes as many bytes.
    return 2 * (HOSTS - 1) / HOSTS * nbytes / (SLOW_MBIT * 1e6 / 8)


def scaling(extent: Extent) -> Figures:
    """Compare with linear scaling, of which DistributedDataParallel reaches less than a third."""
    checks, raw = {}, {}
    for width in (WIDTH, WIDE):
        checks_of_width, raw[str(width)] = _scaling(extent, width)
        checks |= checks_of_width
    return checks, raw


def _scaling(extent: Extent, width: int) -> Figures:
    """Compare with linear scaling.

    Args:
        extent: Extent of the benchmark.
        width: Width of the model's layers.
    """
    contenders: Contenders = {
        "alone": ("alone", {}),
        **_DDP,
        "tbq, ps": ("tbq", _FIXED),
        "tbq, ring": ("tbq", _RING),
        "onebit, ps": ("onebit", _FIXED),
        "onebit, ring": ("onebit", _RING),
        "onebit, planned": ("onebit", {}),
    }
    hosts = [_host(FAST_MBIT)] * HOSTS
    with Turns(hosts, contenders, layers=extent.layers, width=width, samples=1) as turns:
        turns.warm_up(names=("alone", *_DDP))
        emulated = _emulated_seconds(turns)
        # Ours makes its plan in steps like those that count.
        for _ in range(2):
            turns.warm_up(emulated)
        turns.run(extent.rounds, emulated)
        efficiency = {name: turns.ratio("alone", name) for name in contenders}
        rows = [
            [name, 1e3 * turns.seconds(name), efficiency[name], 1e3 * turns.figure(name, "cpu")]
            for name in contenders
        ]
        megabytes = turns.figure("alone", "gradient_bytes") / 1e6
        print(
            f"{megabytes:.1f} MB of gradients, "
            f"emulated computation: {1e3 * emulated:.0f} ms of sleep in a step"
        )
        print(table(["contender", "step ms", "of linear", "CPU ms"], rows))
        checks = {
            f"scaling, {megabytes:.0f} MB: {name}, part of linear": at_least(efficiency[name], 0.85)
            for name in contenders
            if name != "alone" and name not in _DDP
        }
        best_ddp = max(efficiency[name] for name in _DDP)
        checks[f"scaling, {megabytes:.0f} MB: ddp, part of linear"] = at_most(
            best_ddp, _DDP_EFFICIENCY[1]
        )
        return checks, {"emulated": emulated, **turns.raw()}


def _emulated_seconds(turns: Turns) -> float:
    """Return emulated seconds of computation in a step for which the efficiency of
    DistributedDataParallel is within `_DDP_EFFICIENCY`.

    If every trial is above that range, the check of the efficiency shows it. The check does not
    show an efficiency below the range.
    """
    low, high = _DDP_EFFICIENCY
    emulated = 0.1
    for _ in range(8):
        alone, ddp = (
            min(
                # The first steps may find cold caches.
                reply["seconds"]
                for _ in range(2)
                for reply in turns.order(name, 3, emulated)
            )
            for name in ("alone", f"ddp, {_BUCKETS_MB[0]} MB")
        )
        if low < alone / ddp < high:
            break
        emulated *= (low + high) / 2 / (alone / ddp)
    return emulated


def unshaped(extent: Extent) -> Figures:
    """Compare "auto" and "none" with DistributedDataParallel where compression does not pay."""
    # All three compare buckets of one size. Without `bucket_cap_mb`, DistributedDataParallel has a
    # first bucket of 1 MB before those of 25 MB.
    buckets = {"bucket_cap_mb": 25}
    contenders: Contenders = {
        **_DDP,
        "auto": ("auto", buckets),
        "none": ("none", buckets),
        "auto, default buckets": ("auto", {}),
        "none, default buckets": ("none", {}),
    }
    with Turns([Host() for _ in range(HOSTS)], contenders, layers=extent.layers) as turns:
        turns.warm_up()
        turns.run(3 * extent.rounds)
        rows = [[name, 1e3 * turns.seconds(name), turns.chosen(name)] for name in contenders]
        print(table(["contender", "step ms", "chosen"], rows))
        checks = {
            f"unshaped: {name}, step of ddp over step": at_least(
                turns.ratio("ddp, 25 MB", name), 0.97
            )
            for name in ("auto", "none")
        }
        return checks, turns.raw()


def uneven_links(extent: Extent) -> Figures:
    """Compare planned shares of the gradients, which follow the links' rates, with equal shares."""
    contenders: dict[str, tuple[str, dict[str, Any]]] = {"alone": ("alone", {})}
    for codec in ("fp16", "tbq"):
        contenders[f"{codec}, equal shares"] = codec, _FIXED
        contenders[f"{codec}, planned"] = codec, {}
    rates = [SLOW_MBIT] * (HOSTS - 1) + [ODD_MBIT]
    checks, rows = {}, []
    with Turns([_host(rate) for rate in rates], contenders, layers=extent.layers) as turns:
        turns.warm_up()
        turns.run(extent.rounds)
        for codec in ("fp16", "tbq"):
            equal, planned = f"{codec}, equal shares", f"{codec}, planned"
            gain = turns.ratio(equal, planned)
            bounds = [
                # The slow link is that of the last rank.
                turns.seconds("alone")
                + turns.figure(name, "sent", HOSTS - 1) / (ODD_MBIT * 1e6 / 8)
                for name in (equal, planned)
            ]
            rows.append(
                [
                    codec,
                    1e3 * turns.seconds(equal),
                    1e3 * turns.seconds(planned),
                    gain,
                    bounds[0] / bounds[1],
                    turns.chosen(planned),
                ]
            )
            checks[f"uneven links: {codec}, equal over planned"] = at_least(gain, 1.4)
        print(table(["codec", "equal ms", "planned ms", "gain", "bound", "chosen"], rows))
        return checks, turns.raw()


def ablation(extent: Extent) -> Figures:
    """Add the parts of our design to a blocking hook, one after the other, over slow links."""
    contenders: Contenders = {
        "codec on the critical path": ("blocking tbq", {}),
        "+ decoupled": ("tbq", {**_FIXED, "batches": False, "min_bytes": 0}),
        "+ batched": ("tbq", {**_FIXED, "min_bytes": 0}),
        "+ collision-free plan": ("tbq", {**_FIXED, "coordinator": "replay", "min_bytes": 0}),
        # From here on, the cost model also chooses the topology.
        "+ selective": ("tbq", {"coordinator": "replay"}),
        "all chosen by the cost model": ("tbq", {}),
    }
    hosts = [_host(SLOW_MBIT)] * HOSTS
    with Turns(hosts, contenders, layers=extent.layers) as turns:
        turns.warm_up()
        turns.run(extent.rounds)
        rows, before = [], ""
        for name in contenders:
            gain = turns.ratio(before, name) if before else 1.0
            spread = f"{100 * turns.spread(name):.1f} %"
            rows.append([name, 1e3 * turns.seconds(name), spread, gain, turns.chosen(name)])
            before = name
        columns = ["design", "step ms", "spread", "step before / step", "chosen"]
        print(table(columns, rows))
        coordinator_gain = turns.ratio("+ batched", "+ collision-free plan") - 1
        checks = {}
        if coordinator_gain <= COORDINATOR_GAIN:
            is_coordinated = "replay" in turns.chosen("all chosen by the cost model")
            checks["ablation: useless coordinator in the plan"] = at_most(float(is_coordinated), 0)
        return checks, turns.raw()


if __name__ == "__main__":
    raise SystemExit(main())
