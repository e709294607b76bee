"""Payloads wait for others, but not for long."""

from __future__ import annotations

import math
import queue
from typing import Any

import pytest
import torch

from lightning_dlres.gradsync.execute import transmitters
from lightning_dlres.gradsync.execute.states import CodecStates
from lightning_dlres.gradsync.execute.transmitters import (
    COALESCE_SECONDS,
    MESSAGE_BYTES,
    ReadySend,
    WaitingSends,
)
from lightning_dlres.gradsync.execute.unit_run import StepOptions, UnitRun, UnitTasks
from lightning_dlres.gradsync.plan.graph import parameter_server
from lightning_dlres.gradsync.plan.units import SyncUnit
from tests.gradsync.execute.test_broken_messages import lone_rank
from tests.support.sync_tables import unpacked
from tests.support.waiting import wait_until


class Clock:
    """Clock whose time, in seconds, a test sets."""

    def __init__(self) -> None:
        self.now = 5.0

    def __call__(self) -> float:
        return self.now


def send(destination: int, nbytes: int) -> ReadySend:
    """Return a ready payload of rank 3, which sends its gradient to the owner of a unit."""
    count = nbytes // 4
    unit = SyncUnit(index=0, gradient="a", start=0, stop=count, codec="raw", owner=destination)
    run = UnitRun(
        tasks=UnitTasks(unit, parameter_server(3, 4, destination)),
        codec=None,
        gradient=torch.zeros(count),
        options=StepOptions(step=0, rank=3, world_size=4),
        states=CodecStates(),
    )
    # Task 0 encodes the gradient, and task 1 sends it.
    return ReadySend(run, 1)


def test_payloads_wait_up_to_a_size() -> None:
    sends = WaitingSends(now=Clock())
    assert not sends.is_full()
    assert sends.add(send(0, MESSAGE_BYTES // 2))
    assert not sends.add(send(2, MESSAGE_BYTES // 2))
    assert not sends.is_full()
    sends.add(send(0, MESSAGE_BYTES // 2))
    assert sends.is_full()
    # All leave together.
    assert [item.destination for item in sends.take()] == [0, 2, 0]
    assert sends.take() == []
    assert sends.add(send(0, MESSAGE_BYTES // 2))
    assert not sends.is_full()


def test_the_oldest_payload_waits_up_to_a_time() -> None:
    clock = Clock()
    sends = WaitingSends(now=clock)
    for _ in range(2):
        assert sends.seconds_left() == math.inf
        sends.add(send(0, 400))
        clock.now += 0.6 * COALESCE_SECONDS
        sends.add(send(1, 400))
        assert sends.seconds_left() > 0
        clock.now += 0.6 * COALESCE_SECONDS
        assert sends.seconds_left() < 0
        assert len(sends.take()) == 2


class LateEntry(queue.SimpleQueue[Any]):
    """Queue that gets an entry without tasks just before `empty` is called for the first time.

    Such an entry comes from a bucket of which this rank owns all units: its first tasks wait for
    the payloads of other ranks.
    """

    has_late_entry = False

    def empty(self) -> bool:
        if not self.has_late_entry:
            self.has_late_entry = True
            self.put([])
        return super().empty()


def test_payloads_do_not_wait_for_an_entry_without_tasks(monkeypatch: pytest.MonkeyPatch) -> None:
    # Payloads then leave only when the queue is empty.
    monkeypatch.setattr(transmitters, "COALESCE_SECONDS", 1e6)
    with lone_rank(rank=1) as rank:
        executor = rank.sync._executor
        first_queue, executor._computes = executor._computes, LateEntry()
        # The compute thread waits for the first queue. An entry lets it go on to the other one.
        first_queue.put([])
        rank.start()
        wait_until(
            lambda: sum(len(unpacked(tree[1])) for _, _, tree in rank.mailbox.sent) == 2,
            "the payloads of both units are sent",
        )
        assert executor._computes.has_late_entry
