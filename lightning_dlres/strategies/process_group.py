"""torch's default process group, which is made anew after a run that has failed.

A rank that learns of a failure may leave a transfer or a collective call that others never answer.
In a later run of the same processes it would be taken for the first call of that run.
"""

from __future__ import annotations

import os
import time
import weakref
from datetime import timedelta

import torch
import torch.distributed as dist
from lightning.fabric.plugins import ClusterEnvironment
from torch.distributed.distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import rendezvous

from lightning_dlres.core.checks import instance, one_of
from lightning_dlres.core.errors import PeerTimeoutError

# Backends that torch lists, and that send nothing to other ranks.
_BACKENDS_WITHOUT_TRANSFERS = {"fake", "undefined"}
# Time between two looks for the answers of other ranks, in seconds.
_POLL_SECONDS = 0.01


def check_backend(backend: object) -> None:
    """Check the argument `process_group_backend`, such as "gloo" or "cpu:gloo,cuda:nccl".

    Raises:
        ConfigError: If it is neither None nor a name of a backend.
    """
    if backend is None:
        return
    name, fix = "process_group_backend", "process_group_backend='gloo'"
    instance(name, backend, (str,), "the name of a backend of torch.distributed", fix)
    for part in str(backend).lower().split(","):
        known = set(dist.Backend.backend_list) - _BACKENDS_WITHOUT_TRANSFERS
        one_of(name, part.split(":")[-1], sorted(known), fix)


class DefaultGroup:
    """torch's default process group in this process.

    All ranks join it for each run, in the same order.
    """

    def __init__(self) -> None:
        self._store: Store | None = None
        self._group: weakref.ref[dist.ProcessGroup] | None = None
        self._joins, self._has_failed = 0, False

    def note_failure(self) -> None:
        """Note that a run of this process has failed, so that the group may have open transfers."""
        self._has_failed = True

    def join(
        self,
        environment: ClusterEnvironment,
        backend: str | None,
        *,
        limit: timedelta | None,
        wait_seconds: float,
        device: torch.device | None = None,
    ) -> None:
        """Initialise the group, unless it is initialised and no run on it has failed.

        A group that other code has initialised stays.

        Args:
            environment: Lightning's cluster environment.
            backend: Backend of torch.distributed; None chooses gloo, which takes ranks with devices
                of different kinds.
            limit: Time after which a collective call fails; None takes that of torch.
            wait_seconds: Time that this rank waits for others to begin a further run.
            device: This rank's GPU, for which torch prepares the group; None on the CPU.

        Raises:
            PeerTimeoutError: If other ranks do not begin a further run in time.
        """
        rank, world_size = environment.global_rank(), environment.world_size()
        if not dist.is_initialized():
            os.environ["MASTER_ADDR"] = environment.main_address
            os.environ["MASTER_PORT"] = str(environment.main_port)
            # A store of an earlier group would keep the port.
            self._store = None
            options = {} if limit is None else {"timeout": limit}
            self._store, _, _ = next(rendezvous("env://", rank, world_size, **options))
            self._joins = 0
        elif not self._is_own or not self._has_failed_anywhere(rank, world_size, wait_seconds):
            return
        else:
            dist.destroy_process_group()
        assert self._store is not None
        dist.init_process_group(
            backend or "gloo",
            store=PrefixStore(f"run {self._joins}", self._store),
            rank=rank,
            world_size=world_size,
            timeout=limit,
            device_id=device,
        )
        assert dist.group.WORLD is not None
        self._group, self._has_failed = weakref.ref(dist.group.WORLD), False

    @property
    def _is_own(self) -> bool:
        """True if this object has made the present default group."""
        return self._group is not None and self._group() is dist.group.WORLD

    def _has_failed_anywhere(self, rank: int, world_size: int, wait_seconds: float) -> bool:
        """Return, on all ranks alike, whether a run on the group has failed on any."""
        assert self._store is not None
        self._joins += 1
        keys = [f"dlres: join {self._joins} of rank {other}" for other in range(world_size)]
        self._store.set(keys[rank], "failed" if self._has_failed else "fine")
        deadline = time.monotonic() + wait_seconds
        # The store's own wait would let no signal handler run.
        while not self._store.check(keys):
            if time.monotonic() > deadline:
                late = [r for r, key in enumerate(keys) if not self._store.check([key])]
                names = " and ".join(f"rank {other}" for other in late)
                raise PeerTimeoutError(
                    f"rank {rank} waited {wait_seconds:g} s for {names} to begin the run. All "
                    "ranks must call the same methods of the Trainer. If one is only slow, raise "
                    "the strategy's timeout."
                )
            time.sleep(_POLL_SECONDS)
        return any(self._store.get(key) == b"failed" for key in keys)


DEFAULT_GROUP = DefaultGroup()
"""The group of this process: torch has one."""
