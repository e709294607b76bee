"""Payloads wait for others only behind a payload to the same rank, and not for long."""

from __future__ import annotations

import queue
from typing import Any

import pytest
import torch

from lightning_dlres.gradsync.execute import transmitters
from lightning_dlres.gradsync.execute.states import CodecStates
from lightning_dlres.gradsync.execute.transmitters import (
    COALESCE_BYTES,
    COALESCE_SECONDS,
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


def test_only_payloads_behind_another_one_to_their_rank_wait() -> None:
    clock = Clock()
    sends = WaitingSends(clock)
    for destination in (0, 1):
        sends.add(send(destination, 400))
        assert sends.is_due()
        assert [item.destination for item in sends.take()] == [destination]
    sends.add(send(0, 400))
    assert not sends.is_due()
    sends.add(send(2, 400))
    # All leave together.
    assert sends.is_due()
    assert [item.destination for item in sends.take()] == [0, 2]
    assert not sends.items


def test_payloads_wait_up_to_a_time_or_a_size() -> None:
    clock = Clock()
    sends = WaitingSends(clock)
    sends.add(send(0, 400))
    sends.take()
    sends.add(send(0, COALESCE_BYTES // 2))
    assert not sends.is_due()
    sends.add(send(0, COALESCE_BYTES // 2))
    assert sends.is_due()
    assert len(sends.take()) == 2
    sends.add(send(0, 400))
    clock.now += COALESCE_SECONDS / 2
    assert not sends.is_due()
    clock.now += COALESCE_SECONDS
    assert sends.is_due()


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
    # A payload behind another one then leaves only when the queue is empty.
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
