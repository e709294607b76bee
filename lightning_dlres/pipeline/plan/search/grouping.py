"""Grouping of devices of several kinds into replicas, and the orders of their stages.

A slot is a stage before the stages are ordered: one rank of each replica, which will hold the same
layers.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import pairwise

from lightning_dlres.core.errors import ConfigError
from lightning_dlres.pipeline.profile.cluster import Cluster

# One tuple of ranks per slot, in the order of replicas.
Slots = tuple[tuple[int, ...], ...]


def group_into_slots(cluster: Cluster, stages: int) -> Slots:
    """Return the slots of a cluster for this many stages.

    Devices of similar power share a slot, since they get the same layers. Where possible, a replica
    gets devices of the same host.

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
    num_replicas = world // stages
    by_power = sorted(range(world), key=lambda rank: (-cluster.devices[rank].power, rank))
    replicas: list[list[int]] = [[] for _ in range(num_replicas)]
    for first in range(0, world, num_replicas):
        free = by_power[first : first + num_replicas]
        for replica in replicas:
            # Prefer the host that most of the replica's ranks are on, then the smallest rank.
            hosts = [cluster.devices[rank].host for rank in replica]
            rank = max(free, key=lambda r: (hosts.count(cluster.devices[r].host), -r))
            free.remove(rank)
            replica.append(rank)
    slots = tuple(zip(*replicas, strict=True))
    # On equal devices, the stages are then in the order of ranks.
    return tuple(sorted(slots, key=min))


def stage_counts(world: int) -> list[int]:
    """Return the numbers of stages to choose from, smallest first.

    With several devices there are at least two stages, since users want a pipeline so that each
    device holds only a part of the model. They must request a single stage with `stages=1`.
    """
    return [n for n in range(min(2, world), world + 1) if world % n == 0]


def communication_costs(cluster: Cluster, slots: Slots, gradient_bytes: int) -> list[float]:
    """Return the cost of synchronising each slot's gradients over the replicas.

    The cost is the seconds in which the slowest link of the slot carries these gradients once. It
    leaves out the factor of a ring all-reduce, which is the same for all slots. Stages of equal
    compute time have sizes in proportion to their power, so the gradients are divided in this
    proportion. The cost is 0 with a single replica.
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

    The first stage ends its backward last. So it has the least time to hide its gradient
    synchronisation, which should be cheap there.

    Args:
        cluster: The devices.
        slots: The slots in any order.
        work: Compute seconds of the whole model, for one batch on a device of power 1.
        gradient_bytes: Bytes of the whole model's gradients.
    """
    costs = communication_costs(cluster, slots, gradient_bytes)
    # The layers will be divided so that all slots compute for the same time.
    seconds = work / sum(slot_power(cluster, slot) for slot in slots)
    ratios = [seconds / cost if cost > 0 else math.inf for cost in costs]
    order = sorted(range(len(slots)), key=lambda index: (-ratios[index], index))
    return tuple(slots[index] for index in order)


def slot_power(cluster: Cluster, slot: Sequence[int]) -> float:
    """Return the power of a slot, which is that of its slowest device."""
    return min(cluster.devices[rank].power for rank in slot)


def distinct_orders(cluster: Cluster, slots: Slots) -> Iterator[Slots]:
    """Yield every order of the slots, the given one first.

    Of several orders that differ only in equal devices, it yields one.
    """
    seen = set()
    for order in _arrangements(_exchange_classes(cluster, slots)):
        arranged = tuple(slots[index] for index in order)
        signature = _signature(cluster, arranged)
        if signature not in seen:
            seen.add(signature)
            yield arranged


def _arrangements(
    classes: Sequence[int], chosen: tuple[int, ...] = ()
) -> Iterator[tuple[int, ...]]:
    """Yield the orders of slot indices in which the slots of one class keep their order.

    So a dozen equal slots have one order, not half a billion.

    Args:
        classes: Class of every slot; see `_exchange_classes`.
        chosen: Indices at the beginning of the order.
    """
    if len(chosen) == len(classes):
        yield chosen
    tried = set()
    for index, slot_class in enumerate(classes):
        if index not in chosen and slot_class not in tried:
            tried.add(slot_class)
            yield from _arrangements(classes, (*chosen, index))


def _exchange_classes(cluster: Cluster, slots: Slots) -> list[int]:
    """Return the class of every slot: the index of the first slot that it is exchangeable with."""
    classes: list[int] = []
    for index, slot in enumerate(slots):
        exchangeable = (c for c in classes if _are_exchangeable(cluster, slots, slots[c], slot))
        classes.append(next(exchangeable, index))
    return classes


def _are_exchangeable(
    cluster: Cluster, slots: Slots, one: tuple[int, ...], other: tuple[int, ...]
) -> bool:
    """Return whether two slots have equal devices, equal rings and equal links to other slots."""
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
    """Return the links of the ring over which a slot's gradients are all-reduced."""
    ring = pairwise([*slot, slot[0]]) if len(slot) > 1 else ()
    return tuple(_link(cluster, a, b) for a, b in ring)


def _link(cluster: Cluster, a: int, b: int) -> tuple[float, float]:
    """Return (latency in seconds, bytes per second) of the link between two ranks."""
    link = cluster.link(a, b)
    return link.latency, link.bytes_per_second


def replicas_of(slots: Slots) -> tuple[tuple[int, ...], ...]:
    """Return the ranks of every replica in stage order."""
    return tuple(zip(*slots, strict=True))
