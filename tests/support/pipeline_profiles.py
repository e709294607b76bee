"""Profiles, plain and random, for the planner's property tests and its benchmark.

Random functions draw from the `random.Random` argument: hypothesis passes one whose draws it can
shrink, the benchmark passes a seeded one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import combinations, pairwise
from random import Random

from lightning_dlres.pipeline.plan.cost_model.costs import Workload
from lightning_dlres.pipeline.plan.cost_model.footprint import smallest_limit
from lightning_dlres.pipeline.plan.plan import consecutive_replicas
from lightning_dlres.pipeline.plan.schedules.base import Schedule
from lightning_dlres.pipeline.plan.schedules.registry import schedule_named
from lightning_dlres.pipeline.profile.cluster import Cluster, Device, Link
from lightning_dlres.pipeline.profile.run_profile import LayerProfile, StepCosts

GPIPE, ONE_F_ONE_B = SCHEDULES = (schedule_named("gpipe"), schedule_named("1f1b"))
NO_STEP_COSTS = StepCosts()
MIB = 1 << 20
Replicas = tuple[tuple[int, ...], ...]


def plain_layers(
    forward: Sequence[float], backward: Sequence[float] | None = None, **sizes: int
) -> tuple[LayerProfile, ...]:
    """Return layers with these times on one kind of device; by default backward takes twice as long
    as forward."""
    backward = [2 * seconds for seconds in forward] if backward is None else backward
    return tuple(
        LayerProfile(name=f"layer{index}", forward=(f,), backward=(b,), **sizes)
        for index, (f, b) in enumerate(zip(forward, backward, strict=True))
    )


def plain_cluster(
    count: int,
    *,
    powers: Sequence[float] = (),
    hosts: Sequence[str] = (),
    limits: Sequence[int | None] = (),
    links: Sequence[Link] = (),
) -> Cluster:
    """Return devices of one kind. Their powers may differ where only the grouping matters."""
    return Cluster(
        kinds=("device",),
        devices=tuple(
            Device(
                power=powers[rank] if powers else 1.0,
                host=hosts[rank] if hosts else "",
                memory_limit=limits[rank] if limits else None,
            )
            for rank in range(count)
        ),
        links=tuple(links),
    )


def stage_per_layer(
    layers: Sequence[LayerProfile],
    microbatches: int,
    schedule: Schedule = ONE_F_ONE_B,
    step: StepCosts | None = None,
    links: Sequence[Link] = (),
) -> Workload:
    """Return a workload of one replica with one stage per layer."""
    stages = len(layers)
    cluster = plain_cluster(stages, links=links)
    replicas = (tuple(range(stages)),)
    return Workload(tuple(layers), step or StepCosts(), cluster, replicas, schedule, microbatches)


def devices_on_hosts(hosts: str) -> Cluster:
    """Return equal devices, one per letter, which names its host; links within hosts are faster."""
    pairs = list(combinations(range(len(hosts)), 2))
    return plain_cluster(
        len(hosts),
        hosts=hosts,
        links=[
            Link(ranks=(a, b), latency=0.0, bytes_per_second=8.0 if hosts[a] == hosts[b] else 1.0)
            for a, b in pairs
        ],
    )


def small_layers(random: Random, count: int, kinds: int) -> tuple[LayerProfile, ...]:
    """Return layers with small whole numbers, so that ties and zeros are common. Some layers share
    parameters."""

    def times(most: int) -> tuple[float, ...]:
        return tuple(float(random.randint(0, most)) for _ in range(kinds))

    layers: list[LayerProfile] = []
    for index in range(count):
        shared = {f"tied{index % 2}": 1 + 4 * (index % 2)} if random.random() < 0.4 else {}
        parameters = random.randint(0, 12)
        trained = random.choice([0, parameters, parameters])
        layers.append(
            LayerProfile(
                name=f"layer{index}",
                parameter_bytes=parameters,
                gradient_bytes=trained,
                update_bytes=random.choice([0, trained, 3 * trained]),
                shared=shared,
                input_bytes=layers[-1].output_bytes if layers else random.randint(0, 4),
                output_bytes=random.randint(0, 9),
                gradient_output_bytes=random.randint(0, 9),
                saved_bytes=random.randint(0, 20),
                workspace_bytes=random.randint(0, 9),
                forward=times(8),
                backward=times(16),
            )
        )
    return tuple(layers)


def small_step(random: Random, kinds: int) -> StepCosts:
    """Return costs of a step besides its small layers; each is often absent."""

    def times() -> tuple[float, ...]:
        return (
            tuple(random.randint(0, 6) / 2 for _ in range(kinds)) if random.random() < 0.5 else ()
        )

    return StepCosts(
        loss=times(),
        loss_bytes=random.randint(0, 20),
        message=times(),
        run_overhead_seconds=times(),
        update=times(),
        state_bytes_per_parameter_byte=random.choice([0.0, 0.5, 2.0]),
        update_bytes_per_byte=random.choice([0.0, 0.0, 1.5]),
    )


def small_workload(
    random: Random,
    *,
    stages: int,
    replicas: int = 1,
    layers: int | None = None,
    recompute: str = "auto",
    schedule: Schedule | None = None,
    extra: int = 0,
) -> Workload:
    """Return a workload that brute force can search, without memory limits.

    The devices of a stage are equal over the replicas, each replica is a host of its own, and ranks
    are in the order of replicas.
    """
    kinds = random.randint(1, stages)
    kind_of = [random.randrange(kinds) for _ in range(stages)]
    devices = tuple(
        Device(kind=kind, power=1.0 / (1 + kind), host=f"host{replica}")
        for replica in range(replicas)
        for kind in kind_of
    )
    pairs = list(combinations(range(len(devices)), 2))
    links = tuple(
        Link(
            ranks=pair,
            latency=random.choice([0.0, 0.5, 2.0]),
            bytes_per_second=float(random.choice([1, 2, 8])),
        )
        for pair in (pairs if random.random() < 0.7 else [])
    )
    count = layers if layers is not None else random.randint(max(stages, 3), 6)
    return Workload(
        small_layers(random, count, kinds),
        small_step(random, kinds),
        Cluster(kinds=tuple("abcdefgh"[:kinds]), devices=devices, links=links),
        consecutive_replicas(len(devices), stages),
        schedule or random.choice(SCHEDULES),
        random.randint(1, 6),
        recompute,
        extra,
    )


def random_split(random: Random, workload: Workload) -> tuple[int, ...]:
    """Return a random split of a workload's layers over its stages."""
    count = len(workload.layers)
    cuts = sorted(random.sample(range(1, count), workload.stages - 1))
    return tuple(b - a for a, b in pairwise([0, *cuts, count]))


def random_recompute(random: Random, workload: Workload) -> tuple[int, ...]:
    """Return a random set of a workload's layers."""
    return tuple(index for index in range(len(workload.layers)) if random.random() < 0.4)


def limited(workload: Workload, limits: Sequence[int | None]) -> Workload:
    """Return the workload with these memory limits, by rank."""
    devices = tuple(
        Device(kind=d.kind, power=d.power, host=d.host, memory_limit=limit)
        for d, limit in zip(workload.cluster.devices, limits, strict=True)
    )
    old = workload.cluster
    cluster = Cluster(kinds=old.kinds, devices=devices, links=old.links)
    return replace(workload, cluster=cluster)


def random_layers(random: Random, count: int, speeds: Sequence[float]) -> tuple[LayerProfile, ...]:
    """Return layers of different sizes and times; their relative speeds differ between devices."""
    layers: list[LayerProfile] = []
    for index in range(count):
        forward, parameters = random.uniform(1e-3, 10e-3), random.randrange(4 * MIB, 64 * MIB)
        output = random.randrange(MIB, 16 * MIB)
        times = [forward / speed * random.uniform(0.8, 1.25) for speed in speeds]
        layers.append(
            LayerProfile(
                name=f"layer{index}",
                parameter_bytes=parameters,
                gradient_bytes=parameters,
                input_bytes=layers[-1].output_bytes if layers else MIB,
                output_bytes=output,
                gradient_output_bytes=output,
                saved_bytes=random.randrange(8 * MIB, 128 * MIB),
                workspace_bytes=random.randrange(32 * MIB),
                forward=tuple(times),
                backward=tuple(t * random.uniform(1.7, 2.3) for t in times),
            )
        )
    return tuple(layers)


def gpt_layers(random: Random, count: int, speeds: Sequence[float]) -> tuple[LayerProfile, ...]:
    """Return an embedding, equal blocks, and a head tied to the embedding."""
    hidden = random.choice([4, 6, 8]) * MIB
    block_seconds, head_seconds = random.uniform(3e-3, 6e-3), random.uniform(4e-3, 12e-3)
    efficiency = [random.uniform(0.8, 1.25) for _ in speeds]

    def layer(name: str, seconds: float, **sizes: int) -> LayerProfile:
        times = [seconds / s * e for s, e in zip(speeds, efficiency, strict=True)]
        return LayerProfile(
            name=name,
            input_bytes=hidden,
            output_bytes=hidden,
            gradient_output_bytes=hidden,
            forward=tuple(times),
            backward=tuple(2 * t for t in times),
            shared={"wte": 16 * hidden} if name in ("embedding", "head") else {},
            **sizes,
        )

    block = {"parameter_bytes": 7 * hidden, "gradient_bytes": 7 * hidden}
    return (
        layer("embedding", block_seconds / 20, saved_bytes=MIB),
        *(
            layer(f"block{index}", block_seconds, saved_bytes=16 * hidden, **block)
            for index in range(count - 2)
        ),
        layer("head", head_seconds, saved_bytes=20 * hidden, workspace_bytes=20 * hidden),
    )


def mixed_cluster(random: Random, speeds: Sequence[float]) -> Cluster:
    """Return devices of these speeds, each of its own kind, with different links."""
    count = len(speeds)
    return Cluster(
        kinds=tuple(f"kind{index}" for index in range(count)),
        devices=tuple(
            Device(kind=rank, power=speed / max(speeds), host=f"host{rank}")
            for rank, speed in enumerate(speeds)
        ),
        links=tuple(
            Link(
                ranks=pair,
                latency=random.uniform(2e-5, 1e-3),
                bytes_per_second=10 ** random.uniform(9.0, 10.3),
            )
            for pair in combinations(range(count), 2)
        ),
    )


def large_workload(
    random: Random, layers: int, stages: int, microbatches: int, *, gpt: bool, slack: float = 1.15
) -> Workload:
    """Return a workload with different devices and scarce memory: each device has its own limit, of
    up to `slack` times the smallest limit that has a plan."""
    speeds = [random.uniform(0.25, 1.0) for _ in range(stages)]
    workload = Workload(
        (gpt_layers if gpt else random_layers)(random, layers, speeds),
        StepCosts(
            loss=tuple(1e-3 / speed for speed in speeds),
            loss_bytes=16 * MIB,
            message=(1e-4,) * stages,
            run_overhead_seconds=(1e-4,) * stages,
            update=tuple(5e-12 / speed for speed in speeds),
            state_bytes_per_parameter_byte=2.0,
        ),
        mixed_cluster(random, speeds),
        (tuple(range(stages)),),
        ONE_F_ONE_B,
        microbatches,
    )
    least = smallest_limit(workload)
    return limited(workload, [round(least * random.uniform(1.0, slack)) for _ in speeds])
