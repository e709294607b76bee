"""Jobs whose optimizer fails, and workers whose server is away or makes no room in the log."""

from __future__ import annotations

import threading
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_dlres.core.errors import ConfigError, PeerError, PeerTimeoutError
from lightning_dlres.paramserver.execute.server import job_workers
from lightning_dlres.paramserver.execute.server.job_workers import JobWorkers
from lightning_dlres.paramserver.execute.server.optimizers import (
    optimizer_name,
    register_server_optimizer,
)
from lightning_dlres.paramserver.execute.server.service import ParameterServer
from lightning_dlres.paramserver.execute.worker import joining
from tests.support.parameter_jobs import Worker, new_worker
from tests.support.waiting import wait_until


@register_server_optimizer
class FailingOptimizer(torch.optim.SGD):
    """Optimizer whose update of the matrix fails after it has changed it in part."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.numel() > 100:
                    parameter.data.view(-1)[:1] += 1
                    raise KeyError("a missing state")
        return super().step(closure)


@register_server_optimizer
class MatrixOptimizer(torch.optim.SGD):
    """Optimizer that refuses vectors alone, as Muon does."""

    def __init__(self, params: Any, **options: Any) -> None:
        super().__init__(params, **options)
        if not any(p.dim() > 1 for group in self.param_groups for p in group["params"]):
            raise ValueError("only matrices")


def joined(stack: ExitStack, server: ParameterServer, **options: Any) -> Worker:
    worker = new_worker([server.address], **options)
    stack.callback(worker.session.close)
    worker.session.start()
    worker.session.join()
    return worker


def test_options_are_tried_on_a_parameter_of_the_models_dimensions(stack: ExitStack) -> None:
    server = stack.enter_context(ParameterServer())
    joined(stack, server, optimizer_name=optimizer_name(MatrixOptimizer)).step()


def test_an_optimizer_that_fails_ends_its_job_but_not_the_server(
    stack: ExitStack, tmp_path: Path
) -> None:
    server = stack.enter_context(ParameterServer(snapshot=tmp_path, snapshot_every=0.01))
    worker = joined(
        stack, server, optimizer_name=optimizer_name(FailingOptimizer), worker_deadline=0.5
    )
    with pytest.raises(PeerError, match=r"FailingOptimizer failed at matrix.*KeyError"):
        worker.step()
    worker.session.close()
    # What was changed in part is in no snapshot.
    (path,) = tmp_path.glob("*.snapshot")
    before = path.read_bytes()

    def is_free() -> bool:
        return server.status().workers[0].state == "shut out"

    wait_until(is_free, "the failed worker is shut out")
    assert path.read_bytes() == before
    worker = joined(stack, server, token=bytes(16))
    worker.step()


def test_the_job_after_one_whose_workers_were_killed_waits_for_the_server(
    stack: ExitStack, capfd: pytest.CaptureFixture[str]
) -> None:
    server = stack.enter_context(ParameterServer())
    killed = joined(stack, server, worker_deadline=2.0)
    killed.step()
    killed.session.close()
    worker = joined(stack, server, token=bytes(16), retry_seconds=0.1)
    worker.step()
    assert "busy with another job" in capfd.readouterr().err


def test_a_server_of_a_job_that_runs_is_refused(
    stack: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(joining, "_MAY_LIVE_SECONDS", 0.5)
    server = stack.enter_context(ParameterServer())
    other = joined(stack, server, worker_deadline=60.0)
    with pytest.raises(PeerError, match=r"server 0 .*busy with another job, whose workers run"):
        joined(stack, server, token=bytes(16), retry_seconds=0.1)
    other.step()


def test_a_job_that_is_described_keeps_its_servers_until_its_workers_have_left(
    stack: ExitStack, capfd: pytest.CaptureFixture[str]
) -> None:
    addresses = [stack.enter_context(ParameterServer()).address for _ in range(2)]
    first, second = (
        new_worker(addresses, token=bytes([number]) * 16, retry_seconds=0.1) for number in (1, 2)
    )
    stack.callback(first.session.close)
    # A job that begins at the same time comes between the first one's messages.
    first.session._joining._describe()
    errors: list[BaseException] = []

    def train_second() -> None:
        try:
            second.session.start()
            second.session.join()
            second.step()
        except Exception as error:
            errors.append(error)
        finally:
            second.session.close()

    thread = threading.Thread(target=train_second)
    thread.start()
    stack.callback(thread.join)
    told = ""

    def waits_or_has_ended() -> bool:
        nonlocal told
        told += capfd.readouterr().err
        return "busy with another job" in told or not thread.is_alive()

    wait_until(waits_or_has_ended, "the second job is told to wait")
    assert (second.steps, errors) == (0, [])
    first.session.start()
    first.session.join()
    first.step()
    first.session.leave()
    thread.join()
    assert (second.steps, errors) == (1, [])


def test_a_job_that_lost_its_server_before_it_began_says_so(
    stack: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(job_workers, "_START_SECONDS", 0.0)
    server = stack.enter_context(ParameterServer())
    first = new_worker([server.address])
    stack.callback(first.session.close)
    first.session._joining._describe()
    joined(stack, server, token=bytes(16))
    with pytest.raises(PeerError, match=r"server 0 .* does not know this job any more"):
        first.session._joining._greet()


def test_a_job_is_over_if_it_is_described_no_more_and_no_worker_comes() -> None:
    workers = JobWorkers(2, deadline=1.0, now=100.0)
    assert not workers.are_over(114.0)
    workers.note_description(114.0)
    assert not workers.are_over(128.0)
    assert workers.silence(128.0) == 14.0
    assert workers.are_over(130.0)


def test_a_server_that_is_away_for_long_is_found_again(stack: ExitStack, tmp_path: Path) -> None:
    # More messages than ZeroMQ queues, while nobody reads them.
    shapes = {f"scalar{number}": (1,) for number in range(1200)}
    first = ParameterServer(snapshot=tmp_path)
    port = int(first.address.rpartition(":")[2])
    try:
        worker = joined(stack, first, shapes=shapes, retry_seconds=0.05)
        worker.step()
    finally:
        first.close()
    worker.push()
    link = worker.session._links[0]
    wait_until(lambda: not link._client.is_writable, "the queue to the server is full")
    again: list[ParameterServer] = []

    def bind() -> bool:
        try:
            again.append(ParameterServer(port=port, snapshot=tmp_path))
        except ConfigError:
            return False
        return True

    wait_until(bind, "the port is free again")
    stack.callback(again[0].close)
    worker.land()
    worker.step()
    with ParameterServer() as server:
        plain = joined(stack, server, shapes=shapes)
        for _ in range(3):
            plain.step()
    for name, value in worker.parameters.items():
        assert torch.equal(value, plain.parameters[name]), name


def test_a_log_that_stays_full_ends_with_an_error(stack: ExitStack, tmp_path: Path) -> None:
    server = stack.enter_context(ParameterServer(snapshot=tmp_path, snapshot_every="1h"))
    worker = joined(stack, server, timeout=1.0, retry_seconds=0.1)
    # Snapshots fail from now on.
    server._snapshots._files = None
    with pytest.raises(PeerTimeoutError, match=r"log of .* is full"):
        step_often(worker)


def step_often(worker: Worker) -> None:
    for _ in range(20):
        worker.step()
