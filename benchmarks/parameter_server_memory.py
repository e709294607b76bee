"""Memory of a parameter server with many keys, snapshots included, and its restart.

    python -m benchmarks.parameter_server_memory

A server in a process of its own (`dlres ps serve`) gets 10,000 keys with 1 GB of parameters from
one worker. It makes updates and snapshots, is killed in the middle of training, and goes on from
its last snapshot. The bound of its peak memory (VmHWM) is 1.2 times the bytes of parameters,
optimizer state, and one gradient of every parameter. The interpreter and torch are part of the
peak.
"""

from __future__ import annotations

import os
import secrets
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import msgspec
import torch
from torch import Tensor, nn

from benchmarks.support.command import Figures, flags
from benchmarks.support.report import at_least, at_most, conclude, table
from lightning_dlres.core.host.lightweight_process import lightweight_command
from lightning_dlres.paramserver import protocol
from lightning_dlres.paramserver.execute.server.optimizers import optimizer_name, wire_options
from lightning_dlres.paramserver.execute.status_client import StatusClient
from lightning_dlres.paramserver.execute.worker.job import Job
from lightning_dlres.paramserver.execute.worker.session import WorkerSession
from lightning_dlres.paramserver.execute.worker.state.parameters import KeyedParameters
from lightning_dlres.paramserver.plan.keys import Key, ParameterInfo, make_keys
from lightning_dlres.paramserver.protocol import OptimizerSetup

NAME = "parameter_server_memory"
# Largest peak over the bytes of parameters, optimizer state and one gradient of every parameter.
_MOST_MEMORY = 1.2
# Longest wait for anything, in seconds.
_TIMEOUT = 600.0


@dataclass(frozen=True)
class Settings:
    """Sizes of a run.

    Attributes:
        keys: Number of keys.
        elements: float32 elements of each key.
        steps: Number of steps of all keys.
        pulls: Number of timed pulls, each of the next key. As many again run beside a snapshot.
        optimizers: Optimizers, and the bytes of their state for each byte of parameters.
    """

    keys: int = 10_000
    elements: int = 25_000
    steps: int = 3
    pulls: int = 400
    optimizers: tuple[tuple[str, float], ...] = (("SGD", 1.0), ("Adam", 2.0))


QUICK = Settings(keys=50, elements=1000, steps=2, pulls=20, optimizers=(("SGD", 1.0),))


@dataclass
class Server:
    """A server process with snapshots.

    Args:
        directory: Directory of the snapshots.
        port: Port of the server. It is not 0, since a server finds its snapshot by its port.

    Attributes:
        address: Address of the server.
        seconds: Seconds from the start of the process until it serves. It loads its snapshot, if
            there is one, in this time.
    """

    directory: Path
    port: int
    address: str = field(init=False)
    seconds: float = field(init=False)

    def __post_init__(self) -> None:
        start = time.perf_counter()
        function = "lightning_dlres.cli.parameter_server:serve_main"
        options = ["--port", str(self.port), "--snapshot", str(self.directory)]
        command = lightweight_command(function, "serve", *options, "--snapshot-every", "1h")
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert self._process.stdout is not None
        self.address = self._process.stdout.readline().rpartition(": ")[2].strip()
        self.seconds = time.perf_counter() - start

    @property
    def peak_bytes(self) -> int:
        """Largest resident memory so far."""
        text = Path(f"/proc/{self._process.pid}/status").read_text()
        return 1024 * int(text.partition("VmHWM:")[2].split()[0])

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()


class Worker:
    """The only worker of a job.

    Args:
        address: Address of the server.
        settings: Sizes.
        optimizer: Name of the optimizer's class in torch.
        token: Token of the job.
    """

    def __init__(self, address: str, settings: Settings, optimizer: str, token: bytes) -> None:
        generator = torch.Generator().manual_seed(0)
        flat = torch.randn(settings.keys, settings.elements, generator=generator)
        self.parameters: dict[str, Tensor] = {f"layer{n}": one for n, one in enumerate(flat)}
        self._gradient = torch.randn(settings.elements, generator=generator)
        momentum = {"momentum": 0.9} if optimizer == "SGD" else {}
        kind = getattr(torch.optim, optimizer)
        made = kind([nn.Parameter(torch.ones(1))], lr=1e-3, **momentum)
        group = wire_options(made.param_groups[0], made.defaults)
        self._options = msgspec.msgpack.encode(group)
        self.keys = _keys(settings)
        job = Job(
            token=token,
            worker=0,
            workers=1,
            servers=[address],
            keys=self.keys,
            optimizers=[OptimizerSetup(name=optimizer_name(kind), groups=[group])],
            timeout=_TIMEOUT,
            worker_deadline=_TIMEOUT,
            retry_seconds=2.0,
        )
        self.session = WorkerSession(job, KeyedParameters(self.parameters))
        (self._link,) = self.session._links

    def update(self, keys: Sequence[Key]) -> None:
        """Push a gradient of each key, and land the new values."""
        for key in keys:
            self.session.push(key.index, self._gradient, self._options)
        self.session.wait()
        self.session.land()

    def pull(self, key: Key) -> None:
        """Ask for the value of a key, and land it."""
        exchange = self.session.exchange
        with exchange.lock:
            number = exchange.keys[key.index].number
            exchange.expect(key.index, number, is_queued=False)
            self._link.post(protocol.PULL, exchange.key_request(key.index, number))
        self.session.wait()
        self.session.land()

    def snapshot(self) -> None:
        """Ask the server for a snapshot."""
        self._link.post(protocol.SNAPSHOT, self.session.exchange.request())


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print, and return the exit status."""
    settings = QUICK if flags(NAME, __doc__, argv).quick else Settings()
    torch.set_num_threads(1)
    conclude(NAME, *measure(settings))
    return 0


def measure(settings: Settings) -> Figures:
    """Run a server with each optimizer."""
    checks, raw, rows = {}, {}, []
    for optimizer, factor in settings.optimizers:
        figures = _measure(settings, optimizer)
        parameters = 4 * settings.keys * settings.elements
        tensor_bytes = (2 + factor) * parameters
        for phase in ("first", "restarted"):
            peak = figures[f"{phase}_peak_bytes"]
            checks[f"{optimizer}: peak of the {phase} server over its tensors"] = at_most(
                peak / tensor_bytes, _MOST_MEMORY
            )
        checks[f"{optimizer}: values equal after the restart"] = at_least(figures["equal"], 1)
        rows.append(
            [
                optimizer,
                tensor_bytes / 1e9,
                figures["first_peak_bytes"] / 1e9,
                figures["restarted_peak_bytes"] / 1e9,
                figures["start"],
                figures["snapshot"],
                figures["restart"],
                1e3 * figures["pull_p99"],
                1e3 * figures["snapshot_pull_p99"],
            ]
        )
        raw[optimizer] = figures
    columns = ["optimizer", "GB tensors", "GB peak", "GB peak, restarted", "worker's start s"]
    columns += ["snapshot s", "server's restart s", "pull p99 ms", "beside snapshot"]
    print(table(columns, rows))
    return checks, raw


def _measure(settings: Settings, optimizer: str) -> dict[str, Any]:
    figures: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(dir=os.environ.get("TMPDIR")) as name:
        server = Server(Path(name), _free_port())
        token = secrets.token_bytes(16)
        worker = Worker(server.address, settings, optimizer, token)
        status = StatusClient([server.address])
        try:
            start = time.perf_counter()
            # The worker sends the parameters to the server in its start.
            worker.session.start()
            worker.session.join()
            figures["start"] = time.perf_counter() - start
            for _ in range(settings.steps):
                worker.update(worker.keys)
            figures |= _timed(worker, settings, "")
            start = time.perf_counter()
            worker.snapshot()
            figures |= _timed(worker, settings, "snapshot_")
            worker.update(worker.keys)
            # The wait ends after the pulls and the update, the snapshot possibly before.
            figures["snapshot"] = _wait_for_snapshot(status, since=start) - start
            worker.snapshot()
            worker.update(worker.keys)
            figures["first_peak_bytes"] = server.peak_bytes
            server.kill()
            server = Server(Path(name), server.port)
            figures["restart"] = server.seconds
            # The worker sends again what the snapshot lacks.
            worker.update(worker.keys)
            expected = worker.parameters
            worker.session.close()
            # A later process of the worker takes the values of the server.
            worker = Worker(server.address, settings, optimizer, token)
            worker.session.join()
            same = [torch.equal(one, expected[n]) for n, one in worker.parameters.items()]
            figures["equal"] = sum(same) / len(same)
            start = time.perf_counter()
            worker.update(worker.keys)
            worker.snapshot()
            _wait_for_snapshot(status, since=start)
            figures["restarted_peak_bytes"] = server.peak_bytes
            worker.session.leave()
        finally:
            worker.session.close()
            status.close()
            server.kill()
    return figures


def _timed(worker: Worker, settings: Settings, prefix: str) -> dict[str, float]:
    """Return median and 99th percentile of the seconds of a pull of one key."""
    seconds = []
    for number in range(settings.pulls):
        start = time.perf_counter()
        worker.pull(worker.keys[number % len(worker.keys)])
        seconds.append(time.perf_counter() - start)
    return {
        f"{prefix}pull_median": median(seconds),
        f"{prefix}pull_p99": quantiles(seconds, n=100)[-1],
    }


def _wait_for_snapshot(status: StatusClient, since: float) -> float:
    """Wait until a snapshot has ended after the time `since`; return the time of its end.

    The times are those of `time.perf_counter`.
    """
    deadline = time.perf_counter() + _TIMEOUT
    while time.perf_counter() < deadline:
        (sample,) = status.ask(10.0)
        if sample.status is not None and sample.status.snapshot_error:
            raise RuntimeError(f"no snapshot: {sample.status.snapshot_error}")
        if sample.status is not None and sample.status.snapshot_seconds >= 0:
            ended = time.perf_counter() - sample.status.snapshot_seconds
            if ended > since:
                return ended
        time.sleep(0.1)
    raise TimeoutError("waited for a snapshot")


def _keys(settings: Settings) -> tuple[Key, ...]:
    infos = [
        ParameterInfo(
            name=f"layer{number}",
            shape=(settings.elements,),
            dtype="float32",
            itemsize=4,
            optimizer=0,
            group=0,
            is_divisible=True,
        )
        for number in range(settings.keys)
    ]
    return make_keys(infos, 1, 1 << 20)


def _free_port() -> int:
    import socket

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port: int = free.getsockname()[1]
        return port


if __name__ == "__main__":
    sys.exit(main())
