"""Servers that restart with older parameters get from the workers what they lack."""

from __future__ import annotations

import threading
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from torch import nn

from lightning_dlres.core.errors import ConfigError, PeerError, PeerLostError, PeerTimeoutError
from lightning_dlres.paramserver import protocol
from lightning_dlres.paramserver.execute.server.optimizers import optimizer_name
from lightning_dlres.paramserver.execute.server.service import ParameterServer
from lightning_dlres.paramserver.execute.worker.job import Job
from lightning_dlres.paramserver.execute.worker.session import WorkerSession
from lightning_dlres.paramserver.execute.worker.state.parameters import KeyedParameters
from tests.support.chaos_proxy import Chaos, ChaosProxy
from tests.support.parameter_jobs import new_worker
from tests.support.paramserver_training import adamw, model_keys
from tests.support.waiting import wait_until

# Limit of a test's waits in seconds, and seconds between two snapshots in tests that need none.
DEADLINE, NEVER = 60.0, 3600.0


class Training:
    """Server with snapshots and two workers, all in this process."""

    def __init__(
        self,
        stack: ExitStack,
        directory: Path,
        *,
        timeout: float = DEADLINE,
        snapshot_every: float = NEVER,
        chaos: Chaos | None = None,
        **options: Any,
    ) -> None:
        self._stack, self._directory, self._timeout = stack, directory, timeout
        self._snapshot_every, self._options_of_job = snapshot_every, options
        torch.manual_seed(0)
        self.models = [nn.Linear(8, 4) for _ in range(2)]
        self.keys = model_keys(self.models[0], 1)
        self._optimizer, self._options = adamw(self.models[0])
        if options:
            # The sum of such updates does not depend on their order.
            name = optimizer_name(torch.optim.SGD)
            self._optimizer = protocol.OptimizerSetup(name=name, groups=[{"lr": 1.0}])
            self._options = msgspec.msgpack.encode({"lr": 1.0})
            for parameter in self.models[0].parameters():
                nn.init.zeros_(parameter)
        self.port = 0
        self.start_server()
        self.address = self.server.address
        if chaos is not None:
            self.address = stack.enter_context(ChaosProxy(self.address, chaos, 0)).address
        self.workers = [self.session(worker) for worker in range(2)]
        self.workers[0].start()
        assert [worker.join() for worker in self.workers] == [0, 0]

    def start_server(self) -> None:
        self.server = ParameterServer(
            port=self.port,
            snapshot=self._directory / "snapshots",
            snapshot_every=self._snapshot_every,
        )
        self._stack.callback(self.server.close)
        self.port = int(self.server.address.rpartition(":")[2])

    def restart_server(self) -> None:
        self.server.close()
        self.start_server()

    def session(self, worker: int) -> WorkerSession:
        """Return another process of a worker, as the servers see it."""
        job = Job(
            token=b"t" * 16,
            worker=worker,
            workers=2,
            servers=[self.address],
            keys=self.keys,
            optimizers=[self._optimizer],
            timeout=self._timeout,
            retry_seconds=0.1,
            log_directory=self._directory,
            **self._options_of_job,
        )
        parameters = KeyedParameters(dict(self.models[worker].named_parameters()))
        session = WorkerSession(job, parameters)
        self._stack.callback(session.close)
        return session

    def push(self, worker: int, value: float = 1.0) -> None:
        for key in self.keys:
            shape = self.models[0].get_parameter(key.name).shape
            self.workers[worker].push(key.index, torch.full(shape, value), self._options)

    def step(self) -> None:
        for worker in range(2):
            self.push(worker)
        for session in self.workers:
            session.wait()
            session.land()

    def steps(self, steps: int) -> None:
        for _ in range(steps):
            self.step()

    def versions(self, worker: int) -> set[float]:
        """Return the number of updates in the optimizer's states."""
        session = self.workers[worker]
        states = session.states(range(len(session.exchange.keys)))
        return {float(state["step"]) for state in states}


def test_a_restarted_server_gets_pushes_that_no_worker_awaits(
    stack: ExitStack, tmp_path: Path
) -> None:
    training = Training(stack, tmp_path)
    training.step()
    training.step()
    training.restart_server()
    assert training.versions(0) == {2.0}
    training.step()
    assert training.versions(1) == {3.0}


def test_a_worker_that_rejoins_gets_help_from_one_that_waits_for_nothing(
    stack: ExitStack, tmp_path: Path
) -> None:
    training = Training(stack, tmp_path)
    training.step()
    training.step()
    training.workers[1].close()
    training.restart_server()
    training.workers[1] = training.session(1)
    joined = training.workers[1].join()
    # It goes on wherever the server has come to.
    assert 0 <= joined <= 2
    for _ in range(joined, 2):
        training.push(1)
        training.workers[1].wait()
        training.workers[1].land()
    training.step()
    assert training.versions(1) == {3.0}


def test_servers_of_one_port_share_no_directory(stack: ExitStack, tmp_path: Path) -> None:
    server = stack.enter_context(ParameterServer(snapshot=tmp_path))
    port = int(server.address.rpartition(":")[2])
    with pytest.raises(ConfigError, match="which a running server with the same port uses"):
        ParameterServer(bind="127.0.0.2", port=port, snapshot=tmp_path)
    server.close()
    assert list(tmp_path.iterdir()) == []
    stack.enter_context(ParameterServer(bind="127.0.0.2", port=port, snapshot=tmp_path))


def test_a_worker_leaves_only_when_its_pushes_are_safe(stack: ExitStack, tmp_path: Path) -> None:
    training = Training(stack, tmp_path)
    training.step()
    training.workers[0].leave()
    training.restart_server()
    assert training.versions(1) == {1.0}
    training.workers[1].leave()
    files = (tmp_path / "snapshots").iterdir()
    assert [path for path in files if path.suffix != ".lock"] == []
    assert [path for path in tmp_path.iterdir() if path.is_file()] == []


def test_workers_that_leave_together_need_no_snapshot(stack: ExitStack, tmp_path: Path) -> None:
    training = Training(stack, tmp_path)
    training.step()
    # No snapshot can be written.
    (tmp_path / "snapshots" / f"server-{training.port}.snapshot.partial").mkdir()
    threads = [threading.Thread(target=session.leave) for session in training.workers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(DEADLINE)
    assert not any(thread.is_alive() for thread in threads)


def test_a_log_that_stays_full_ends_the_training(stack: ExitStack, tmp_path: Path) -> None:
    training = Training(stack, tmp_path, timeout=2.0)
    (tmp_path / "snapshots" / f"server-{training.port}.snapshot.partial").mkdir()
    with pytest.raises(PeerTimeoutError, match="for a snapshot of the servers, since the log of"):
        training.steps(100)
    assert "directory" in training.server.status().snapshot_error


def test_a_full_log_forces_a_snapshot(stack: ExitStack, tmp_path: Path) -> None:
    training = Training(stack, tmp_path)
    capacity = training.workers[0].exchange.log.capacity
    nbytes = sum(key.nbytes for key in training.keys)
    steps = 2 * capacity // nbytes
    training.steps(steps)
    assert training.server.status().snapshot_seconds >= 0
    training.restart_server()
    training.step()
    assert training.versions(0) == {steps + 1.0}


def test_a_replaced_process_is_shut_out(stack: ExitStack, tmp_path: Path) -> None:
    training = Training(stack, tmp_path)
    training.step()
    old = training.workers[1]
    training.workers[1] = training.session(1)
    assert training.workers[1].join() == 1
    with pytest.raises(PeerLostError, match="shut this process out"):
        list(old.states(range(len(old.exchange.keys))))
    old.leave()
    training.step()
    assert training.versions(1) == {2.0}


@pytest.mark.parametrize(
    "options", [{"consistency": "asp"}, {"consistency": "ssp", "staleness": 2}]
)
def test_asynchronous_pushes_count_once_through_restarts(
    stack: ExitStack, tmp_path: Path, options: dict[str, Any]
) -> None:
    chaos = Chaos(drop=0.1, duplicate=0.1, delay=0.2, seconds=0.05)
    training = Training(stack, tmp_path, snapshot_every=0.05, chaos=chaos, **options)
    steps, finished = 40, [0, 0]

    def train(worker: int) -> None:
        session = training.workers[worker]
        for _ in range(steps):
            training.push(worker, worker + 1.0)
            session.wait()
            session.land()
            finished[worker] += 1
        list(session.states(range(len(session.exchange.keys))))

    threads = [threading.Thread(target=train, args=(worker,)) for worker in range(2)]
    for thread in threads:
        thread.start()
    for step in (10, 20, 30):
        wait_until(lambda step=step: max(finished) >= step, f"step {step}", DEADLINE)
        training.restart_server()
    for thread in threads:
        thread.join(DEADLINE)
    assert finished == [steps, steps]
    # A new process gets the values that the server has at the end.
    training.workers[0].close()
    training.workers[0] = training.session(0)
    assert training.workers[0].join() == steps
    for parameter in training.models[0].parameters():
        assert torch.equal(parameter, torch.full_like(parameter, -steps * (1 + 2) / 2))


@pytest.mark.parametrize(
    "options", [{"consistency": "asp"}, {"consistency": "ssp", "staleness": 2}]
)
def test_last_values_have_pushes_that_another_worker_sends_again_late(
    stack: ExitStack, tmp_path: Path, options: dict[str, Any]
) -> None:
    training = Training(stack, tmp_path, **options)
    training.steps(2)
    late, early = training.workers
    numbers = [session.numbers() for session in training.workers]
    assert numbers == [[2] * len(training.keys)] * 2
    for session in training.workers:
        session.end_pushes(numbers)
    refreshing = threading.Thread(target=early.refresh)
    # The thread that would send pushes again needs the lock.
    with late.exchange.lock:
        training.restart_server()
        wait_until(
            lambda: training.server.status().last_version == 2, "the pushes of one worker", DEADLINE
        )
        refreshing.start()
        # An answer that came now would lack pushes.
        refreshing.join(0.5)
        assert refreshing.is_alive()
    refreshing.join(DEADLINE)
    late.refresh()
    for model in training.models:
        for parameter in model.parameters():
            assert torch.equal(parameter, torch.full_like(parameter, -2.0))


def test_a_number_for_each_worker_is_needed(stack: ExitStack, tmp_path: Path) -> None:
    training = Training(stack, tmp_path, timeout=2.0, consistency="asp")
    training.workers[0].end_pushes([training.workers[0].numbers()])
    with pytest.raises(PeerError, match="refused: a request with 1 numbers for 2 workers"):
        training.workers[0].refresh()


def test_a_server_may_restart_while_many_states_are_fetched(
    stack: ExitStack, tmp_path: Path
) -> None:
    """More requests are open than are sent at a time, and none is answered before the worker has
    sent its pushes again."""
    server = ParameterServer(snapshot=tmp_path, snapshot_every=NEVER)
    stack.callback(server.close)
    shapes = {f"p{number}": (16,) for number in range(20)}
    worker = new_worker([server.address], shapes, timeout=DEADLINE, retry_seconds=0.1)
    stack.callback(worker.session.close)
    worker.session.start()
    worker.session.join()
    for _ in range(3):
        worker.step()
    server.close()
    states: list[Any] = []
    fetching = threading.Thread(
        target=lambda: states.extend(worker.session.states(range(20))), daemon=True
    )
    fetching.start()
    (link,) = worker.session._links

    def number_open() -> int:
        with worker.session.exchange.lock:
            return len(list(link._outbox.requests))

    wait_until(lambda: number_open() >= 8, "requests are open", DEADLINE)
    port = int(server.address.rpartition(":")[2])
    stack.enter_context(ParameterServer(port=port, snapshot=tmp_path, snapshot_every=NEVER))
    fetching.join(DEADLINE)
    assert len(states) == 20
    assert all(state["momentum_buffer"].abs().max() > 0 for state in states)
