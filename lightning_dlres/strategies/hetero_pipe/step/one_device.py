"""User code that runs on one rank for all of them sees a single device, as in plain training.

Rank 0 alone reads the data, and a training step runs once for the whole batch. Code that divides
its work by rank and world size would do a part of it, and the other parts would be lost.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from lightning_dlres import _compat
from lightning_dlres.core.errors import UnsupportedStepError

# How launchers tell a process of the others.
_WORLD_SIZES = {
    *("WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE", "SLURM_NTASKS", "SLURM_NPROCS"),
    *("OMPI_COMM_WORLD_SIZE", "PMI_SIZE"),
}
_RANKS = {
    *("RANK", "LOCAL_RANK", "GROUP_RANK", "NODE_RANK", "SLURM_PROCID", "SLURM_LOCALID"),
    *("SLURM_NODEID", "OMPI_COMM_WORLD_RANK", "PMI_RANK"),
}
_state = threading.local()


def is_alone() -> bool:
    """Return whether the calling thread runs user code that sees a single device."""
    return bool(getattr(_state, "depth", 0))


@contextmanager
def alone(where: str, collectives: bool = False) -> Iterator[None]:
    """Context manager that shows this thread one process of rank 0: in `torch.distributed`, in
    environment variables, and through the Trainer. Worker processes that it forks inherit this.

    Args:
        where: the user code, for messages.
        collectives: whether all ranks run this code, so that it may call collectives.
    """
    if is_alone():
        yield
        return
    _state.depth = 1
    saved_class, restore_rank = type(os.environ), _compat.pose_as_rank_zero()
    restore_group = _compat.replace_default_group(lambda real: _stand_in(real, where, collectives))
    os.environ.__class__ = _OneProcess
    try:
        yield
    finally:
        os.environ.__class__ = saved_class
        restore_group()
        restore_rank()
        _state.depth = 0


class _OneProcess(type(os.environ)):  # type: ignore[misc]
    """The environment variables, with one process in the job for threads that are alone."""

    def __getitem__(self, key: str) -> str:
        value: str = super().__getitem__(key)
        if is_alone():
            return "1" if key in _WORLD_SIZES else "0" if key in _RANKS else value
        return value


def _stand_in(group: Any, where: str, collectives: bool) -> Any:
    return _OneRank(group, where, collectives) if is_alone() else group


class _OneRank:
    """The default process group as user code sees it that runs on one rank."""

    def __init__(self, group: Any, where: str, collectives: bool) -> None:
        self._group, self._where, self._collectives = group, where, collectives

    def rank(self) -> int:
        return 0

    def size(self) -> int:
        return 1

    def __getattr__(self, name: str) -> Any:
        if self._collectives or name.startswith("__"):
            return getattr(self._group, name)
        raise UnsupportedStepError(
            f"{self._where} calls torch.distributed ({name}), and runs on one rank for all: the "
            "others would not join. Remove the call; one rank has the whole batch."
        )
