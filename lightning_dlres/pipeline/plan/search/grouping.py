"""Replicas out of devices of several kinds, and the order of their stages (Method E, E1,
E3, E4)."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import pairwise

from lightning_dlres.core.errors import ConfigError
from lightning_dlres.pipeline.profile.cluster import Cluster

Slots = tuple[tuple[int, ...], ...]


def group(cluster: Cluster, stages: int) -> Slots:
    """Return for every stage, not ordered yet, the rank of each replica.

    Devices of like power share a stage, since its layers are the same on all replicas; among those,
    a replica's devices are taken from one host where that is possible.

    Raises:
        ConfigError: the ranks do not divide into replicas of this many stages.
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
    # Where all devices are alike, the stages follow the ranks.
    return tuple(sorted(slots, key=min))


def stage_counts(world: int) -> list[int]:
    """Return the numbers of stages to choose from, least first.

    Several devices make two stages or more: that every device holds a part of the model only is
    what a pipeline is asked for, and one stage on all of them stays a wish to be said."""
    return [n for n in range(min(2, world), world + 1) if world % n == 0]


def communication_costs(cluster: Cluster, slots: Slots, gradient_bytes: int) -> list[float]:
    """Return the seconds in which each device kind's gradients reach the other replicas (E3).

    Under equal compute time (E2) a stage's size is proportional to its power, and so is what it
    sends; 0 with a single replica."""
    powers = [slot_power(cluster, slot) for slot in slots]
    costs = []
    for slot, power in zip(slots, powers, strict=True):
        ways = [cluster.link(a, b) for a, b in zip(slot, [*slot[1:], slot[0]], strict=True)]
        bandwidth = min(way.bytes_per_second for way in ways)
        size = gradient_bytes * power / sum(powers)
        costs.append(size / bandwidth if len(slot) > 1 else 0.0)
    return costs


def order_by_ratio(cluster: Cluster, slots: Slots, work: float, gradient_bytes: int) -> Slots:
    """Return the stages in the order of E4: largest ratio of compute time to communication cost
    first.

    The first stage ends its backward last, and has the least time left to hide its synchronisation.

    Args:
        work: seconds of the whole model on a device of power 1.
    """
    costs = communication_costs(cluster, slots, gradient_bytes)
    seconds = work / sum(slot_power(cluster, slot) for slot in slots)
    ratios = [seconds / cost if cost > 0 else math.inf for cost in costs]
    order = sorted(range(len(slots)), key=lambda index: (-ratios[index], index))
    return tuple(slots[index] for index in order)


def slot_power(cluster: Cluster, slot: Sequence[int]) -> float:
    """Return the power of a stage: that of its slowest device."""
    return min(cluster.devices[rank].power for rank in slot)


def distinct_orders(cluster: Cluster, slots: Slots) -> Iterator[Slots]:
    """Yield every order of the stages, the given one first; orders that differ only in devices that
    are alike in every respect count once."""
    seen = set()
    for order in _arrangements(_likeness(cluster, slots)):
        arranged = tuple(slots[index] for index in order)
        signature = _signature(cluster, arranged)
        if signature not in seen:
            seen.add(signature)
            yield arranged


def _arrangements(kinds: Sequence[int], chosen: tuple[int, ...] = ()) -> Iterator[tuple[int, ...]]:
    """Yield the orders of things of which those of one kind keep their order: a dozen devices that
    are alike have one order, not half a billion."""
    if len(chosen) == len(kinds):
        yield chosen
    tried = set()
    for index, kind in enumerate(kinds):
        if index not in chosen and kind not in tried:
            tried.add(kind)
            yield from _arrangements(kinds, (*chosen, index))


def _likeness(cluster: Cluster, slots: Slots) -> list[int]:
    """Return for every stage the first one that could take its place without anyone noticing."""
    found: list[int] = []
    for index, slot in enumerate(slots):
        alike = (k for k in found if _exchangeable(cluster, slots, slots[k], slot))
        found.append(next(alike, index))
    return found


def _exchangeable(
    cluster: Cluster, slots: Slots, one: tuple[int, ...], other: tuple[int, ...]
) -> bool:
    others = [slot for slot in slots if slot not in (one, other)]

    def seen_from(slot: tuple[int, ...]) -> object:
        ways = [[_way(cluster, a, b) for a, b in zip(slot, x, strict=True)] for x in others]
        return _devices(cluster, slot), _ring(cluster, slot), ways

    return seen_from(one) == seen_from(other)


def _signature(cluster: Cluster, slots: Slots) -> tuple[object, ...]:
    replicas = list(zip(*slots, strict=True))
    neighbours = tuple(_way(cluster, a, b) for replica in replicas for a, b in pairwise(replica))
    return (
        tuple(_devices(cluster, slot) for slot in slots),
        neighbours,
        tuple(_ring(cluster, slot) for slot in slots),
    )


def _devices(cluster: Cluster, slot: Sequence[int]) -> tuple[tuple[int, int | None], ...]:
    return tuple((cluster.devices[r].kind, cluster.devices[r].memory_limit) for r in slot)


def _ring(cluster: Cluster, slot: Sequence[int]) -> tuple[tuple[float, float], ...]:
    """Return the ways that a stage's gradients take."""
    ring = pairwise([*slot, slot[0]]) if len(slot) > 1 else ()
    return tuple(_way(cluster, a, b) for a, b in ring)


def _way(cluster: Cluster, a: int, b: int) -> tuple[float, float]:
    link = cluster.link(a, b)
    return link.latency, link.bytes_per_second


def replicas_of(slots: Slots) -> tuple[tuple[int, ...], ...]:
    """Return the ranks of every replica in stage order."""
    return tuple(zip(*slots, strict=True))
