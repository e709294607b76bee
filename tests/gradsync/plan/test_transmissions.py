"""Planned messages never collide, keep free links busy, and lose no transfer."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_dlres.gradsync.plan.transmissions import (
    MESSAGE_BYTES,
    Transfer,
    Transmission,
    TransmissionPlanner,
    message_bytes_for,
)


def transfers(*rows: tuple[int, int, int]) -> list[Transfer]:
    """Return transfers of one step from (source, destination, bytes); units are numbered."""
    return [
        Transfer(source, destination, (0, unit, 0), nbytes)
        for unit, (source, destination, nbytes) in enumerate(rows)
    ]


@settings(deadline=None)
@given(st.integers(2, 5), st.integers(0, 60), st.integers(1, 300), st.randoms())
def test_messages_never_collide_and_nothing_is_lost(
    world_size: int, count: int, message_bytes: int, rng: random.Random
) -> None:
    planner = TransmissionPlanner(message_bytes)
    pending = []
    for unit in range(count):
        source, destination = rng.sample(range(world_size), 2)
        pending.append(
            Transfer(source, destination, (unit // 20, unit, rng.randrange(2)), rng.randrange(200))
        )
    expected = {(t.source, t.destination, *t.entry) for t in pending}
    sizes = {t.entry[1]: t.nbytes for t in pending}
    delivered: list[tuple[int, ...]] = []
    under_way: list[Transmission] = []
    while pending or under_way or not planner.is_idle:
        ready, pending = pending[:7], pending[7:]
        planner.add(ready)
        under_way += planner.next_transmissions()
        sources = [message.source for message in under_way]
        destinations = [message.destination for message in under_way]
        assert len(set(sources)) == len(sources)
        assert len(set(destinations)) == len(destinations)
        # All transfers but the last one stay below the limit.
        for message in under_way:
            assert len({step for step, _, _ in message.entries}) == 1
            assert sum(sizes[unit] for _, unit, _ in message.entries[:-1]) < message_bytes
        if under_way:
            message = under_way.pop(rng.randrange(len(under_way)))
            planner.finish(message.source, message.destination)
            delivered += [
                (message.source, message.destination, *entry) for entry in message.entries
            ]
    assert len(delivered) == len(expected)
    assert set(delivered) == expected


@pytest.mark.parametrize(
    ("bandwidths", "nbytes"),
    [
        ([125e6, 125e6], MESSAGE_BYTES),
        ([25e6, 6.25e6, 25e6], 62_500),
        ([1e3, 125e6], 32 << 10),
    ],
)
def test_messages_are_small_on_slow_links(bandwidths: list[float], nbytes: int) -> None:
    assert message_bytes_for(bandwidths) == nbytes


def test_both_directions_of_a_link_are_used_at_once() -> None:
    planner = TransmissionPlanner()
    planner.add(
        [
            Transfer(0, 1, (0, 0, 0), 10),
            Transfer(1, 0, (0, 1, 0), 10),
            Transfer(0, 1, (0, 2, 0), 10),
        ]
    )
    assert planner.next_transmissions() == [
        Transmission(0, 1, ((0, 0, 0), (0, 2, 0))),
        Transmission(1, 0, ((0, 1, 0),)),
    ]
    assert planner.next_transmissions() == []


def test_the_largest_queue_goes_first() -> None:
    planner = TransmissionPlanner()
    planner.add(
        [
            Transfer(0, 1, (0, 0, 0), 10),
            Transfer(0, 2, (0, 1, 0), 20),
            Transfer(1, 2, (0, 2, 0), 15),
        ]
    )
    assert [(b.source, b.destination) for b in planner.next_transmissions()] == [(0, 2)]
    planner.finish(0, 2)
    assert [(b.source, b.destination) for b in planner.next_transmissions()] == [(1, 2), (0, 1)]
