"""Contenders of benchmarks/parameter_server.py: ways to update from all workers' gradients.

Both end a step with the same parameters on all workers: DistributedDataParallel's all-reduce and an
update on each worker, or pushes, updates on servers and pulls.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.support.parameter_server.jobs import open_session, packed_options

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
        optimizer = torch.optim.SGD(self.parameters.values(), **_OPTIONS)  # type: ignore[arg-type]
        self._options = packed_options(optimizer)
        self.session = open_session(
            self.parameters,
            optimizer,
            token=bytes.fromhex(token),
            worker=rank,
            workers=workers,
            servers=servers,
            key_bytes=key_bytes,
        )

    def step(self) -> None:
        """Push all gradients in the order of backward, and land all parameters."""
        for one in reversed(self.session.exchange.keys):
            self.session.push(one.key.index, self._gradients[one.key.name], self._options)
        self.session.wait()
        self.session.land()


def timed_steps(contender: Any, count: int) -> float:
    """Return the mean seconds of a step, after a barrier of all workers."""
    dist.barrier()
    start = time.perf_counter()
    for _ in range(count):
        contender.step()
    return (time.perf_counter() - start) / count
