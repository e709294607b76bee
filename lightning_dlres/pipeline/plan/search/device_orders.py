"""Search over the number of stages and the orders of devices, for the fastest split of each.

The search is a pure function of the profile. It solves an integer program (see `milp`) for every
distinct order of the devices, and each program looks only for plans faster than the best known one.
The search starts from the ratio order (see `order_by_ratio`) with a split in proportion to power.
So the result is never slower than this start in the simulator.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import combinations, islice, pairwise
from math import inf

from lightning_dlres.core.errors import ConfigError
from lightning_dlres.core.units import format_bytes
from lightning_dlres.pipeline.plan.cost_model.costs import Workload
from lightning_dlres.pipeline.plan.cost_model.extra_in_flight import (
    extended_workload,
    with_extra_in_flight,
)
from lightning_dlres.pipeline.plan.cost_model.footprint import smallest_limit
from lightning_dlres.pipeline.plan.cost_model.simulator import step_seconds
from lightning_dlres.pipeline.plan.search.feasible_order import feasible_order
from lightning_dlres.pipeline.plan.search.grouping import (
    Slots,
    distinct_orders,
    group_into_slots,
    order_by_ratio,
    replicas_of,
    slot_power,
    stage_counts,
)
from lightning_dlres.pipeline.plan.search.master_problem import GAP
from lightning_dlres.pipeline.plan.search.milp import SplitChoice, SplitProgram
from lightning_dlres.pipeline.plan.search.proportional import proportional_split

# Largest number of orders that are all searched. With more orders, the search begins with the ratio
# order, and exchanges two stages as long as this makes the step shorter.
_MAX_ORDERS = 200


@dataclass(frozen=True)
class SearchResult:
    """Fastest plan that the search found.

    Attributes:
        workload: The workload with its devices in the chosen order.
        split: Number of consecutive layers of each stage.
        recompute: Indices of the recomputed layers.
        seconds: Seconds of the simulated step.
        start_seconds: Seconds of the simulated step of the start: the ratio order with a split in
            proportion to power. Infinite if the start does not fit into memory.
        gap: Relative optimality gap: no plan of the searched orders is faster by more than this
            part of `seconds`.
    """

    workload: Workload
    split: tuple[int, ...]
    recompute: tuple[int, ...]
    seconds: float
    start_seconds: float
    gap: float


def search_plan(
    workload: Workload,
    stages: int | None = None,
    keep_order: bool = False,
    log: Callable[[str], None] = lambda line: None,
) -> SearchResult:
    """Return the fastest plan.

    Args:
        workload: The model and the devices. Its replicas are used only with `keep_order`.
        stages: Number of stages of a replica; None: the fastest of `stage_counts`.
        keep_order: Whether to keep the workload's replicas, and search only the split.
        log: Takes a line about the progress of the search.

    Raises:
        ConfigError: If no plan fits into memory (the message names the smallest limit that works),
            or the ranks do not divide into stages.
    """
    if keep_order:
        return _require(_search(workload, [workload.replicas]), [workload])
    world, layers = len(workload.cluster.devices), len(workload.layers)
    counts = (
        [stages]
        if stages is not None
        else [count for count in stage_counts(world) if count <= layers]
    )
    if not counts:
        raise ConfigError(
            f"The model must have at least {min(stage_counts(world))} layers for {world} ranks, "
            f"one for every stage of the shortest pipeline, got {layers}. Use fewer ranks, or "
            "stages=1."
        )
    best: SearchResult | None = None
    tried = []
    for count in counts:
        slots = group_into_slots(workload.cluster, count)
        ratio_order = start_order(workload, slots)
        variant = replace(workload, replicas=replicas_of(ratio_order))
        tried.append(variant)
        # One more than the maximum shows that there are too many.
        slot_orders = islice(distinct_orders(workload.cluster, ratio_order), _MAX_ORDERS + 1)
        orders = [replicas_of(order) for order in slot_orders]
        if len(orders) <= _MAX_ORDERS:
            result = _search(variant, orders, best)
        else:
            # Where memory limits differ, another order may fit if the ratio order does not. The
            # start in the ratio order then does not fit, so its time is infinite.
            result = _search(variant, orders[:1])
            if result is None and (order := feasible_order(variant, ratio_order)) is not None:
                result = _search(variant, [replicas_of(order)])
                result = replace(result, start_seconds=inf) if result is not None else None
            result = _exchange(result) if result is not None else None
        if result is not None:
            log(f"{count} stages: {result.seconds * 1e3:.1f} ms a step")
        best = result if best is None or (result and result.seconds < best.seconds) else best
    return _require(best, tried)


def search_extra_in_flight(found: SearchResult) -> SearchResult:
    """Return the fastest plan with or without one extra micro-batch in flight, in the order of
    devices that was found.

    The extra micro-batch hides waits for messages, so another split may be the fastest with it.

    Args:
        found: The fastest plan without it.
    """
    workload = with_extra_in_flight(found.workload, found.split, found.recompute)
    seconds = step_seconds(workload, found.split, found.recompute)
    known = replace(found, workload=workload, seconds=seconds)
    extended = extended_workload(found.workload)
    if extended is None:
        return known
    return _search(extended, [extended.replicas], known) or known


def start_order(workload: Workload, slots: Slots) -> Slots:
    """Return the slots in the ratio order for this workload; see `order_by_ratio`."""
    fastest = max(workload.cluster.devices, key=lambda device: device.power).kind
    work = sum(layer.forward[fastest] + layer.backward[fastest] for layer in workload.layers)
    gradients = sum(layer.gradient_bytes + sum(layer.shared.values()) for layer in workload.layers)
    return order_by_ratio(workload.cluster, slots, work * max(workload.microbatches, 1), gradients)


def start_split(workload: Workload) -> tuple[int, ...]:
    """Return the split in proportion to the power of each stage."""
    fastest = max(workload.cluster.devices, key=lambda device: device.power).kind
    work = [layer.forward[fastest] + layer.backward[fastest] for layer in workload.layers]
    slots = list(zip(*workload.replicas, strict=True))
    return proportional_split(work, [slot_power(workload.cluster, slot) for slot in slots])


def _search(
    workload: Workload,
    orders: Sequence[tuple[tuple[int, ...], ...]],
    known: SearchResult | None = None,
) -> SearchResult | None:
    """Return the fastest plan over some orders; None if none is faster than `known`.

    Args:
        workload: The model and the devices.
        orders: Replicas in each order. The first one is the order of the start.
        known: Best known plan; None if there is none.
    """
    programs = [SplitProgram(replace(workload, replicas=replicas)) for replicas in orders]
    start_seconds, best = inf, None
    limit = known.seconds if known is not None else inf
    choice: SplitChoice | None = None
    start = programs[0].evaluate(_stops(start_split(programs[0].workload)))
    if start is not None:
        start_seconds = start.seconds
        choice = programs[0].improve(_stops(start.split), start)
        best = programs[0]
    # The order with the smallest bound comes first: its result limits the search of the others.
    for program in sorted(programs, key=lambda p: p.segments.root_bound):
        target = min(limit, choice.seconds if choice is not None else inf) * (1 - GAP)
        if program.segments.root_bound >= target:
            continue
        better = _solve(program, target)
        if better is not None:
            choice, best = better, program
    if choice is None or best is None or choice.seconds >= limit:
        return None
    gap = GAP
    # After a time limit, only the lower bounds prove how much faster another plan could be.
    if not all(program.in_time for program in programs):
        least = min(program.segments.root_bound for program in programs)
        gap = max(GAP, 1 - least / choice.seconds)
    return SearchResult(
        best.workload, choice.split, choice.recompute, choice.seconds, start_seconds, gap
    )


def _solve(program: SplitProgram, target: float) -> SplitChoice | None:
    """Return the fastest plan with a step below the target, to within the gap; None if there is
    none.

    A quick first plan lowers the target, so the integer program has fewer segments.

    Args:
        program: The program of one order.
        target: Seconds of a step.
    """
    best = None
    start = program.evaluate(program.segments.root_stops)
    if start is not None:
        start = program.improve(_stops(start.split), start)
        if start.seconds < target:
            best, target = start, start.seconds * (1 - GAP)
    better = program.solve(target)
    return best if better is None else program.improve(_stops(better.split), better)


def _exchange(start: SearchResult) -> SearchResult:
    """Return the plan after exchanging pairs of stages as long as the step gets shorter."""
    best = start
    improved = True
    while improved:
        improved = False
        slots = tuple(zip(*best.workload.replicas, strict=True))
        for one, other in combinations(range(len(slots)), 2):
            exchanged = [*slots]
            exchanged[one], exchanged[other] = exchanged[other], exchanged[one]
            better = _search(best.workload, [replicas_of(tuple(exchanged))], best)
            if better is not None:
                best, improved = replace(better, start_seconds=start.start_seconds), True
                break
    return best


def _require(result: SearchResult | None, tried: Sequence[Workload]) -> SearchResult:
    """Return the result.

    Raises:
        ConfigError: If there is none; the message names the smallest memory limit that works.
    """
    if result is not None:
        return result
    least = min(smallest_limit(workload) for workload in tried)
    limits = {device.memory_limit for device in tried[0].cluster.devices}
    given = " and ".join(
        format_bytes(limit) for limit in sorted(x for x in limits if x is not None)
    )
    raise ConfigError(
        f"memory_limit must be at least {least} bytes ({format_bytes(least)}) on every device"
        f"{'' if len(limits) == 1 else ' (with the same limit on all)'}"
        f"{'' if tried[0].recompute != 'never' else ' without recomputation'}, got {given}: no "
        "plan fits. Use a larger limit, more devices, or more micro-batches."
    )


def _stops(split: Sequence[int]) -> list[int]:
    """Return `Segment.stop` of every stage."""
    stops = [0]
    for count in split:
        stops.append(stops[-1] + count)
    assert all(a < b for a, b in pairwise(stops))
    return stops[1:]
