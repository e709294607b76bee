"""Training with parameter servers in processes of their own, which tests kill and start again.

A fork server starts the processes. They report in files of one directory: each worker its progress
and its weights, each server its address.
"""

from __future__ import annotations

import json
import signal
import sys
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.support.parameter_server.jobs import float32_keys, packed_options, setup_of
from lightning_dlres.core.arrays import byte_array
from lightning_dlres.core.errors import PeerLostError
from lightning_dlres.core.wire.endpoint import Client
from lightning_dlres.paramserver import protocol
from lightning_dlres.paramserver.execute.server.service import ParameterServer
from lightning_dlres.paramserver.execute.worker.job import Job
from lightning_dlres.paramserver.execute.worker.session import WorkerSession, norm_scale
from lightning_dlres.paramserver.execute.worker.state.parameters import KeyedParameters
from lightning_dlres.paramserver.plan.keys import Key

# Samples of a step, which the workers share.
_SAMPLES = 12
_FEATURES, _HIDDEN, _OUTPUTS = 24, 160, 8
_KEY_BYTES = 16 << 10


@dataclass(frozen=True, kw_only=True)
class WorkerOrder:
    """Arguments of a worker's process.

    Attributes:
        directory: Directory of the reports.
        worker: Index of the worker.
        process: Number of the process, from 0. Worker 0's first process starts the job.
        workers: Number of workers.
        addresses: Addresses of the servers.
        steps: Number of steps.
        token: Token of the job, as hexadecimal digits.
        log_directory: Directory of the logs; "" for memory of the process.
        max_norm: Bound of the gradients' norm; 0 for none.
        deadline: Seconds of silence after which servers shut a worker out.
        timeout: See `Job`.
        retry_seconds: See `Job`.
    """

    directory: str
    worker: int
    process: int
    workers: int
    addresses: list[str]
    steps: int
    token: str
    log_directory: str = ""
    max_norm: float = 0.0
    deadline: float = 60.0
    timeout: float = 60.0
    retry_seconds: float = 0.1

    @property
    def report(self) -> Path:
        """Path of the process's reports, without a suffix."""
        return Path(self.directory, f"worker-{self.worker}-{self.process}")


def make_model() -> nn.Module:
    """Return the model with its first weights."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(_FEATURES, _HIDDEN), nn.Tanh(), nn.Linear(_HIDDEN, _HIDDEN), nn.Tanh(),
        nn.Linear(_HIDDEN, _OUTPUTS),
    )  # fmt: skip


def batch(step: int, worker: int, workers: int) -> tuple[Tensor, Tensor]:
    """Return a worker's part of the batch of a step."""
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(_SAMPLES, _FEATURES, generator=generator)
    y = torch.randn(_SAMPLES, _OUTPUTS, generator=generator)
    part = slice(worker * _SAMPLES // workers, (worker + 1) * _SAMPLES // workers)
    return x[part], y[part]


def model_keys(model: nn.Module, servers: int) -> tuple[Key, ...]:
    """Return the keys of a model of float32 parameters."""
    return float32_keys(dict(model.named_parameters()), servers, _KEY_BYTES)


def adamw(model: nn.Module) -> tuple[protocol.OptimizerSetup, bytes]:
    """Return AdamW for the servers, and its options for a push."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    return setup_of(optimizer), packed_options(optimizer)


def train(order: WorkerOrder) -> bytes:
    """Train as one worker; return the bytes of the final weights."""
    model = make_model()
    parameters = dict(model.named_parameters())
    keys, (optimizer, options) = model_keys(model, len(order.addresses)), adamw(model)
    session = WorkerSession(
        Job(
            token=bytes.fromhex(order.token),
            worker=order.worker,
            workers=order.workers,
            servers=order.addresses,
            keys=keys,
            optimizers=[optimizer],
            worker_deadline=order.deadline,
            timeout=order.timeout,
            retry_seconds=order.retry_seconds,
            log_directory=Path(order.log_directory) if order.log_directory else None,
        ),
        KeyedParameters(parameters),
    )
    try:
        if order.worker == order.process == 0:
            session.start()
        first = session.join()
        report_step(order, first)
        for step in range(first, order.steps):
            x, y = batch(step, order.worker, order.workers)
            model.zero_grad()
            nn.functional.mse_loss(model(x), y).backward()
            for key in reversed(keys):
                gradient = parameters[key.name].grad
                session.push(key.index, gradient, options, is_held=order.max_norm > 0)
            if order.max_norm:
                session.commit(norm_scale(session.wait_merged(), order.max_norm))
            session.wait()
            session.land()
            report_step(order, step + 1)
        session.leave()
    finally:
        session.close()
    return b"".join(byte_array(value.detach()).tobytes() for value in parameters.values())


def report_step(order: WorkerOrder, step: int) -> None:
    """Report the number of finished steps."""
    write_whole(order.report.with_suffix(".step"), str(step).encode())


def write_whole(path: Path, data: bytes) -> None:
    """Write a file that no reader sees half written."""
    partial = path.with_name(path.name + ".partial")
    partial.write_bytes(data)
    partial.replace(path)


def worker_main() -> int:
    """Train; the argument of the process is a `WorkerOrder` as JSON."""
    torch.set_num_threads(1)
    order = WorkerOrder(**json.loads(sys.argv[1]))
    try:
        write_whole(order.report.with_suffix(".weights"), train(order))
    except PeerLostError as error:
        write_whole(order.report.with_suffix(".lost"), str(error).encode())
        return 1
    except BaseException:
        traceback.print_exc()
        raise
    return 0


def server_main() -> int:
    """Serve until killed; the arguments are a file for the address, a port, and a snapshot
    directory with seconds between two snapshots, or nothing."""
    torch.set_num_threads(1)
    address, port, *snapshot = sys.argv[1:]
    options: dict[str, Any] = {}
    if snapshot:
        options = {"snapshot": Path(snapshot[0]), "snapshot_every": float(snapshot[1])}
    with ParameterServer(port=int(port), **options) as server:
        write_whole(Path(address), server.address.encode())
        signal.pause()
    return 0


def server_status(address: str, timeout: float = 20.0) -> protocol.ServerStatus:
    """Return the state of a server."""
    client = Client("status", address)
    try:
        client.send(protocol.STATUS)
        return client.expect(timeout, "the state").decode(protocol.ServerStatus)
    finally:
        client.close()
