"""Jobs of a parameter server whose parameters and optimizer are given."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import torch
from torch import Tensor

from lightning_dlres.paramserver.execute.server.optimizers import optimizer_name, wire_options
from lightning_dlres.paramserver.execute.worker.job import Job
from lightning_dlres.paramserver.execute.worker.session import WorkerSession
from lightning_dlres.paramserver.execute.worker.state.parameters import KeyedParameters
from lightning_dlres.paramserver.plan.keys import Key, ParameterInfo, make_keys
from lightning_dlres.paramserver.protocol import OptimizerSetup


def float32_keys(parameters: Mapping[str, Tensor], servers: int, key_bytes: int) -> tuple[Key, ...]:
    """Return the keys of parameters in float32 that one optimizer updates element by element."""
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
    return make_keys(infos, servers, key_bytes)


def setup_of(optimizer: torch.optim.Optimizer) -> OptimizerSetup:
    """Return the description from which servers make an optimizer with one group."""
    group = wire_options(optimizer.param_groups[0], optimizer.defaults)
    return OptimizerSetup(name=optimizer_name(type(optimizer)), groups=[group])


def open_session(
    parameters: Mapping[str, Tensor],
    optimizer: torch.optim.Optimizer,
    *,
    token: bytes,
    worker: int,
    workers: int,
    servers: Sequence[str],
    key_bytes: int,
    **options: Any,
) -> WorkerSession:
    """Join a job, which worker 0 starts; return the session.

    Args:
        parameters: Parameters in float32, by name, in the order of forward.
        optimizer: Optimizer of these parameters, with one group.
        token, worker, workers, servers: See `Job`.
        key_bytes: Largest number of bytes of a key.
        options: Other options of `Job`.
    """
    job = Job(
        token=token,
        worker=worker,
        workers=workers,
        servers=servers,
        keys=float32_keys(parameters, len(servers), key_bytes),
        optimizers=[setup_of(optimizer)],
        **options,
    )
    session = WorkerSession(job, KeyedParameters(parameters))
    if worker == 0:
        session.start()
    session.join()
    return session


def packed_options(optimizer: torch.optim.Optimizer) -> bytes:
    """Return the present options of an optimizer's only group, encoded as in a push."""
    return msgspec.msgpack.encode(wire_options(optimizer.param_groups[0], optimizer.defaults))
