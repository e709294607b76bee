"""Slack between stages under 1F1B: one micro-batch in flight beyond those that fill the pipeline.

Under plain 1F1B two stages of one speed hand the same few micro-batches back and forth, so every
message that is late, and every pause of a device, makes the other one idle. The simulator knows
latency, but neither of the others; slack is therefore taken wherever memory has room for it and the
simulator finds no loss."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace

from lightning_dlres.pipeline.plan.cost_model.costs import Workload, layer_ranges
from lightning_dlres.pipeline.plan.cost_model.simulator import step_seconds

_ROUNDING = 1e-9


def with_extra_in_flight(
    workload: Workload, split: Sequence[int], recompute: Collection[int]
) -> Workload:
    """Return the workload with a micro-batch more in flight, or as it is where that has no use, no
    room or a price."""
    more = replace(workload, extra_in_flight=workload.extra_in_flight + 1)
    if not any(more.in_flight(s) > workload.in_flight(s) for s in range(workload.stages)):
        return workload
    for stage, layers in enumerate(layer_ranges(split)):
        limit = workload.limit(stage)
        if limit is not None and more.bound_bytes(stage, layers, recompute) > limit:
            return workload
    before = step_seconds(workload, split, recompute)
    slower = step_seconds(more, split, recompute) > before * (1 + _ROUNDING)
    return workload if slower else more
