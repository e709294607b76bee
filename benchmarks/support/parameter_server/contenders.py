"""Contenders of benchmarks/parameter_server.py: ways to make one update from all workers' gradients.

Both end a step with the same parameters on all workers: DistributedDataParallel's all-reduce and an
update on each worker, or pushes, updates on servers and pulls.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor

from lightning_dlres.paramserver.execute.server.optimizers import optimizer_name, wire_options
from lightning_dlres.paramserver.execute.worker.job import Job
from lightning_dlres.paramserver.execute.worker.parameters import KeyedParameters
from lightning_dlres.paramserver.execute.worker.session import WorkerSession
from lightning_dlres.paramserver.plan.keys import ParameterInfo, make_keys
from lightning_dlres.paramserver.protocol import OptimizerSetup

# Width and number of the layers: 25.2 MB of gradients in float32.
WIDTH, LAYERS = 512, 24
_OPTIONS = {"lr": 1e-3, "momentum": 0.9}


def make_parameters(layers: int = LAYERS) -> dict[str, Tensor]:
    """Return the parameters of linear layers, in the order of forward."""
    generator = torch.Generator().manual_seed(0)
    parameters = {}
    for layer in range(layers):
        parameters[f"{layer}.weight"] = torch.randn(WIDTH, WIDTH, generator=generator)
        parameters[f"{layer}.bias"] = torch.zeros(WIDTH)
    return parameters


def make_gradients(parameters: dict[str, Tensor], rank: int) -> dict[str, Tensor]:
    """Return a gradient of each parameter."""
    generator = torch.Generator().manual_seed(1 + rank)
    return {name: torch.randn(p.shape, generator=generator) for name, p in parameters.items()}


class AllReduce:
    """All-reduce of buckets over gloo, as DistributedDataParallel makes it, and an update.

    Args:
        rank: Index of the worker.
        workers: Number of workers.
        bucket_mb: Size of a bucket in MB.
    """

    def __init__(self, rank: int, workers: int, bucket_mb: float) -> None:
        self._workers, self.parameters = workers, make_parameters()
        self._gradients = make_gradients(self.parameters, rank)
        self._buckets: list[tuple[Tensor, list[str]]] = []
        names: list[str] = []
        for name in reversed(self.parameters):
            names.append(name)
            if 4 * sum(self.parameters[n].numel() for n in names) >= bucket_mb * 1e6:
                self._add_bucket(names)
                names = []
        if names:
            self._add_bucket(names)
        self._optimizer = torch.optim.SGD(self.parameters.values(), **_OPTIONS)  # type: ignore[arg-type]

    def _add_bucket(self, names: Sequence[str]) -> None:
        bucket = torch.empty(sum(self.parameters[name].numel() for name in names))
        start = 0
        for name in names:
            parameter = self.parameters[name]
            parameter.grad = bucket[start : start + parameter.numel()].view_as(parameter)
            start += parameter.numel()
        self._buckets.append((bucket, list(names)))

    def step(self) -> None:
        """Reduce all gradients, and update."""
        works = []
        for bucket, names in self._buckets:
            for name in names:
                # Backward would write the gradient here.
                gradient = self.parameters[name].grad
                assert gradient is not None
                torch.div(self._gradients[name], self._workers, out=gradient)
            works.append(dist.all_reduce(bucket, async_op=True))
        for work in works:
            work.wait()
        self._optimizer.step()


class ParameterServers:
    """Pushes of all gradients, and pulls of all parameters.

    Args:
        rank: Index of the worker.
        workers: Number of workers.
        servers: Addresses of the servers.
        token: Token of the job, in hexadecimal digits.
        key_bytes: Largest number of bytes of a key.
    """

    def __init__(
        self, rank: int, workers: int, *, servers: Sequence[str], token: str, key_bytes: int
    ) -> None:
        self.parameters = make_parameters()
        self._gradients = make_gradients(self.parameters, rank)
        self.session, self._options = open_session(
            self.parameters,
            rank=rank,
            workers=workers,
            servers=servers,
            token=token,
            key_bytes=key_bytes,
            optimizer=torch.optim.SGD(self.parameters.values(), **_OPTIONS),  # type: ignore[arg-type]
        )

    def step(self) -> None:
        """Push all gradients in the order of backward, and land all parameters."""
        for one in reversed(self.session.exchange.keys):
            self.session.push(one.key.index, self._gradients[one.key.name], self._options)
        self.session.wait()
        self.session.land()


def open_session(
    parameters: dict[str, Tensor],
    *,
    rank: int,
    workers: int,
    servers: Sequence[str],
    token: str,
    key_bytes: int,
    optimizer: torch.optim.Optimizer,
) -> tuple[WorkerSession, bytes]:
    """Join a job; return the session, and the optimizer's options as msgpack."""
    options = wire_options(optimizer.param_groups[0], optimizer.defaults)
    infos = [
        ParameterInfo(
            name=name,
            shape=tuple(parameter.shape),
            dtype="float32",
            itemsize=4,
            optimizer=0,
            group=0,
            is_divisible=True,
        )
        for name, parameter in parameters.items()
    ]
    job = Job(
        token=bytes.fromhex(token),
        worker=rank,
        workers=workers,
        servers=servers,
        keys=make_keys(infos, len(servers), key_bytes),
        optimizers=[OptimizerSetup(name=optimizer_name(type(optimizer)), groups=[options])],
    )
    session = WorkerSession(job, KeyedParameters(parameters))
    if rank == 0:
        session.start()
    session.join()
    return session, msgspec.msgpack.encode(options)


def timed_steps(contender: Any, count: int) -> float:
    """Return the mean seconds of a step, after a barrier of all workers."""
    dist.barrier()
    start = time.perf_counter()
    for _ in range(count):
        contender.step()
    return (time.perf_counter() - start) / count
