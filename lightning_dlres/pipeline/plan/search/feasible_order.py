"""Order of the stages in which some split fits into memory.

The search needs it if there are too many orders to try each, and the ratio order does not fit.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from lightning_dlres.pipeline.plan.cost_model.costs import Workload
from lightning_dlres.pipeline.plan.cost_model.footprint import Footprint
from lightning_dlres.pipeline.plan.search.grouping import Slots


def feasible_order(workload: Workload, slots: Slots) -> Slots | None:
    """Return an order of the stages that has a plan; None if there is none.

    The search is exact. It grows sets of slots stage by stage, and keeps for each set the layers
    that its last stage may stop before. Slots of the same limit are taken in their order, so there
    are few sets.
    """
    limits, count = [_limit(workload, slot) for slot in slots], len(workload.layers)
    least = [Footprint(workload).least_bytes(stage) for stage in range(len(slots))]
    exists = ~np.tri(count + 1, dtype=bool)

    def fits(stage: int, slot: int) -> NDArray[np.bool_]:
        limit = limits[slot]
        return exists if limit is None else exists & (least[stage] <= limit)

    # Set of slots -> layer that its last stage stops before -> one order of the set.
    reached: dict[frozenset[int], dict[int, tuple[int, ...]]] = {frozenset(): {0: ()}}
    for stage in range(len(slots)):
        grown: dict[frozenset[int], dict[int, tuple[int, ...]]] = {}
        for used, stops in reached.items():
            free = [slot for slot in range(len(slots)) if slot not in used]
            for slot in {limits[slot]: slot for slot in reversed(free)}.values():
                matrix, orders = fits(stage, slot), grown.setdefault(used | {slot}, {})
                for first, order in stops.items():
                    for stop in np.flatnonzero(matrix[first]):
                        orders.setdefault(int(stop), (*order, slot))
        reached = grown
    for stops in reached.values():
        if count in stops:
            return tuple(slots[slot] for slot in stops[count])
    return None


def _limit(workload: Workload, slot: tuple[int, ...]) -> int | None:
    """Return the smallest memory limit of a slot's devices; None: no limit."""
    limits = (workload.cluster.devices[rank].memory_limit for rank in slot)
    return min((limit for limit in limits if limit is not None), default=None)
