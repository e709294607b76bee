"""Grouping of devices of several kinds into replicas, and the orders of their stages.

A slot is one stage of all replicas before the stages are ordered: one rank of each replica.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import pairwise

from lightning_dlres.core.errors import ConfigError
from lightning_dlres.pipeline.profile.cluster import Cluster

Slots = tuple[tuple[int, ...], ...]


def group(cluster: Cluster, stages: int) -> Slots:
    """Return the slots of a cluster for this many stages.

    Devices of similar power share a slot, since a stage has the same layers on all replicas. Among
    these, each replica takes devices of one host where possible.

    Raises:
        ConfigError: If the ranks do not divide into replicas of this many stages.
    """
    world = len(cluster.devices)
    if stages < 1 or world % stages:
        divisors = [d for d in range(1, world + 1) if world % d == 0]
        raise ConfigError(
            f"stages must divide the number of ranks ({world}), got {stages}. Use one of "
            f"{divisors}."
        )
    count = world // stages
    ranked = sorted(range(world), key=lambda rank: (-cluster.devices[rank].power, rank))
    replicas: list[list[int]] = [[] for _ in range(count)]
    for first in range(0, world, count):
        free = ranked[first : first + count]
        for replica in replicas:
            hosts = [cluster.devices[rank].host for rank in replica]
            rank = max(free, key=lambda r: (hosts.count(cluster.devices[r].host), -r))
            free.remove(rank)
            replica.append(rank)
    slots = tuple(zip(*replicas, strict=True))
    # With equal devices, the stages follow the order of ranks.
    return tuple(sorted(slots, key=min))


def stage_counts(world: int) -> list[int]:
    """Return the numbers of stages to choose from, smallest first.

    Several devices make at least two stages: a user asks for a pipeline so that each device holds a
    part of the model only. One stage on all devices must be requested with `stages=1`.
    """
    return [n for n in range(min(2, world), world + 1) if world % n == 0]


def communication_costs(cluster: Cluster, slots: Slots, gradient_bytes: int) -> list[float]:
    """Return the seconds in which each slot's gradients are synchronised over the replicas.

    Stages of equal compute time have sizes in proportion to their power, so the gradients are
    divided in this proportion. The cost is 0 with a single replica.
    """
    powers = [slot_power(cluster, slot) for slot in slots]
    costs = []
    for slot, power in zip(slots, powers, strict=True):
        ring = [cluster.link(a, b) for a, b in zip(slot, [*slot[1:], slot[0]], strict=True)]
        bandwidth = min(link.bytes_per_second for link in ring)
        size = gradient_bytes * power / sum(powers)
        costs.append(size / bandwidth if len(slot) > 1 else 0.0)
    return costs


def order_by_ratio(cluster: Cluster, slots: Slots, work: float, gradient_bytes: int) -> Slots:
    """Return the slots in the ratio order: largest ratio of compute time to communication cost
    first.

    The first stage ends its backward last, so it has the least time left to hide its gradient
    synchronisation.

    Args:
        cluster: The devices.
        slots: The slots in any order.
        work: Seconds of the whole model on a device of power 1.
        gradient_bytes: Bytes of the whole model's gradients.
    """
    costs = communication_costs(cluster, slots, gradient_bytes)
    seconds = work / sum(slot_power(cluster, slot) for slot in slots)
    ratios = [seconds / cost if cost > 0 else math.inf for cost in costs]
    order = sorted(range(len(slots)), key=lambda index: (-ratios[index], index))
    return tuple(slots[index] for index in order)


def slot_power(cluster: Cluster, slot: Sequence[int]) -> float:
    """Return the power of a slot, which is that of its slowest device."""
    return min(cluster.devices[rank].power for rank in slot)


def distinct_orders(cluster: Cluster, slots: Slots) -> Iterator[Slots]:
    """Yield every order of the slots, the given one first. Orders that differ only in equal devices
    count once."""
    seen = set()
    for order in _arrangements(_kinds_of_slots(cluster, slots)):
        arranged = tuple(slots[index] for index in order)
        signature = _signature(cluster, arranged)
        if signature not in seen:
            seen.add(signature)
            yield arranged


def _arrangements(kinds: Sequence[int], chosen: tuple[int, ...] = ()) -> Iterator[tuple[int, ...]]:
    """Yield the orders of indices in which those of one kind keep their order: a dozen equal slots
    have one order, not half a billion."""
    if len(chosen) == len(kinds):
        yield chosen
    tried = set()
    for index, kind in enumerate(kinds):
        if index not in chosen and kind not in tried:
            tried.add(kind)
            yield from _arrangements(kinds, (*chosen, index))


def _kinds_of_slots(cluster: Cluster, slots: Slots) -> list[int]:
    """Return for every slot the index of the first slot that it can be exchanged with."""
    kinds: list[int] = []
    for index, slot in enumerate(slots):
        same = (k for k in kinds if _exchangeable(cluster, slots, slots[k], slot))
        kinds.append(next(same, index))
    return kinds


def _exchangeable(
    cluster: Cluster, slots: Slots, one: tuple[int, ...], other: tuple[int, ...]
) -> bool:
    """Return whether two slots have equal devices and equal links to all other slots."""
    others = [slot for slot in slots if slot not in (one, other)]

    def properties(slot: tuple[int, ...]) -> object:
        links = [[_link(cluster, a, b) for a, b in zip(slot, x, strict=True)] for x in others]
        return _devices(cluster, slot), _ring(cluster, slot), links

    return properties(one) == properties(other)


def _signature(cluster: Cluster, slots: Slots) -> tuple[object, ...]:
    """Return a key that is equal for orders with equal devices and equal links."""
    replicas = list(zip(*slots, strict=True))
    neighbours = tuple(_link(cluster, a, b) for replica in replicas for a, b in pairwise(replica))
    return (
        tuple(_devices(cluster, slot) for slot in slots),
        neighbours,
        tuple(_ring(cluster, slot) for slot in slots),
    )


def _devices(cluster: Cluster, slot: Sequence[int]) -> tuple[tuple[int, int | None], ...]:
    """Return the kind and the memory limit of each device of a slot."""
    return tuple((cluster.devices[r].kind, cluster.devices[r].memory_limit) for r in slot)


def _ring(cluster: Cluster, slot: Sequence[int]) -> tuple[tuple[float, float], ...]:
    """Return the links of the ring in which a slot's gradients are summed."""
    ring = pairwise([*slot, slot[0]]) if len(slot) > 1 else ()
    return tuple(_link(cluster, a, b) for a, b in ring)


def _link(cluster: Cluster, a: int, b: int) -> tuple[float, float]:
    link = cluster.link(a, b)
    return link.latency, link.bytes_per_second


def replicas_of(slots: Slots) -> tuple[tuple[int, ...], ...]:
    """Return the ranks of every replica in stage order."""
    return tuple(zip(*slots, strict=True))
