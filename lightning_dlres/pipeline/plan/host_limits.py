"""Memory limits of hosts: the CPU ranks of one host share its memory."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping

import msgspec

from lightning_dlres.core.errors import ConfigError
from lightning_dlres.core.units import format_bytes
from lightning_dlres.pipeline.plan.plan import PipelinePlan
from lightning_dlres.pipeline.profile.cluster import Cluster


def plan_within_hosts(
    make_plan: Callable[[Cluster], PipelinePlan],
    cluster: Cluster,
    host_memory: Mapping[str, int],
    warn: Callable[[str], None],
) -> PipelinePlan:
    """Return a plan that keeps the ranks of each host within the host's memory.

    If the ranks of a host would need more than it has, the plan is made again. Every rank then gets
    an equal part of its host's memory as its limit. If no plan meets these limits, a warning is
    shown and the first plan is returned.

    Args:
        make_plan: Makes the plan for a cluster.
        cluster: The devices. Devices with a memory limit of their own are left out of the sums.
        host_memory: Bytes available for the ranks of each host, by name. Hosts of unknown size have
            no entry.
        warn: Shows a warning to the user.

    Raises:
        ConfigError: If `make_plan` finds no plan even without the limits of hosts.
    """
    plan = make_plan(cluster)
    peaks_by_host = _host_peaks(plan, cluster)
    # A host of unknown size never counts as overfull.
    overfull = [host for host, peak in peaks_by_host.items() if peak > host_memory.get(host, peak)]
    if not overfull:
        return plan
    ranks = Counter(device.host for device in cluster.devices if device.memory_limit is None)
    # A host may have no such rank: all have limits of their own, or none is in the cluster.
    rank_limits = {host: size // ranks[host] for host, size in host_memory.items() if ranks[host]}
    devices = tuple(
        msgspec.structs.replace(device, memory_limit=rank_limits.get(device.host))
        if device.memory_limit is None
        else device
        for device in cluster.devices
    )
    try:
        return make_plan(msgspec.structs.replace(cluster, devices=devices))
    except ConfigError:
        for host in overfull:
            warn(
                f"dlres: the plan needs {format_bytes(peaks_by_host[host])} of memory on host "
                f"{host}, which has {format_bytes(host_memory[host])} for its ranks. No plan fits "
                "if each rank gets an equal part of that. The run may swap or be killed. Use more "
                "micro-batches, more hosts, or memory_limit with a size for every rank."
            )
        return plan


def _host_peaks(plan: PipelinePlan, cluster: Cluster) -> Counter[str]:
    """Return the summed peak bytes of each host's ranks, without ranks that have a limit of their
    own."""
    workload, peaks = plan.workload(), Counter[str]()
    for replica in plan.replicas:
        for stage, rank in enumerate(replica):
            device = cluster.devices[rank]
            if device.memory_limit is None:
                layers = plan.layers_of(stage)
                peaks[device.host] += workload.peak_bytes(stage, layers, plan.recompute)
    return peaks
