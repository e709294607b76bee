"""Values and pushes are not sent twice without need, and small messages do not wait behind them."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch

from benchmarks.support.parameter_server.thread_job import ThreadJob, open_servers
from lightning_dlres.core.wire.message import Message
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


def test_pushes_are_sent_again_one_after_the_other() -> None:
    """A restarted server refuses all but the next one, and asks again with each refusal."""
    parameters = {"p": torch.zeros(4)}
    with open_servers(1) as servers:
        job = ThreadJob(servers, 1, consistency="bsp")
        session = job.join(0, parameters, torch.optim.SGD(parameters.values(), lr=0.1))
        link, (one,) = session._links[0], session.exchange.keys
        # Its thread has ended, so the test alone receives, and nothing is sent.
        link.close()
        for _ in range(5):
            session.push(0, torch.ones(4), b"")
        sent = link._outbox._pushes
        assert [sent.pop()[0].number for _ in range(5)] == [1, 2, 3, 4, 5]

        def numbers_after(kind: str, number: int) -> list[int]:
            reply = protocol.KeyReply(key=0, number=number)
            payload = bytes(16) if kind == protocol.VALUE else b""
            details = msgspec.msgpack.encode(reply)
            message = Message(kind, 0, payload, "server 0", 0, details)
            with session.exchange.lock:
                link._handle(message, time.monotonic())
            return [sent.pop()[0].number for _ in range(len(sent._places))]

        # Refusals of the pushes 3, 4 and 5.
        assert [numbers_after(protocol.BEHIND, 1) for _ in range(3)] == [[2], [2], [2]]
        assert numbers_after(protocol.VALUE, 1) == []
        assert numbers_after(protocol.WAITING, 2) == []
        assert numbers_after(protocol.VALUE, 2) == [3]
        assert numbers_after(protocol.VALUE, 2) == []
        assert numbers_after(protocol.VALUE, 4) == [5]
        assert numbers_after(protocol.VALUE, 5) == []
        assert one.value_number == 5
        assert numbers_after(protocol.VALUE, 4) == []


def test_a_commit_leaves_before_pushes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pushes that wait for a commit would otherwise fill ZeroMQ's queue again and again."""
    parameters = {"p": torch.zeros(4)}
    sent: list[str] = []
    with open_servers(1) as servers:
        job = ThreadJob(servers, 1, consistency="bsp")
        session = job.join(0, parameters, torch.optim.SGD(parameters.values(), lr=0.1))
        link = session._links[0]
        link.close()
        session.push(0, torch.ones(4), b"", is_held=True)
        link.post_commit([(0, 1)], 1.0)
        # ZeroMQ's queue has room for one message.
        monkeypatch.setattr(WorkerOutbox, "is_open", property(lambda _: not sent))
        monkeypatch.setattr(link._client, "send", lambda kind, *_, **__: sent.append(kind))
        link._outbox.send(0.0)
        assert sent == [protocol.COMMIT]
