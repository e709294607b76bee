"""Parameter servers between hosts, against DistributedDataParallel's all-reduce, in turns.

    python -m benchmarks.parameter_server           about 10 minutes
    python -m benchmarks.parameter_server --quick   few steps: the figures mean little
    python -m benchmarks.parameter_server --slow --snapshot   only these parts

Four hosts have a worker each. Servers are processes of their own, on the first hosts: with four
servers, each host has one. A step pushes 25.2 MB of gradients, updates with momentum on the
servers, and lands all parameters. The other contender reduces buckets of the same gradients over
gloo, as DistributedDataParallel does, and updates on each worker.

The bound of a step is the time of the bytes on the busiest link in one direction, plus that of one
key. Both directions are in use at the same time. What a worker sends to a server of its own host
crosses no link. All hosts share the processors of this machine, so a step also takes at least the
processor time of all processes, divided by the number of processors.

Each byte is copied once on its way from a gradient (to the worker's log), once from a message to
the server's merged gradient, never from the server's parameter to ZeroMQ, and once from a message
to the worker's parameter. The benchmark counts bytes that a server must copy once more, since they
are not aligned, or came in the message of another key. Needs root (see benchmarks/support/testbed).
"""

from __future__ import annotations

import os
import secrets
import statistics
import tempfile
from collections.abc import Callable, Sequence
from typing import Any

from benchmarks.support.command import Figures, conclude_on_testbed, flags
from benchmarks.support.parameter_server.contenders import LAYERS, WIDTH
from benchmarks.support.parameter_server.turns import Turns
from benchmarks.support.report import Check, at_least, at_most, table
from benchmarks.support.testbed import Host

NAME = "parameter_server"
# Number of hosts, and rates of their links in Mbit/s.
HOSTS, SLOW_MBIT, FAST_MBIT = 4, 200, 1000
SERVERS = (1, 2, 4)
# Bytes of a key. The other sizes are measured only with the largest number of servers.
KEY_BYTES, OTHER_KEY_BYTES = 512 << 10, (256 << 10, 1 << 20)
GRADIENT_BYTES = 4 * LAYERS * (WIDTH * WIDTH + WIDTH)
# Sizes of the all-reduce's buckets in MB; the last one is one bucket.
_BUCKETS_MB = (1, 4, 25, 1000)
# See benchmarks/gradsync.py.
_BURST_BYTES = 80 << 10
# Pulls in a turn.
_PULLS = 100


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print, and return the exit status."""
    parts: dict[str, tuple[Callable[[int], Figures], str]] = {
        "slow": (lambda rounds: exchange(SLOW_MBIT, rounds), f"links of {SLOW_MBIT} Mbit/s"),
        "fast": (lambda rounds: exchange(FAST_MBIT, rounds), f"links of {FAST_MBIT} Mbit/s"),
        "snapshot": (pulls, "pulls during a snapshot"),
    }
    arguments = flags(
        NAME,
        __doc__,
        argv,
        quick="few steps: the figures mean little",
        others={part: f"only: {text}" for part, (_, text) in parts.items()},
    )
    rounds = 1 if arguments.quick else 5
    chosen = [part for part in parts if getattr(arguments, part)] or list(parts)
    return conclude_on_testbed(NAME, lambda: _measure({p: parts[p] for p in chosen}, rounds))


def _measure(parts: dict[str, tuple[Callable[[int], Figures], str]], rounds: int) -> Figures:
    checks: dict[str, Check] = {}
    raw: dict[str, Any] = {"rounds": rounds}
    for name, (measure, text) in parts.items():
        print(f"\n{text[0].upper()}{text[1:]}", flush=True)
        part_checks, raw[name] = measure(rounds)
        checks |= part_checks
    return checks, raw


def link_bytes(servers: int) -> float:
    """Return the bytes that cross the busiest link in one direction in a step.

    In one direction, the link of a host with a server carries the pushes of the other workers, and
    what its own worker pulls from other servers. The other direction carries as much.
    """
    share = GRADIENT_BYTES / servers
    return (HOSTS - 1) * share + (GRADIENT_BYTES - share)


def bound_seconds(servers: int, key_bytes: int, mbit: int) -> float:
    """Return the bound of a step: bytes on the busiest link and one key, over the rate."""
    return (link_bytes(servers) + key_bytes) / (mbit * 1e6 / 8)


def exchange(mbit: int, rounds: int) -> Figures:
    """Compare servers with their bound, and with an all-reduce, over links of a rate."""
    reduces = {f"all-reduce, {mb} MB": {"bucket_mb": mb} for mb in _BUCKETS_MB}
    ours: dict[str, dict[str, Any]] = {
        f"{n} server{'s' * (n > 1)}": {"servers": n, "key_bytes": KEY_BYTES} for n in SERVERS
    }
    most_servers = list(ours)[-1]
    for size in OTHER_KEY_BYTES:
        name = f"{most_servers}, keys of {size >> 10} KiB"
        ours[name] = {"servers": SERVERS[-1], "key_bytes": size}
    cores = len(os.sched_getaffinity(0))
    checks, rows = {}, []
    with Turns([_host(mbit)] * HOSTS, {**reduces, **ours}) as turns:
        turns.warm_up()
        turns.run(rounds)
        for name in (*reduces, *ours):
            seconds, cpu = turns.seconds(name), turns.cpu(name)
            # A ring sends as many bytes as four servers.
            bound = link_bytes(HOSTS) / (mbit * 1e6 / 8)
            if name in ours:
                bound = bound_seconds(ours[name]["servers"], ours[name]["key_bytes"], mbit)
            rows.append(
                [
                    name,
                    1e3 * seconds,
                    turns.sent(name) / 1e6,
                    1e3 * bound,
                    bound / seconds,
                    1e3 * cpu / cores,
                    cpu / cores / seconds,
                ]
            )
            if name in ours and ours[name]["key_bytes"] == KEY_BYTES:
                checks[f"{mbit} Mbit/s, {name}: bound over step"] = at_least(bound / seconds, 0.9)
        best = min(reduces, key=turns.seconds)
        checks[f"{mbit} Mbit/s, {most_servers}: step of all-reduce over step"] = at_least(
            turns.ratio(best, most_servers), 1.0
        )
        columns = ["contender", "step ms", "MB sent", "bound ms", "bound / step"]
        print(table([*columns, "CPU ms / cores", "part of cores busy"], rows))
        _print_threads(turns, (best, most_servers))
        merged, staged = turns.staged_bytes()
        print(f"copied once more before a merge: {staged / merged:.2%} of {merged / 1e6:.0f} MB")
        checks[f"{mbit} Mbit/s: bytes copied once more over pushed bytes"] = at_most(
            staged / merged, 0.01
        )
        raw = {name: turns.raw(name) for name in (*reduces, *ours)}
        return checks, {**raw, "merged": merged, "staged": staged}


def _host(mbit: int) -> Host:
    """Return a host whose link has a rate in Mbit/s."""
    return Host(rate=f"{mbit}mbit", burst=max(_BURST_BYTES, mbit * 250))


def _print_threads(turns: Turns, names: Sequence[str]) -> None:
    """Print the processor time of a step by kind of thread, over all hosts."""
    for name in names:
        parts = turns.threads(name)
        total = sum(parts.values())
        text = ", ".join(f"{t} {1e3 * s:.0f}" for t, s in parts.items() if s > 0.01 * total)
        print(f"CPU ms of {name}: {text}")


def pulls(rounds: int) -> Figures:
    """Compare the slowest pulls during snapshots with those without."""
    seconds: dict[bool, list[float]] = {False: [], True: []}
    ratios = []
    with Turns([_host(FAST_MBIT)] * 2, {}) as turns, tempfile.TemporaryDirectory() as directory:
        order = {
            "server": turns.open_server(0, directory),
            "token": secrets.token_hex(16),
            "snapshot": directory,
        }
        for number in range(rounds):
            part: dict[bool, list[float]] = {}
            for in_snapshot in (False, True) if number % 2 else (True, False):
                reply = turns.pulls(1, {**order, "pulls": _PULLS, "in_snapshot": in_snapshot})
                part[in_snapshot] = reply["seconds"]
                seconds[in_snapshot] += reply["seconds"]
            ratios.append(_percentile(part[True]) / _percentile(part[False]))
    rows = [
        [name, 1e3 * statistics.median(seconds[key]), 1e3 * _percentile(seconds[key])]
        for key, name in ((False, "without"), (True, "during a snapshot"))
    ]
    print(table(["pulls", "median ms", "p99 ms"], rows))
    ratio = _percentile(seconds[True]) / _percentile(seconds[False])
    checks = {"p99 of a pull during a snapshot over p99 without": at_most(ratio, 1.5)}
    return checks, {"without": seconds[False], "during": seconds[True], "ratios": ratios}


def _percentile(values: Sequence[float]) -> float:
    """Return the 99th percentile."""
    return statistics.quantiles(values, n=100, method="inclusive")[-1]


if __name__ == "__main__":
    raise SystemExit(main())
