"""Starts of jobs: without values, with slow servers, and with wrong addresses."""

from __future__ import annotations

import gc
import weakref
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from lightning_dlres.core.errors import ConfigError, PeerError
from lightning_dlres.paramserver import protocol
from lightning_dlres.paramserver.execute.server.service import ParameterServer
from lightning_dlres.paramserver.execute.worker import joining
from lightning_dlres.paramserver.execute.worker.connection.link import ServerLink
from tests.support.parameter_jobs import new_worker
from tests.support.waiting import wait_until

# Limit of a test's waits in seconds.
DEADLINE = 60.0


def test_a_job_without_values_leaves_no_snapshot(stack: ExitStack, tmp_path: Path) -> None:
    server = ParameterServer(snapshot=tmp_path, snapshot_every=3600.0)
    stack.callback(server.close)
    worker = new_worker([server.address])
    stack.callback(worker.session.close)
    worker.session._joining._describe()
    worker.session._joining._greet()
    (link,) = worker.session._links
    with pytest.raises(PeerError, match="keys have no value yet"):
        worker.session._waits.answers(
            [link.request(protocol.START, worker.session.exchange.request())]
        )
    # A file has the names of the workers only.
    assert sum(path.stat().st_size for path in tmp_path.rglob("*") if path.is_file()) < 1024
    port = int(server.address.rpartition(":")[2])
    server.close()
    with ParameterServer(port=port, snapshot=tmp_path, snapshot_every=3600.0) as restarted:
        assert restarted._job is None


def test_loading_one_server_may_take_longer_than_the_deadline_at_another(
    stack: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    servers = [stack.enter_context(ParameterServer()) for _ in range(2)]
    load = joining.Joining._load

    def heard() -> float | None:
        job = servers[1]._job
        return None if job is None else job.shard.members.by_index[0].last_heard

    def slow_load(self: Any, link: ServerLink, states: Any) -> None:
        before = heard()
        assert before is not None
        # The worker gives signs of life to all servers while one gets its parameters.
        wait_until(lambda: (heard() or 0.0) > before, "server 1 hears worker 0", DEADLINE)
        load(self, link, states)

    monkeypatch.setattr(joining.Joining, "_load", slow_load)
    worker = new_worker([server.address for server in servers], worker_deadline=20.0)
    stack.callback(worker.session.close)
    worker.session.start()
    worker.session.join()
    worker.step()


@pytest.mark.parametrize("is_wrong", [True, False])
def test_no_log_stays_behind(stack: ExitStack, tmp_path: Path, is_wrong: bool) -> None:
    address = stack.enter_context(ParameterServer()).address
    if is_wrong:
        with pytest.raises(ConfigError):
            new_worker([address + "0"], log_directory=tmp_path)
    else:
        worker = new_worker([address], log_directory=tmp_path)
        worker.session.start()
        worker.session.join()
        worker.step()
        assert list(tmp_path.iterdir())
        worker.session.leave()
    assert not list(tmp_path.iterdir())


def test_a_job_that_is_over_has_no_snapshot(stack: ExitStack, tmp_path: Path) -> None:
    server = stack.enter_context(ParameterServer(snapshot=tmp_path, snapshot_every=3600.0))
    worker = new_worker([server.address], retry_seconds=0.1)
    worker.session.start()
    worker.session.join()
    worker.step()
    assert server.status().snapshot_seconds >= 0
    worker.session.leave()
    assert server.status().snapshot_seconds < 0
    assert not list(tmp_path.glob("*.snapshot*"))


def test_a_worker_leaves_although_answers_are_missing(
    stack: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Requests that are never answered, as after a failure, do not hold up the farewell."""
    server = stack.enter_context(ParameterServer())
    shapes = {f"p{number}": (8,) for number in range(20)}
    worker = new_worker([server.address], shapes, retry_seconds=0.1)
    stack.callback(worker.session.close)
    worker.session.start()
    worker.session.join()
    worker.step()
    (link,) = worker.session._links
    for key in range(20):
        # The server does not have this push, so it does not answer.
        link.request(protocol.STATE, worker.session.exchange.content_request(key, 5, ()))
    worker.session.leave()
    assert server._job is not None
    assert server._job.shard.members.have_left()


def test_states_after_a_push_or_a_failure_need_no_other_workers(stack: ExitStack) -> None:
    """A checkpoint of a failed run is saved although other workers have failed."""
    server = stack.enter_context(ParameterServer())
    failures: list[PeerError] = []

    def check_peers() -> None:
        if failures:
            raise failures[0]

    worker = new_worker([server.address], check_peers=check_peers)
    stack.callback(worker.session.close)
    worker.session.start()
    worker.session.join()
    keys = range(len(worker.job.keys))
    for push_again in (True, False):
        worker.step()
        worker.session.end_pushes([worker.session.numbers()])
        failures.append(PeerError("worker 1 has failed"))
        with pytest.raises(PeerError, match="worker 1"):
            list(worker.session.states(keys))
        failures.clear()
        if push_again:
            worker.push()
            worker.land()
        else:
            worker.session.end_pushes([])
        failures.append(PeerError("worker 1 has failed"))
        assert len(list(worker.session.states(keys))) == len(keys)
        failures.clear()


def test_the_memory_of_a_job_is_freed_when_the_next_one_begins(stack: ExitStack) -> None:
    """Not by the collector of circles, which may wait for many jobs."""
    server = stack.enter_context(ParameterServer())
    for token in (b"a" * 16, b"b" * 16):
        if token == b"b" * 16:
            assert server._job is not None
            former = weakref.ref(server._job.shard.states[0].parameter)
            gc.disable()
            stack.callback(gc.enable)
        worker = new_worker([server.address], token=token)
        stack.callback(worker.session.close)
        worker.session.start()
        worker.session.join()
        worker.step()
        worker.session.leave()
    assert former() is None
