"""A job whose workers are threads reports errors and hangs of its workers in time."""

from __future__ import annotations

import threading
import time
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks.support.parameter_server.thread_job import ThreadJob


def test_a_failed_worker_ends_the_wait_of_the_others_for_the_last_push() -> None:
    job = ThreadJob([], 2, seconds=60.0)
    session: Any = SimpleNamespace()

    def work(worker: int) -> None:
        if worker == 1:
            raise ValueError("worker 1 failed")
        job.land_final(session, b"")

    start = time.monotonic()
    with pytest.raises(ValueError, match="worker 1 failed"):
        job.run(work)
    assert time.monotonic() - start < 30.0


def test_the_time_limit_holds_for_all_workers_together() -> None:
    job, end = ThreadJob([], 4, seconds=1.0), threading.Event()
    start = time.monotonic()
    try:
        with pytest.raises(TimeoutError, match="within 1 s"):
            job.run(lambda _: end.wait(60.0) and None)
        assert time.monotonic() - start < 3.0
    finally:
        end.set()
