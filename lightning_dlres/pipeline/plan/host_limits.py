"""Ranks on the CPU share their host's memory: not each has a limit, but all of them together."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping

import msgspec

from lightning_dlres.core.errors import ConfigError
from lightning_dlres.core.units import format_bytes
from lightning_dlres.pipeline.plan.plan import PipelinePlan
from lightning_dlres.pipeline.profile.cluster import Cluster


def within_hosts(
    make: Callable[[Cluster], PipelinePlan],
    cluster: Cluster,
    memory: Mapping[str, int],
    warn: Callable[[str], None],
) -> PipelinePlan:
    """Return the plan for a cluster; where the ranks of a host would hold more than it has, the one
    for equal parts of that, and with a warning the first one where there is none.

    Args:
        make: plans.
        cluster: the devices; those with a limit of their own take no part.
        memory: bytes by host, as far as they are known.
        warn: shows a warning to the user.
    """
    plan = make(cluster)
    held = _held(plan, cluster)
    crowded = [host for host, total in held.items() if total > memory.get(host, total)]
    if not crowded:
        return plan
    ranks = Counter(device.host for device in cluster.devices if device.memory_limit is None)
    parts = {host: size // ranks[host] for host, size in memory.items()}
    devices = tuple(
        msgspec.structs.replace(device, memory_limit=parts.get(device.host))
        if device.memory_limit is None
        else device
        for device in cluster.devices
    )
    try:
        return make(msgspec.structs.replace(cluster, devices=devices))
    except ConfigError:
        for host in crowded:
            warn(
                f"dlres: the plan takes {format_bytes(held[host])} of memory on {host}, which has "
                f"{format_bytes(memory[host])} for it, and a part for each rank that is no larger "
                "than the others' is not enough. The run may swap or be ended. Try more "
                "micro-batches, more hosts, or memory_limit with a size for every rank."
            )
        return plan


def _held(plan: PipelinePlan, cluster: Cluster) -> Counter[str]:
    """Return the planned peaks of each host's ranks without a limit of their own, added up."""
    workload, found = plan.workload(), Counter[str]()
    for replica in plan.replicas:
        for stage, rank in enumerate(replica):
            device = cluster.devices[rank]
            if device.memory_limit is None:
                layers = plan.layers_of(stage)
                found[device.host] += workload.peak_bytes(stage, layers, plan.recompute)
    return found
