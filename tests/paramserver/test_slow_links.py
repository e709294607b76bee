"""Over a slow link, values are neither sent twice nor asked for while others arrive."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from benchmarks.support.parameter_server.thread_job import ThreadJob, open_servers
from lightning_dlres.paramserver import protocol
from lightning_dlres.paramserver.execute.server.job_workers import JobWorkers
from lightning_dlres.paramserver.execute.server.key_state import KeyState
from lightning_dlres.paramserver.execute.server.values import ValueQueue
from lightning_dlres.paramserver.execute.worker.connection.worker_outbox import WorkerOutbox
from lightning_dlres.paramserver.plan.keys import ParameterInfo, make_keys


@dataclass
class SlowServer:
    """Server whose sent values stay in ZeroMQ until `trackers` are done."""

    trackers: list[SimpleNamespace] = field(default_factory=list)

    def send_tracked(self, *_: Any, **__: Any) -> SimpleNamespace:
        self.trackers.append(SimpleNamespace(done=False))
        return self.trackers[-1]


def test_a_value_on_its_way_is_not_sent_again() -> None:
    info = ParameterInfo(
        name="p",
        shape=(4,),
        dtype="float32",
        itemsize=4,
        optimizer=0,
        group=0,
        is_divisible=True,
    )
    state = KeyState.new(make_keys([info], 1, 1 << 20)[0], workers=1)
    state.applied[0] = 1
    shard: Any = SimpleNamespace(
        members=JobWorkers(1, 10.0), states={0: state}, durable=lambda *_: 1
    )
    server: Any = SlowServer()
    values = ValueQueue(server, shard)
    for _ in range(3):
        values.add(0, 0, 1)
        values.advance()
    assert len(server.trackers) == 1
    # A newer value is another one.
    state.applied[0] = 2
    values.add(0, 0, 2)
    values.advance()
    assert len(server.trackers) == 2
    # A value that has left may have been lost.
    for tracker in server.trackers:
        tracker.done = True
    values.add(0, 0, 2)
    values.advance()
    assert len(server.trackers) == 3


def test_a_worker_asks_for_a_value_only_when_no_other_arrives(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[str] = []
    parameters = {"p": torch.zeros(4)}
    with open_servers(1) as servers:
        job = ThreadJob(servers, 1, consistency="bsp", retry_seconds=1.0)
        session = job.join(0, parameters, torch.optim.SGD(parameters.values(), lr=0.1))
        link = session._links[0]
        # Its thread has ended, so the test alone asks.
        link.close()
        monkeypatch.setattr(WorkerOutbox, "send_now", lambda self, kind, _: asked.append(kind))
        monkeypatch.setattr(WorkerOutbox, "is_open", True)
        session.exchange.expect(0, 1, is_queued=False)
        later = time.monotonic() + 100.0
        link._last_progress = later - 0.5
        link._query(later)
        assert asked == []
        link._last_progress = -math.inf
        link._query(later)
        assert asked == [protocol.PULL]
