"""Jobs and messages for tests that need no server."""

from __future__ import annotations

import numpy as np
import torch

from lightning_dlres.core.arrays import byte_array
from lightning_dlres.paramserver import protocol
from lightning_dlres.paramserver.execute.server.optimizers import optimizer_name
from lightning_dlres.paramserver.execute.server.shard import Shard
from lightning_dlres.paramserver.plan.keys import Key

TOKEN = b"t" * protocol.TOKEN_BYTES


def small_keys(sizes: list[int]) -> list[Key]:
    """Return keys of whole float32 parameters with these numbers of elements."""
    return [
        Key(
            index=index,
            name=f"p{index}",
            start=0,
            count=size,
            shape=(size,),
            dtype="float32",
            optimizer=0,
            group=0,
            server=0,
            nbytes=4 * size,
        )
        for index, size in enumerate(sizes)
    ]


def make_setup(
    keys: list[Key],
    workers: int,
    *,
    consistency: str = "bsp",
    staleness: int = 0,
    optimizer: type[torch.optim.Optimizer] = torch.optim.SGD,
) -> protocol.JobSetup:
    """Return a job of one server."""
    return protocol.JobSetup(
        job=TOKEN,
        workers=workers,
        consistency=consistency,
        staleness=staleness,
        server=0,
        servers=1,
        keys=keys,
        optimizers=[protocol.OptimizerSetup(name=optimizer_name(optimizer), groups=[{"lr": 1.0}])],
        worker_deadline=60.0,
        codec="",
        codec_options={},
    )


def started_shard(setup: protocol.JobSetup, *, is_persistent: bool = False) -> Shard:
    """Return a shard whose parameters are zeros, with all workers present."""
    shard = Shard(setup, is_persistent=is_persistent)
    for key in setup.keys:
        load = protocol.Load(
            job=TOKEN,
            worker=0,
            incarnation=1,
            key=key.index,
            number=0,
            state="",
            dtype=key.dtype,
            shape=key.shape,
        )
        shard.load(load, memoryview(bytes(key.nbytes)))
    shard.start()
    for worker in range(setup.workers):
        shard.members.admit(protocol.Request(job=TOKEN, worker=worker, incarnation=1), "", 0.0)
    return shard


def push_of(
    key: Key, worker: int, number: int, value: float, *, is_held: bool = False, base: int = 0
) -> tuple[protocol.Push, memoryview]:
    """Return a push of a gradient whose elements are equal."""
    push = protocol.Push(
        job=TOKEN,
        worker=worker,
        incarnation=1,
        key=key.index,
        number=number,
        options=b"\x81\xa2lr\xcb" + np.float64(1.0).byteswap().tobytes(),
        codec="",
        has_gradient=True,
        is_held=is_held,
        clip_value=0.0,
        base=base,
    )
    return push, memoryview(byte_array(torch.full((key.count,), value)).tobytes())
