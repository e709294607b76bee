"""Decision on one extra micro-batch in flight, besides those that fill the pipeline.

Plain 1F1B keeps just enough micro-batches in flight to fill the pipeline. Two neighbouring stages
of equal speed then have no work in reserve: a late message or a pause of one device leaves the
other idle. The simulator models the latency of links, but no late messages and no pauses. So the
extra micro-batch is added wherever it fits into memory and does not make the simulated step longer.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace

from lightning_dlres.pipeline.plan.cost_model.costs import Workload, layer_ranges
from lightning_dlres.pipeline.plan.cost_model.simulator import step_seconds

# Relative rounding error of simulated times; a smaller increase does not count as a slowdown.
_ROUNDING = 1e-9


def with_extra_in_flight(
    workload: Workload, split: Sequence[int], recompute: Collection[int]
) -> Workload:
    """Return the workload with one extra micro-batch in flight, or unchanged.

    It is unchanged if the schedule ignores the extra micro-batch, if the micro-batch does not fit
    into memory, or if the simulated step becomes longer.
    """
    extended = extended_workload(workload)
    if extended is None:
        return workload
    for stage, layers in enumerate(layer_ranges(split)):
        limit = workload.memory_limit(stage)
        if limit is not None and extended.bound_bytes(stage, layers, recompute) > limit:
            return workload
    seconds = step_seconds(workload, split, recompute)
    is_slower = step_seconds(extended, split, recompute) > seconds * (1 + _ROUNDING)
    return workload if is_slower else extended


def extended_workload(workload: Workload) -> Workload | None:
    """Return the workload with one extra micro-batch in flight; None if the schedule ignores it."""
    extended = replace(workload, extra_in_flight=workload.extra_in_flight + 1)
    is_used = any(extended.in_flight(s) > workload.in_flight(s) for s in range(workload.stages))
    return extended if is_used else None
