"""Memory limits of hosts: ranks on the CPU of one host share its memory."""

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
    """Return the plan for a cluster whose ranks share the memory of their hosts.

    If the ranks of a host would hold more than it has, every rank gets an equal part of its host's
    memory as its limit, and the plan is made again. If no plan fits, a warning is shown and the
    first plan is returned.

    Args:
        make: Makes the plan for a cluster.
        cluster: The devices. Those with a memory limit of their own are left out.
        memory: Bytes by host, for hosts where they are known.
        warn: Shows a warning to the user.
    """
    plan = make(cluster)
    held = _host_peaks(plan, cluster)
    overfull = [host for host, total in held.items() if total > memory.get(host, total)]
    if not overfull:
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
        for host in overfull:
            warn(
                f"dlres: the plan needs {format_bytes(held[host])} of memory on {host}, which has "
                f"{format_bytes(memory[host])} for it. No plan fits if each rank gets an equal "
                "part of that. The run may swap or be killed. Use more micro-batches, more "
                "hosts, or memory_limit with a size for every rank."
            )
        return plan


def _host_peaks(plan: PipelinePlan, cluster: Cluster) -> Counter[str]:
    """Return the sum of planned peak bytes, by host, of ranks without a limit of their own."""
    workload, peaks = plan.workload(), Counter[str]()
    for replica in plan.replicas:
        for stage, rank in enumerate(replica):
            device = cluster.devices[rank]
            if device.memory_limit is None:
                layers = plan.layers_of(stage)
                peaks[device.host] += workload.peak_bytes(stage, layers, plan.recompute)
    return peaks
