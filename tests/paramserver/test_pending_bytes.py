"""Pushes that run ahead of slower workers take limited memory, and change no result."""

from __future__ import annotations

import threading
from contextlib import ExitStack

import pytest
import torch

from lightning_dlres.paramserver.execute.server import shard
from lightning_dlres.paramserver.execute.server.service import ParameterServer
from tests.support.parameter_jobs import Worker, new_worker
from tests.support.waiting import wait_until

STEPS = 3


def train(stack: ExitStack, workers: int) -> list[Worker]:
    """Train with workers of which all but the first push all keys before the first one begins."""
    server = stack.enter_context(ParameterServer())
    made = [
        new_worker([server.address], worker=index, workers=workers, retry_seconds=0.2)
        for index in range(workers)
    ]
    nbytes = sum(key.nbytes for key in made[0].job.keys)
    ahead = [threading.Semaphore(0) for _ in range(STEPS)]

    def wait_for(worker: Worker, count: int) -> None:
        def has_arrived() -> bool:
            return server.status().workers[worker.job.worker].pushed_bytes >= count

        wait_until(has_arrived, "the pushes have arrived")

    def run(worker: Worker) -> None:
        if worker.job.worker == 0:
            worker.session.start()
        worker.session.join()
        for step in range(STEPS):
            if worker.job.worker == 0:
                for _ in range(workers - 1):
                    assert ahead[step].acquire(timeout=30)
                worker.step()
            else:
                worker.push()
                wait_for(worker, (step + 1) * nbytes)
                ahead[step].release()
                worker.land()
        worker.session.leave()

    threads = [threading.Thread(target=run, args=(worker,), daemon=True) for worker in made]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    return made


@pytest.mark.parametrize("workers", [2, 4])
def test_discarded_pushes_are_asked_for_again(
    stack: ExitStack, workers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = train(stack, workers)
    monkeypatch.setattr(shard, "_LEAST_PENDING_BYTES", 1 << 10)
    limited = train(stack, workers)
    for name, value in expected[0].parameters.items():
        assert all(torch.equal(value, worker.parameters[name]) for worker in limited), name
    # Something was sent again.
    assert sum(w.session.exchange.pushed_bytes for w in limited) > sum(
        w.session.exchange.pushed_bytes for w in expected
    )
