"""Notices tell a worker that a key has the pushes of all, before its value comes."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import msgspec
import pytest
import torch

from lightning_dlres.core.wire.endpoint import Client
from lightning_dlres.paramserver import protocol
from lightning_dlres.paramserver.execute.server.service import ParameterServer
from lightning_dlres.paramserver.execute.worker.connection.push_window import PushWindow
from tests.support.parameter_jobs import TOKEN, Worker, new_worker
from tests.support.waiting import wait_until

_SECONDS = 30.0


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def two_workers(stack: ExitStack, server: ParameterServer) -> list[Worker]:
    """Return workers of one job that listen."""
    workers = []
    for index in range(2):
        worker = new_worker([server.address], worker=index, workers=2, retry_seconds=0.2)
        stack.callback(worker.session.close)
        workers.append(worker)
    for worker in workers:
        if worker.job.worker == 0:
            worker.session.start()
        worker.session.join()
    wait_until(lambda: listeners(server) == {0, 1}, "both workers listen", _SECONDS)
    return workers


def listeners(server: ParameterServer) -> set[int]:
    return set() if server._job is None else set(server._job.notices._listeners)


def window_of(worker: Worker) -> PushWindow:
    return worker.session._links[0]._window


def test_notices_of_all_keys_reach_all_workers(
    stack: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    heard: dict[int, list[int]] = {}
    merged = PushWindow.merged

    def note(window: PushWindow, key: int, now: float) -> None:
        heard.setdefault(id(window), []).append(key)
        merged(window, key, now)

    monkeypatch.setattr(PushWindow, "merged", note)
    workers = two_workers(stack, stack.enter_context(ParameterServer()))
    for _ in range(2):
        for worker in workers:
            worker.push()
        for worker in workers:
            worker.land()
    keys = sorted(2 * [key.index for key in workers[0].job.keys])
    for worker in workers:
        wait_until(
            lambda worker=worker: sorted(heard.get(id(window_of(worker)), [])) == keys,
            "all notices have come",
            _SECONDS,
        )
    for name, value in workers[0].parameters.items():
        assert torch.equal(value, workers[1].parameters[name])


def test_a_wrong_notice_changes_nothing(stack: ExitStack, monkeypatch: pytest.MonkeyPatch) -> None:
    server = stack.enter_context(ParameterServer())
    first, second = two_workers(stack, server)
    first.push()
    window = window_of(first)
    count = len(first.job.keys)
    wait_until(lambda: len(window._unanswered) == count, "all pushes are sent", _SECONDS)
    link = first.session._links[0]
    notices = deque(
        protocol.MergeNotice(key=key, number=number) for key, number in ((99, 1), (0, 0), (1, 1))
    )

    def heard() -> Iterator[protocol.MergeNotice]:
        while notices:
            yield notices.popleft()

    monkeypatch.setattr(link._listener, "heard", heard)
    link._client.interrupt()
    # Only the last one says something about a push, and the others were read before it.
    wait_until(lambda: set(window._unanswered) == {0, *range(2, count)}, "it was read", _SECONDS)
    second.push()
    for worker in (first, second):
        worker.land()
    for name, value in first.parameters.items():
        assert torch.equal(value, second.parameters[name])


@pytest.mark.parametrize("case", ["name", "worker", "incarnation", "job"])
def test_nobody_else_hears_notices(stack: ExitStack, case: str) -> None:
    server = stack.enter_context(ParameterServer())
    worker = two_workers(stack, server)[0]
    names = dict(server._job.notices._listeners) if server._job is not None else {}
    incarnation = worker.session.exchange.incarnation
    request: dict[str, Any] = {"job": TOKEN, "worker": 0, "incarnation": incarnation}
    request |= {
        "name": {},
        "worker": {"worker": 2},
        "incarnation": {"incarnation": incarnation + 1},
        "job": {"job": bytes(16)},
    }[case]
    name = protocol.listener_name(request["worker"], request["incarnation"])
    client = Client("a thief" if case == "name" else name, server.address)
    stack.callback(client.close)
    client.send(protocol.LISTEN, details=msgspec.msgpack.encode(protocol.Request(**request)))
    # The server answers requests in order; these ones get no answer.
    client.send(protocol.STATUS)
    assert client.expect(_SECONDS, "the status").kind == protocol.STATUS
    assert server._job is not None
    assert server._job.notices._listeners == names
    assert server.refused == (case in ("name", "worker"))
