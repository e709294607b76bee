"""From a profile to a plan that all ranks share: decided on rank 0, adopted where one was given."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import msgspec

from lightning_dlres.core.errors import ConfigError
from lightning_dlres.pipeline.plan.cost_model.costs import Workload
from lightning_dlres.pipeline.plan.cost_model.extra_in_flight import with_extra_in_flight
from lightning_dlres.pipeline.plan.cost_model.simulator import step_seconds
from lightning_dlres.pipeline.plan.host_limits import within_hosts
from lightning_dlres.pipeline.plan.plan import PipelinePlan, arrange, even_split
from lightning_dlres.pipeline.plan.schedules.base import Schedule
from lightning_dlres.pipeline.plan.search.device_orders import search_plan
from lightning_dlres.pipeline.plan.search.proportional import proportional_split
from lightning_dlres.pipeline.profile.cluster import Cluster
from lightning_dlres.pipeline.profile.run_profile import LayerProfile, RunProfile

Replicas = tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class PlanConstraints:
    """What the user fixed of the plan.

    Attributes:
        stages: number of stages; None: whatever is fastest.
        replicas: the ranks of every replica in stage order; None: free.
        schedule: the schedule to plan for.
        recompute: "auto", "never" or "always".
    """

    stages: int | None
    replicas: Replicas | None
    schedule: Schedule
    recompute: str


def adopt_plan(
    given: PipelinePlan, layers: tuple[LayerProfile, ...], path: str, world_size: int
) -> PipelinePlan:
    """Return a plan that was given, completed with the model's layers.

    Args:
        given: the plan.
        layers: the model's layers, measured or not.
        path: name of the pipelined module.
        world_size: number of ranks.

    Raises:
        ConfigError: it is for another model or another number of ranks, or breaks a memory limit.
    """
    names = tuple(layer.name for layer in layers)
    if given.world_size != world_size:
        raise ConfigError(
            f"plan must be for {world_size} ranks, got one for {given.world_size}. Plan again."
        )
    if sum(given.split) != len(names):
        raise ConfigError(
            f"plan.split must add up to the {len(names)} layers of {path!r}, got "
            f"{list(given.split)} for {sum(given.split)} layers. Edit the split, or plan again."
        )
    known = tuple(layer.name for layer in given.layers)
    if known and known != names:
        raise ConfigError(
            f"plan must be for the model's layers {list(names)}, got one for {list(known)}. Plan "
            "again."
        )
    plan = msgspec.structs.replace(given, layers=given.layers or layers)
    return predicted(plan) if plan.is_measured else plan


def predicted(plan: PipelinePlan) -> PipelinePlan:
    """Return a measured plan with its step times as the simulator finds them, whatever was edited.

    Raises:
        ConfigError: a stage breaks its memory limit.
    """
    workload = plan.workload()
    for stage in range(plan.stages):
        peak = workload.peak_bytes(stage, plan.layers_of(stage), plan.recompute)
        limit = workload.memory_limit(stage)
        if limit is not None and peak > limit:
            raise ConfigError(
                f"plan must keep stage {stage} within its memory limit of {limit} bytes, got "
                f"{peak}. Give it fewer layers, recompute more of them, or plan again."
            )
    return msgspec.structs.replace(
        plan,
        predicted_seconds=step_seconds(workload, plan.split, plan.recompute),
        even_seconds=even_step_seconds(workload),
    )


def with_schedule(plan: PipelinePlan, schedule: str) -> PipelinePlan:
    """Return the plan as it is under another schedule: the same layers on the same devices.

    Raises:
        ConfigError: a stage breaks its memory limit under it.
    """
    changed = msgspec.structs.replace(plan, schedule=schedule)
    if schedule == plan.schedule or not plan.is_measured:
        return changed
    try:
        return predicted(changed)
    except ConfigError as error:
        raise ConfigError(
            f"The loss needs schedule {schedule!r}, for which the plan was not made: {error} Use "
            f"HeteroPipeStrategy(schedule={schedule!r}), so that it is."
        ) from None


def even_step_seconds(workload: Workload) -> float:
    """Return the step time of what one would do without a profile: equal numbers of layers, devices
    in the order of ranks, nothing recomputed."""
    replicas = arrange(len(workload.cluster.devices), workload.stages)
    even = even_split(len(workload.layers), workload.stages)
    return step_seconds(replace(workload, replicas=replicas), even)


def measured_plan(
    profile: RunProfile,
    wishes: PlanConstraints,
    warn: Callable[[str], None],
    say: Callable[[str], None] = lambda line: None,
) -> PipelinePlan:
    """Return the fastest plan for a profile.

    Raises:
        ConfigError: none fits into memory, or the ranks do not divide into stages.
    """
    return within_hosts(
        lambda cluster: _fastest_plan(profile, cluster, wishes, say),
        profile.cluster,
        profile.host_memory,
        warn,
    )


def _fastest_plan(
    profile: RunProfile, cluster: Cluster, wishes: PlanConstraints, say: Callable[[str], None]
) -> PipelinePlan:
    world = len(cluster.devices)
    workload = Workload(
        profile.layers,
        profile.step,
        cluster,
        wishes.replicas or arrange(world, world if world <= len(profile.layers) else 1),
        wishes.schedule,
        profile.microbatches,
        wishes.recompute,
    )
    decision = search_plan(workload, wishes.stages, keep_order=wishes.replicas is not None, say=say)
    chosen = with_extra_in_flight(decision.workload, decision.split, decision.recompute)
    return predicted(
        PipelinePlan(
            replicas=chosen.replicas,
            split=decision.split,
            recompute=decision.recompute,
            schedule=wishes.schedule.name,
            microbatches=profile.microbatches,
            extra_in_flight=chosen.extra_in_flight,
            layers=profile.layers,
            step=profile.step,
            cluster=cluster,
        )
    )


def unmeasured_layers(names: Sequence[str], sizes: Sequence[int]) -> tuple[LayerProfile, ...]:
    """Return the profiles of layers that were not run: names and parameter bytes."""
    return tuple(
        LayerProfile(name=name, parameter_bytes=size)
        for name, size in zip(names, sizes, strict=True)
    )


def unmeasured_plan(layers: tuple[LayerProfile, ...], replicas: Replicas) -> PipelinePlan:
    """Split by parameter bytes, as if all devices were alike; where there is nothing to measure
    with."""
    sizes = [float(layer.parameter_bytes) for layer in layers]
    split = proportional_split(sizes, [1.0] * len(replicas[0]))
    return PipelinePlan(replicas=replicas, split=split, layers=layers)
