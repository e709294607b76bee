"""Choice of one more micro-batch in flight than those that fill the pipeline.

Under plain 1F1B, two stages of equal speed exchange the same few micro-batches. Every late message
and every pause of one device then makes the other one idle. The simulator knows latency, but
neither delays nor pauses. So an extra micro-batch is taken wherever it fits into memory and does
not make the simulated step longer.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace

from lightning_dlres.pipeline.plan.cost_model.costs import Workload, layer_ranges
from lightning_dlres.pipeline.plan.cost_model.simulator import step_seconds

# Relative rounding error of simulated times.
_ROUNDING = 1e-9


def with_extra_in_flight(
    workload: Workload, split: Sequence[int], recompute: Collection[int]
) -> Workload:
    """Return the workload with one more micro-batch in flight, or unchanged.

    It is unchanged if the schedule has no use for it, if it does not fit into memory, or if the
    simulated step becomes longer.
    """
    more = replace(workload, extra_in_flight=workload.extra_in_flight + 1)
    if not any(more.in_flight(s) > workload.in_flight(s) for s in range(workload.stages)):
        return workload
    for stage, layers in enumerate(layer_ranges(split)):
        limit = workload.memory_limit(stage)
        if limit is not None and more.bound_bytes(stage, layers, recompute) > limit:
            return workload
    before = step_seconds(workload, split, recompute)
    slower = step_seconds(more, split, recompute) > before * (1 + _ROUNDING)
    return workload if slower else more
