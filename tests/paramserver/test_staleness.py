"""Under "ssp" no worker is further ahead of another than its bound; under "asp" none waits."""

from __future__ import annotations

import random
import threading
import time

import pytest
import torch
from torch import Tensor

from benchmarks.support.parameter_server.jobs import packed_options
from benchmarks.support.parameter_server.thread_job import ThreadJob, open_servers
from lightning_dlres.paramserver.execute.worker.session import WorkerSession
from tests.support.waiting import wait_until

LR = 1e-3
# Longest emulated computation of a step, in seconds.
DELAY = 0.004


def small_parameters() -> dict[str, Tensor]:
    """Return parameters with several keys for each server."""
    return {f"p{index}": torch.zeros(index + 3) for index in range(5)}


def join(job: ThreadJob, worker: int, parameters: dict[str, Tensor]) -> WorkerSession:
    """Join with plain SGD."""
    return job.join(worker, parameters, torch.optim.SGD(parameters.values(), lr=LR))


def push_all(session: WorkerSession, last_push: list[int]) -> None:
    """Push all keys; note the push before its last key, as a server may apply it at once."""
    options = packed_options(torch.optim.SGD([torch.zeros(1)], lr=LR))
    keys = [one.key for one in session.exchange.keys][::-1]
    for key in keys:
        if key is keys[-1]:
            last_push[0] += 1
        session.push(key.index, torch.ones(key.shape), options)


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("staleness", [0, 1, 3])
def test_no_worker_exceeds_the_bound_under_random_delays(staleness: int, seed: int) -> None:
    workers, steps = 3, 16
    pushed = [[0] for _ in range(workers)]
    # For each landed push: worker, number, and the pushes of all workers at that moment.
    landed: list[tuple[int, int, list[int]]] = []
    with open_servers(2) as servers:
        job = ThreadJob(servers, workers, consistency="ssp", staleness=staleness)

        def work(worker: int) -> None:
            delays = random.Random(100 * seed + worker)
            # Unlike workers; each has quick and slow stretches.
            slowness = delays.random()
            session = join(job, worker, small_parameters())
            for step in range(1, steps + 1):
                if step % 8 == 0:
                    slowness = delays.random()
                time.sleep(DELAY * slowness * delays.random())
                push_all(session, pushed[worker])
                session.wait()
                # Later pushes of others may be in the list, but all that the servers had are.
                landed.append((worker, step, [own[0] for own in pushed]))
                session.land()
            session.leave()

        job.run(work)
    assert len(landed) == workers * steps
    for worker, number, numbers in landed:
        behind = number - min(numbers)
        assert behind <= staleness, f"worker {worker} landed push {number} when {numbers} were sent"


@pytest.mark.parametrize("staleness", [0, 2])
def test_a_worker_waits_at_the_bound_and_names_the_slow_one(staleness: int) -> None:
    steps = 6
    may_push = threading.Event()
    landed = [0, 0]
    sessions: dict[int, WorkerSession] = {}
    with open_servers(2) as servers:
        job = ThreadJob(servers, 2, consistency="ssp", staleness=staleness, retry_seconds=0.05)

        def work(worker: int) -> None:
            session = sessions[worker] = join(job, worker, small_parameters())
            if worker == 1:
                may_push.wait(60.0)
            for _ in range(steps):
                push_all(session, [0])
                session.wait()
                session.land()
                landed[worker] += 1
            session.leave()

        def names_the_slow_worker() -> bool:
            keys = sessions[0].exchange.keys if 0 in sessions else []
            return bool(keys) and all(key.waiting_for == (1,) for key in keys)

        runner = threading.Thread(target=job.run, args=(work,), daemon=True)
        runner.start()
        try:
            wait_until(names_the_slow_worker, "worker 0 waits for worker 1")
            assert landed == [staleness, 0]
        finally:
            may_push.set()
            runner.join(60.0)
    assert landed == [steps, steps]


def test_a_late_first_process_of_a_worker_skips_nothing() -> None:
    staleness, steps = 2, 6
    landed = [0, 0]
    with open_servers(2) as servers:
        job = ThreadJob(servers, 2, consistency="ssp", staleness=staleness)
        parameters = [small_parameters() for _ in range(2)]

        def work(worker: int) -> None:
            if worker == 1:
                wait_until(lambda: landed[0] == staleness, "worker 0 is at its bound")
            session = join(job, worker, parameters[worker])
            assert [one.number for one in session.exchange.keys] == [0] * 5
            for _ in range(steps):
                push_all(session, [0])
                session.wait()
                session.land()
                landed[worker] += 1
            session.leave()

        job.run(work)


def test_asp_waits_for_nobody() -> None:
    steps = 12
    is_done = threading.Event()
    with open_servers(2) as servers:
        job = ThreadJob(servers, 2, consistency="asp")
        parameters = [small_parameters() for _ in range(2)]

        def work(worker: int) -> None:
            session = join(job, worker, parameters[worker])
            if worker == 1:
                # This worker pushes only when the other one is done.
                assert is_done.wait(60.0)
            for _ in range(steps):
                push_all(session, [0])
                session.wait()
                session.land()
            is_done.set()
            session.leave()

        job.run(work)
    # Each of all pushes is an update with half of the gradient.
    for parameter in parameters[1].values():
        torch.testing.assert_close(parameter, torch.full_like(parameter, -LR * steps))
