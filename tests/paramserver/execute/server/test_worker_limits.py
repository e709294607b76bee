"""Jobs with more workers than a server can connect are refused at once."""

from __future__ import annotations

import resource
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from lightning_dlres.core.errors import ConfigError, PeerError
from lightning_dlres.paramserver.execute.server.service import ParameterServer
from lightning_dlres.paramserver.execute.server.shard import MAX_WORKERS
from tests.support.parameter_jobs import Worker, new_worker


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def allow_files(monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (count, count))


def first_worker(stack: ExitStack, server: ParameterServer, workers: int) -> Worker:
    worker = new_worker([server.address], workers=workers)
    stack.callback(worker.session.close)
    return worker


@pytest.mark.parametrize(
    ("files", "workers", "error"),
    [
        (1024, 193, "workers must be at most 192 for this server, got 193. Run `ulimit -n 1028`"),
        (resource.RLIM_INFINITY, MAX_WORKERS + 1, f"must be at most {MAX_WORKERS} .* Use at most"),
    ],
)
def test_a_job_with_too_many_workers_is_refused_at_once(
    monkeypatch: pytest.MonkeyPatch, stack: ExitStack, files: int, workers: int, error: str
) -> None:
    allow_files(monkeypatch, files)
    server = stack.enter_context(ParameterServer())
    start = time.monotonic()
    with pytest.raises(PeerError, match=error):
        first_worker(stack, server, workers).session.start()
    assert time.monotonic() - start < 10
    # The server is free for another job.
    first_worker(stack, server, 1).session.start()


def test_the_largest_job_can_be_served(monkeypatch: pytest.MonkeyPatch, stack: ExitStack) -> None:
    allow_files(monkeypatch, resource.RLIM_INFINITY)
    server = stack.enter_context(ParameterServer())
    first_worker(stack, server, MAX_WORKERS).session.start()
    assert server._server._connections._max_connections >= 2 * MAX_WORKERS


def test_a_snapshot_of_a_job_with_too_many_workers_is_refused(
    monkeypatch: pytest.MonkeyPatch, stack: ExitStack, tmp_path: Path
) -> None:
    allow_files(monkeypatch, 2048)
    server = stack.enter_context(ParameterServer(snapshot=tmp_path))
    first_worker(stack, server, 385).session.start()
    port = int(server.address.rpartition(":")[2])
    server.close()
    allow_files(monkeypatch, 1024)
    with pytest.raises(ConfigError, match=r"snapshot's job must be at most 192 .*, got 385"):
        ParameterServer(port=port, snapshot=tmp_path)
