"""Task graphs of the units of a plan, as their codecs need them."""

from __future__ import annotations

from collections.abc import Mapping

from lightning_dlres.codecs.gradient import GradientCodec
from lightning_dlres.gradsync.plan.graph import Graph, task_graph
from lightning_dlres.gradsync.plan.hosts import host_graph
from lightning_dlres.gradsync.plan.plan import RAW, SyncPlan
from lightning_dlres.gradsync.plan.units import SyncUnit


def unit_graph(
    plan: SyncPlan, unit: SyncUnit, rank: int, codecs: Mapping[str, GradientCodec]
) -> Graph:
    """Return a rank's tasks for a unit.

    Args:
        plan: Plan of the unit.
        unit: The unit.
        rank: Rank whose tasks are returned.
        codecs: Codecs of the plan by name.

    Raises:
        ConfigError: If the codec does not suit the topology.
    """
    encodes_own = unit.codec != RAW and codecs[unit.codec].transforms_gradient
    if plan.hosts:
        return host_graph(plan.topology, plan.hosts, rank, unit.owner, encodes_own=encodes_own)
    return task_graph(plan.topology, rank, plan.world_size, unit.owner, encodes_own=encodes_own)
