"""Payloads wait for others only behind a payload to the same rank, and not for long."""

from __future__ import annotations

import queue
from typing import Any

import pytest
import torch

from lightning_dlres.gradsync.execute import transmitters
from lightning_dlres.gradsync.execute.states import CodecStates
from lightning_dlres.gradsync.execute.transmitters import (
    FOLLOWING_SECONDS,
    WAITING_BYTES,
    ReadySend,
    WaitingSends,
)
from lightning_dlres.gradsync.execute.unit_run import StepOptions, UnitRun, UnitTasks
from lightning_dlres.gradsync.plan.graph import parameter_server
from lightning_dlres.gradsync.plan.units import SyncUnit
from tests.gradsync.execute.test_broken_messages import lonely
from tests.support.waiting import wait_until


class Clock:
    """Time that a test sets."""

    def __init__(self) -> None:
        self.now = 5.0

    def __call__(self) -> float:
        return self.now


def send(destination: int, nbytes: int) -> ReadySend:
    """Return a payload of a rank that owns nothing."""
    count = nbytes // 4
    unit = SyncUnit(index=0, gradient="a", start=0, stop=count, codec="raw", owner=destination)
    run = UnitRun(
        tasks=UnitTasks(unit, parameter_server(3, 4, destination)),
        codec=None,
        gradient=torch.zeros(count),
        options=StepOptions(step=0, rank=3, world_size=4),
        states=CodecStates(),
    )
    # The second task of a rank that is not the owner sends its gradient.
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


def test_payloads_wait_for_some_time_or_bytes() -> None:
    clock = Clock()
    sends = WaitingSends(clock)
    sends.add(send(0, 400))
    sends.take()
    sends.add(send(0, WAITING_BYTES // 2))
    assert not sends.is_due()
    sends.add(send(0, WAITING_BYTES // 2))
    assert sends.is_due()
    assert len(sends.take()) == 2
    sends.add(send(0, 400))
    clock.now += FOLLOWING_SECONDS / 2
    assert not sends.is_due()
    clock.now += FOLLOWING_SECONDS
    assert sends.is_due()


class LateEntry(queue.SimpleQueue[Any]):
    """Queue to which an entry without tasks comes just before its first reader finds it empty.

    A bucket's entry has no tasks on the owner of all its units, which waits for the other ranks.
    """

    has_come = False

    def empty(self) -> bool:
        if not self.has_come:
            self.has_come = True
            self.put([])
        return super().empty()


def test_payloads_do_not_wait_for_an_entry_without_tasks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transmitters, "FOLLOWING_SECONDS", 1e6)
    with lonely(rank=1) as one:
        executor = one.sync._executor
        idle, executor._computes = executor._computes, LateEntry()
        # The thread that computes goes on to the other queue.
        idle.put([])
        one.start()
        wait_until(
            lambda: sum(len(tree[1]) for _, _, tree in one.mailbox.sent) == 2, "both are sent"
        )
        assert executor._computes.has_come
