"""Planner: it makes a plan from a profile, from the user's plan, or from parameter sizes alone.

`search.device_orders` finds the fastest plan for a profile. Rank 0 plans for all ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import msgspec

from lightning_dlres.core.errors import ConfigError
from lightning_dlres.pipeline.plan.cost_model.costs import Workload
from lightning_dlres.pipeline.plan.cost_model.simulator import step_seconds
from lightning_dlres.pipeline.plan.host_limits import plan_within_hosts
from lightning_dlres.pipeline.plan.plan import PipelinePlan, consecutive_replicas, even_split
from lightning_dlres.pipeline.plan.schedules.base import Schedule
from lightning_dlres.pipeline.plan.search.device_orders import search_extra_in_flight, search_plan
from lightning_dlres.pipeline.plan.search.proportional import proportional_split
from lightning_dlres.pipeline.profile.cluster import Cluster
from lightning_dlres.pipeline.profile.run_profile import LayerProfile, RunProfile

Replicas = tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class PlanConstraints:
    """Parts of the plan that the user fixed.

    Attributes:
        stages: Number of stages; None: the fastest.
        replicas: Ranks of every replica in stage order; None: the fastest.
        schedule: Schedule to plan for.
        recompute: "auto", "never" or "always".
    """

    stages: int | None
    replicas: Replicas | None
    schedule: Schedule
    recompute: str


def adopt_plan(
    given: PipelinePlan, layers: tuple[LayerProfile, ...], path: str, world_size: int
) -> PipelinePlan:
    """Return the user's plan, completed with the model's layers.

    Args:
        given: The user's plan.
        layers: Profiles of the model's layers; they are used if the plan has none.
        path: Name of the pipelined module, for error messages.
        world_size: Number of ranks.

    Raises:
        ConfigError: If the plan is for another model or number of ranks, or breaks a memory limit.
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
    planned = tuple(layer.name for layer in given.layers)
    if planned and planned != names:
        raise ConfigError(
            f"plan must be for the model's layers {list(names)}, got one for {list(planned)}. Plan "
            "again."
        )
    plan = msgspec.structs.replace(given, layers=given.layers or layers)
    return with_prediction(plan) if plan.is_measured else plan


def with_prediction(plan: PipelinePlan) -> PipelinePlan:
    """Return a measured plan, edited or not, with the step times that the simulator predicts.

    Raises:
        ConfigError: If a stage breaks its memory limit.
    """
    workload = plan.workload()
    for stage in range(plan.stages):
        peak = workload.peak_bytes(stage, plan.layers_of(stage), plan.recompute)
        limit = workload.memory_limit(stage)
        if limit is not None and peak > limit:
            raise ConfigError(
                f"plan must keep stage {stage} within its memory limit of {limit} bytes, got a "
                f"peak of {peak} bytes. Plan again, or give the stage fewer layers."
            )
    return msgspec.structs.replace(
        plan,
        predicted_seconds=step_seconds(workload, plan.split, plan.recompute),
        even_seconds=even_step_seconds(workload),
    )


def with_schedule(plan: PipelinePlan, schedule: str) -> PipelinePlan:
    """Return the plan with another schedule, and the same layers on the same devices.

    Args:
        plan: The plan.
        schedule: Name of the other schedule.

    Raises:
        ConfigError: If a stage breaks its memory limit under the other schedule.
    """
    changed = msgspec.structs.replace(plan, schedule=schedule)
    if schedule == plan.schedule or not plan.is_measured:
        return changed
    try:
        return with_prediction(changed)
    except ConfigError as error:
        raise ConfigError(
            f"plan must fit into memory with schedule {schedule!r}, which the loss requires, got "
            f"one made for {plan.schedule!r}. {error} Use "
            f"HeteroPipeStrategy(schedule={schedule!r}) to plan for that schedule."
        ) from None


def even_step_seconds(workload: Workload) -> float:
    """Return the simulated seconds of a step with an even split, the ranks in order and no
    recomputation: the plan that users write without a profile."""
    replicas = consecutive_replicas(len(workload.cluster.devices), workload.stages)
    even = even_split(len(workload.layers), workload.stages)
    return step_seconds(replace(workload, replicas=replicas), even)


def measured_plan(
    profile: RunProfile,
    constraints: PlanConstraints,
    warn: Callable[[str], None],
    log: Callable[[str], None] = lambda line: None,
) -> PipelinePlan:
    """Return the fastest plan for a profile.

    Args:
        profile: Measurements of the run.
        constraints: Parts of the plan that the user fixed.
        warn: Shows a warning to the user.
        log: Takes a line about the progress of the search.

    Raises:
        ConfigError: If no plan fits into memory, or the ranks do not divide into stages.
    """
    return plan_within_hosts(
        lambda cluster: _fastest_plan(profile, cluster, constraints, log),
        profile.cluster,
        profile.host_memory,
        warn,
    )


def _fastest_plan(
    profile: RunProfile,
    cluster: Cluster,
    constraints: PlanConstraints,
    log: Callable[[str], None],
) -> PipelinePlan:
    """Return the fastest plan on a cluster, which may have other limits than the profile's."""
    world = len(cluster.devices)
    workload = Workload(
        profile.layers,
        profile.step,
        cluster,
        # If the user fixed no replicas, the search replaces these.
        constraints.replicas
        or consecutive_replicas(world, world if world <= len(profile.layers) else 1),
        constraints.schedule,
        profile.microbatches,
        constraints.recompute,
    )
    result = search_plan(
        workload, constraints.stages, keep_order=constraints.replicas is not None, log=log
    )
    result = search_extra_in_flight(result)
    return with_prediction(
        PipelinePlan(
            replicas=result.workload.replicas,
            split=result.split,
            recompute=result.recompute,
            schedule=constraints.schedule.name,
            microbatches=profile.microbatches,
            extra_in_flight=result.workload.extra_in_flight,
            layers=profile.layers,
            step=profile.step,
            cluster=cluster,
        )
    )


def unmeasured_layers(names: Sequence[str], sizes: Sequence[int]) -> tuple[LayerProfile, ...]:
    """Return profiles of layers that were not measured: only names and parameter bytes."""
    return tuple(
        LayerProfile(name=name, parameter_bytes=size)
        for name, size in zip(names, sizes, strict=True)
    )


def unmeasured_plan(layers: tuple[LayerProfile, ...], replicas: Replicas) -> PipelinePlan:
    """Return a plan for a run without a profile: it splits by parameter bytes, as if all devices
    were equal."""
    sizes = [float(layer.parameter_bytes) for layer in layers]
    split = proportional_split(sizes, [1.0] * len(replicas[0]))
    return PipelinePlan(replicas=replicas, split=split, layers=layers)
