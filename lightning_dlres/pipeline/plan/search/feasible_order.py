"""Order of the stages in which some split fits into memory.

The search needs it if no split fits in the ratio order, and there are too many orders to try all.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from lightning_dlres.pipeline.plan.cost_model.costs import Workload
from lightning_dlres.pipeline.plan.cost_model.footprint import Footprint
from lightning_dlres.pipeline.plan.search.grouping import Slots


def feasible_order(workload: Workload, slots: Slots) -> Slots | None:
    """Return an order of the stages that has a plan; None if there is none.

    The search is exact. Stage by stage, it extends each set of used slots by one free slot. For
    each set it keeps the layers at which the next stage may begin. Slots with equal limits are
    used in their order, since they are interchangeable here. This keeps the number of sets small.

    Args:
        workload: The model and the devices; its replicas give only the number of stages.
        slots: The slots in any order; see `grouping`.
    """
    limits, num_layers = [_limit(workload, slot) for slot in slots], len(workload.layers)
    least = [Footprint(workload).least_bytes(stage) for stage in range(len(slots))]
    is_segment = ~np.tri(num_layers + 1, dtype=bool)

    def fits(stage: int, slot: int) -> NDArray[np.bool_]:
        """Return a mask over (first, stop) of the segments that fit into the slot's memory."""
        limit = limits[slot]
        return is_segment if limit is None else is_segment & (least[stage] <= limit)

    # Set of used slots -> layer at which the next stage begins -> one order of the set.
    reached: dict[frozenset[int], dict[int, tuple[int, ...]]] = {frozenset(): {0: ()}}
    for stage in range(len(slots)):
        grown: dict[frozenset[int], dict[int, tuple[int, ...]]] = {}
        for used, stops in reached.items():
            free = [slot for slot in range(len(slots)) if slot not in used]
            # The first free slot of each limit.
            for slot in {limits[slot]: slot for slot in reversed(free)}.values():
                mask, orders = fits(stage, slot), grown.setdefault(used | {slot}, {})
                for first, order in stops.items():
                    for stop in np.flatnonzero(mask[first]):
                        orders.setdefault(int(stop), (*order, slot))
        reached = grown
    for stops in reached.values():
        if num_layers in stops:
            return tuple(slots[slot] for slot in stops[num_layers])
    return None


def _limit(workload: Workload, slot: tuple[int, ...]) -> int | None:
    """Return the smallest memory limit of a slot's devices; None: no limit."""
    limits = (workload.cluster.devices[rank].memory_limit for rank in slot)
    return min((limit for limit in limits if limit is not None), default=None)
