"""Small jobs of a parameter server, whose workers run in this process."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import msgspec
import torch
from torch import Tensor, nn

from benchmarks.support.parameter_server.jobs import float32_keys, setup_of
from lightning_dlres.paramserver.execute.worker.job import Job
from lightning_dlres.paramserver.execute.worker.session import WorkerSession
from lightning_dlres.paramserver.execute.worker.state.parameters import KeyedParameters
from lightning_dlres.paramserver.plan.keys import Key

# Largest number of bytes of a key: small, so that small models have several.
_KEY_BYTES = 16 << 10
TOKEN = b"a job for testing"[:16]
# Shapes of the parameters of a small model.
SHAPES = MappingProxyType({"matrix": (100, 50), "bias": (50,), "empty": (0, 3)})


@dataclass
class Worker:
    """Worker of a job with random gradients, which depend only on its index and the step.

    Attributes:
        job: Its job.
        parameters: Its parameters.
        options: Options of the optimizer, as msgpack.
        session: Its session.
        steps: Number of steps so far.
    """

    job: Job
    parameters: dict[str, Tensor]
    options: bytes
    session: WorkerSession
    steps: int = field(default=0)

    def step(self) -> None:
        """Push a gradient of each key, wait for the new values, and land them."""
        self.push()
        self.land()

    def push(self) -> None:
        """Push a gradient of each key."""
        generator = torch.Generator().manual_seed(1000 * self.steps + self.job.worker)
        gradients = {
            name: torch.randn(one.shape, generator=generator)
            for name, one in self.parameters.items()
        }
        for key in reversed(self.job.keys):
            self.session.push(key.index, gradients[key.name], self.options)

    def land(self) -> None:
        """Wait for the new values, and land them."""
        self.session.wait()
        self.session.land()
        self.steps += 1


def job_of(
    servers: Sequence[str], optimizer: torch.optim.Optimizer, keys: Sequence[Key], **options: Any
) -> Job:
    """Return the job of worker 0; `options` are further fields of `Job`, or `optimizer_name`."""
    setup = setup_of(optimizer)
    name = options.pop("optimizer_name", setup.name)
    setup = msgspec.structs.replace(setup, name=name)
    arguments: dict[str, Any] = {"token": TOKEN, "worker": 0, "workers": 1, "timeout": 30.0}
    arguments |= options
    return Job(servers=servers, keys=keys, optimizers=[setup], **arguments)


def new_worker(
    servers: Sequence[str],
    shapes: Mapping[str, tuple[int, ...]] = SHAPES,
    *,
    check_peers: Callable[[], None] | None = None,
    **options: Any,
) -> Worker:
    """Return a worker with SGD that has not joined yet.

    Args:
        servers: Addresses of the servers.
        shapes: Shapes of the parameters by name.
        check_peers: See `ServerWaits`.
        options: See `job_of`.
    """
    generator = torch.Generator().manual_seed(0)
    parameters: dict[str, Tensor] = {
        name: torch.randn(shape, generator=generator) for name, shape in shapes.items()
    }
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.01, momentum=0.9)
    keys = float32_keys(parameters, len(servers), _KEY_BYTES)
    job = job_of(servers, optimizer, keys, **options)
    encoded = msgspec.msgpack.encode(job.optimizers[0].groups[0])
    session = WorkerSession(job, KeyedParameters(parameters), check_peers)
    return Worker(job, parameters, encoded, session)
