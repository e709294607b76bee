"""Gradient synchronisation on many hosts, simulated from costs: efficiency at 4 to 1024 hosts.

    python -m benchmarks.gradsync_scale           about 5 minutes
    python -m benchmarks.gradsync_scale --real    about 8 minutes: real steps over simulated ones
    python -m benchmarks.gradsync_scale --quick   few hosts: the figures mean little

The efficiency is that of weak scaling: the step of one host over the step with synchronisation, for
the same samples per host. The costs are stated, not measured: see `STATED`. With `--real`, the
costs, the plans and the times at which gradients are ready are those of real training on a testbed
of 2, 3 and 4 hosts, which needs root (see benchmarks/support/testbed). The fastest real step is
compared, since other processes on the machine only add to it.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from benchmarks.support.command import Figures, conclude_on_testbed, flags
from benchmarks.support.gradsync_contender import LAYERS, WIDTH
from benchmarks.support.rank_starter import RankStarter
from benchmarks.support.ranks import Ranks
from benchmarks.support.report import at_least, at_most, conclude, table
from benchmarks.support.testbed import Host, Testbed
from lightning_dlres.codecs import base as registry
from lightning_dlres.codecs.gradient import GradientCodec
from lightning_dlres.gradsync.plan.costs import CodecCosts, LinearCost, LinkCosts, SyncCosts
from lightning_dlres.gradsync.plan.plan import RAW, CodecChoice, SyncPlan, make_plan
from lightning_dlres.gradsync.plan.simulation.sending import CoordinatorCosts
from lightning_dlres.gradsync.plan.simulation.simulator import SimulatedStep, simulate
from lightning_dlres.gradsync.plan.units import GradientSpec, SyncUnit, partitions_for
from lightning_dlres.kernels.gradients.layout import BLOCK

NAME = "gradsync_scale"
RANK = "benchmarks.support.gradsync_scale_rank"
# Numbers of simulated hosts.
NODES, QUICK_NODES = (4, 16, 64, 256, 1024), (2, 4, 8)
# Codec and topology of each contender. The ring of raw units is what DDP does with its buckets.
CONTENDERS = {"raw, ring": (RAW, "ring"), "tbq, ps": ("tbq", "ps"), "onebit, ps": ("onebit", "ps")}
# With the topology "ps", gradients are cut into partitions as for at most this many ranks. On more
# ranks, further partitions would only add their fixed times.
_MOST_SHARERS = 64
# A real step may be longer or shorter than the simulated one by at most this factor.
_MOST_RATIO = 1.25
# Processor seconds in which a contender with the topology "ps" must be simulated on the largest
# number of hosts. The time of a ring is not checked.
_TARGET_SECONDS = 60.0


@dataclass(frozen=True, kw_only=True)
class Stated:
    """Costs of the simulated hosts.

    Attributes:
        elements: Elements of each gradient.
        gradients: Number of gradients.
        forward_seconds: Time of forward and of the optimizer, without synchronisation.
        backward_seconds: Time of backward, in which the gradients become ready at equal intervals.
        bandwidth: Bytes per second of a link, in each direction.
        message_seconds: Fixed seconds for which a message occupies a link.
        latency_seconds: Further seconds until the message arrives, in which the link is free.
        task_seconds: Fixed seconds of a compute task: encode, merge or decode.
        element_seconds: Further seconds of a compute task for each element.
    """

    elements: int = 1 << 18
    gradients: int = 100
    forward_seconds: float = 0.05
    backward_seconds: float = 0.1
    bandwidth: float = 10e9 / 8
    message_seconds: float = 20e-6
    latency_seconds: float = 20e-6
    task_seconds: float = 10e-6
    element_seconds: float = 0.1e-9


# 105 MB of gradients, links of 10 Gbit/s, and codecs on a GPU that reads a gradient at 40 GB/s.
STATED = Stated()
# Numbers of real hosts, rate of their links in Mbit/s, steps before the first counted one, and
# counted steps of a round.
REAL_HOSTS, RATE_MBIT, WARMUP, STEPS = (2, 3, 4), 200, 6, 5
# Weights and biases of the real model.
ELEMENTS = LAYERS * (WIDTH + 1) * WIDTH
# Algorithm and options of each real contender.
REAL_CONTENDERS: dict[str, tuple[str, dict[str, Any]]] = {
    "raw, ring": (RAW, {"topology": "ring"}),
    "raw, ps": (RAW, {}),
    "tbq, ps": ("tbq", {}),
    "tbq, ring": ("tbq", {"topology": "ring"}),
    "onebit, ps": ("onebit", {}),
    "tbq, ps, always": ("tbq", {"coordinator": "always"}),
    "tbq, ps, replay": ("tbq", {"coordinator": "replay"}),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Simulate, print, and return the exit status."""
    arguments = flags(
        NAME,
        __doc__,
        argv,
        quick="few hosts: the figures mean little",
        others={"real": "compare the simulation with real steps on a testbed"},
    )
    if arguments.real:
        rounds = 1 if arguments.quick else 3
        return conclude_on_testbed(NAME, lambda: compare(rounds))
    checks, raw = scale(QUICK_NODES if arguments.quick else NODES)
    conclude(NAME, checks, raw)
    return 0


def scale(nodes: Sequence[int], stated: Stated = STATED) -> Figures:
    """Simulate all contenders on each number of hosts.

    Args:
        nodes: Numbers of hosts.
        stated: Costs of the hosts.
    """
    alone = stated.forward_seconds + stated.backward_seconds
    efficiency: dict[str, list[float]] = {name: [] for name in CONTENDERS}
    processor_seconds: dict[str, list[float]] = {name: [] for name in CONTENDERS}
    for count in nodes:
        for name, (codec, topology) in CONTENDERS.items():
            step = stated_step(count, codec, topology, stated)
            start = time.process_time()
            seconds = stated.forward_seconds + simulate(step).seconds
            processor_seconds[name].append(time.process_time() - start)
            efficiency[name].append(alone / seconds)
    rows = [[count, *(efficiency[name][i] for name in CONTENDERS)] for i, count in enumerate(nodes)]
    print(f"{stated}\n\nEfficiency: step of one host / step with synchronisation")
    print(table(["hosts", *CONTENDERS], rows))
    checks = {
        f"{nodes[-1]} hosts: processor seconds of {name}": at_most(
            processor_seconds[name][-1], _TARGET_SECONDS
        )
        for name in CONTENDERS
        if CONTENDERS[name][1] == "ps"
    }
    for name in ("tbq, ps", "onebit, ps"):
        ratio = efficiency[name][-1] / efficiency["raw, ring"][-1]
        checks[f"{nodes[-1]} hosts: {name} over raw, ring"] = at_least(ratio, 1.0)
    return checks, {
        "nodes": list(nodes),
        "efficiency": efficiency,
        "processor_seconds": processor_seconds,
    }


def stated_step(world_size: int, codec: str, topology: str, stated: Stated) -> SimulatedStep:
    """Return the step of equal hosts with the stated costs.

    Args:
        world_size: Number of hosts, with one rank each.
        codec: Name of the codec, or "raw".
        topology: "ps" or "ring".
        stated: Costs of the hosts.
    """
    gradients = [
        GradientSpec(name=f"gradient {i}", count=stated.elements) for i in range(stated.gradients)
    ]
    total = stated.elements * stated.gradients
    if topology == "ring":
        # At least a unit for each rank, so that all ranks send from the start.
        partitions = -(-world_size // stated.gradients)
    else:
        partitions = partitions_for(stated.elements, total, min(world_size, _MOST_SHARERS))
    plan = make_plan(
        gradients,
        [CodecChoice(codec=codec, partitions=partitions)] * len(gradients),
        world_size=world_size,
        topology=topology,
        alignment=BLOCK,
    )
    task = LinearCost(fixed_seconds=stated.task_seconds, seconds_per_item=stated.element_seconds)
    free = LinearCost(fixed_seconds=0.0, seconds_per_item=0.0)
    costs = SyncCosts(
        codecs={
            RAW: CodecCosts(encode=free, merge=task, decode=task),
            codec: CodecCosts(encode=free if codec == RAW else task, merge=task, decode=task),
        },
        links=LinkCosts(
            message_seconds=stated.message_seconds,
            bandwidths=(stated.bandwidth,) * world_size,
            latency_seconds=stated.latency_seconds,
        ),
        all_reduce=free,
    )
    ready = {
        gradient.name: stated.backward_seconds * (i + 1) / len(gradients)
        for i, gradient in enumerate(gradients)
    }
    return SimulatedStep(
        plan=plan, costs=costs, payload_bytes=payload_bytes(plan), ready=[ready] * world_size
    )


def payload_bytes(plan: SyncPlan) -> list[int]:
    """Return the bytes of a payload for each unit, with the codecs' default options."""
    sizes = []
    for unit in plan.units:
        codec = None if unit.codec == RAW else registry.codec(unit.codec)
        assert codec is None or isinstance(codec, GradientCodec)
        sizes.append(4 * unit.count if codec is None else codec.payload_bytes(unit.count))
    return sizes


def compare(rounds: int) -> Figures:
    """Train on each number of real hosts, and simulate the same plans with that run's costs."""
    # "last ready ms" is the time from the start of forward until the last gradient is ready.
    columns = ["hosts", "contender", "real / simulated", "last ready ms", "real ms", "median ms"]
    columns += ["simulated ms", "compute ms", "sending ms"]
    rows: list[list[Any]] = []
    costs: dict[int, str] = {}
    for hosts in REAL_HOSTS:
        sync_costs, answers = train(hosts, rounds)
        costs[hosts] = str(sync_costs)
        for name, (_, options) in REAL_CONTENDERS.items():
            steps = [step for replies in answers[name] for step in steps_of(replies)]
            real, ready = min(steps, key=lambda step: step[0])
            units = answers[name][0][0]["units"]
            result = simulate(
                real_step(units, ready, options, sync_costs),
                coordinator=options.get("coordinator", "none"),
            )
            seconds = [
                max(max(times.values()) for times in ready),
                real,
                statistics.median(step[0] for step in steps),
                result.seconds,
                max(result.compute_busy),
                max(result.sending_busy),
            ]
            rows.append([hosts, name, real / result.seconds, *(1e3 * x for x in seconds)])
        print(table(columns, rows[-len(REAL_CONTENDERS) :]), flush=True)
    checks = {
        f"{hosts} hosts, {name}: real over simulated, or its inverse": at_most(
            max(ratio, 1 / ratio), _MOST_RATIO
        )
        for hosts, name, ratio, *_ in rows
    }
    return checks, {"rows": rows, "costs": costs, "rounds": rounds}


def train(hosts: int, rounds: int) -> tuple[SyncCosts, dict[str, list[list[dict[str, Any]]]]]:
    """Return the measured costs, and each contender's answers by round and rank.

    Args:
        hosts: Number of hosts.
        rounds: Number of rounds; a further one before them is the warm-up.
    """
    answers: dict[str, list[list[dict[str, Any]]]] = {name: [] for name in REAL_CONTENDERS}
    with Testbed([Host(rate=f"{RATE_MBIT}mbit") for _ in range(hosts)]) as bed:
        ranks = Ranks(RankStarter(bed, [RANK]), RANK, hosts, timeout=300.0)
        measured = ranks.ask({"measure": ["tbq", "onebit"], "elements": ELEMENTS})[0]
        for number in range(1 + rounds):
            for name, (algorithm, options) in REAL_CONTENDERS.items():
                order = {"contender": name, "algorithm": algorithm, "options": options}
                replies = ranks.ask({**order, "steps": STEPS if number else WARMUP})
                if number:
                    answers[name].append(replies)
        ranks.close()
    return msgspec.convert(measured, SyncCosts), answers


def coordinator_costs_of(costs: SyncCosts) -> CoordinatorCosts:
    """Return the times of a coordinator whose reports and plans are small messages."""
    links = costs.links
    return CoordinatorCosts(
        report_seconds=links.message_seconds + links.latency_seconds,
        plan_seconds=links.message_seconds + links.latency_seconds,
        # The coordinator sends a plan to each other rank.
        handling_seconds=(len(links.bandwidths) - 1) * links.message_seconds,
    )


def steps_of(replies: Sequence[Mapping[str, Any]]) -> list[tuple[float, list[dict[str, float]]]]:
    """Return the steps of a round, each as seconds on the slowest rank and `ready` times.

    The times are those at which the gradients were ready: for each rank, by name.

    Args:
        replies: Replies of all ranks; see `train` in `gradsync_scale_rank`.
    """
    return [
        (
            max(reply["seconds"][number] for reply in replies),
            [{name: times[number] for name, times in reply["ready"].items()} for reply in replies],
        )
        for number in range(len(replies[0]["seconds"]))
    ]


def real_step(
    rows: Sequence[Sequence[Any]],
    ready: Sequence[Mapping[str, float]],
    options: Mapping[str, Any],
    costs: SyncCosts,
) -> SimulatedStep:
    """Return a step of real training as input of the simulator.

    Args:
        rows: Units of the plan as plain data; see `train` in `gradsync_scale_rank`.
        ready: For each rank, the seconds at which each gradient was ready, by name.
        options: Options of the contender, of which the topology counts.
        costs: Measured costs.
    """
    units = tuple(
        SyncUnit(index=i, gradient=gradient, start=start, stop=stop, codec=codec, owner=owner)
        for i, (gradient, start, stop, codec, owner) in enumerate(rows)
    )
    plan = SyncPlan(world_size=len(ready), topology=options.get("topology", "ps"), units=units)
    return SimulatedStep(
        plan=plan,
        costs=costs,
        payload_bytes=payload_bytes(plan),
        ready=ready,
        coordinator_costs=coordinator_costs_of(costs),
    )


if __name__ == "__main__":
    raise SystemExit(main())
