"""View of the process group as a single process, for user code that one rank runs for all ranks.

Rank 0 alone reads the data, and one rank runs the training step for the whole batch. Code that
divides its work by rank and world size would do only a part of it, and no rank would do the rest.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from lightning_dlres import _compat
from lightning_dlres.core.errors import UnsupportedStepError

# Environment variables in which launchers give a process the number of processes, and its rank.
_WORLD_SIZES = {
    *("WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE", "SLURM_NTASKS", "SLURM_NPROCS"),
    *("OMPI_COMM_WORLD_SIZE", "PMI_SIZE"),
}
_RANKS = {
    *("RANK", "LOCAL_RANK", "GROUP_RANK", "NODE_RANK", "SLURM_PROCID", "SLURM_LOCALID"),
    *("SLURM_NODEID", "OMPI_COMM_WORLD_RANK", "PMI_RANK"),
}
_state = threading.local()


def sees_single_device() -> bool:
    """Return whether the calling thread is inside `single_device_view`."""
    return bool(getattr(_state, "is_active", False))


@contextmanager
def single_device_view(user_code: str, allows_collectives: bool = False) -> Iterator[None]:
    """Context manager in which this thread sees a job with one process, whose rank is 0.

    `torch.distributed`, environment variables and the Trainer show this job. Other threads see the
    real one, but Lightning's `rank_zero_only` functions run in all threads. Worker processes that
    the thread forks inherit the view. Nested uses have no effect.

    Args:
        user_code: Name of the user code, for messages.
        allows_collectives: Whether all ranks run this code, so that it may call collectives.

    Raises:
        UnsupportedStepError: If the code calls a collective without `allows_collectives`; raised by
            the call.
    """
    if sees_single_device():
        yield
        return
    _state.is_active = True
    environ_class, restore_rank = type(os.environ), _compat.pose_as_rank_zero()
    restore_group = _compat.replace_default_group(
        lambda real: _group_for_thread(real, user_code, allows_collectives)
    )
    os.environ.__class__ = _OneProcessEnviron
    try:
        yield
    finally:
        os.environ.__class__ = environ_class
        restore_group()
        restore_rank()
        _state.is_active = False


class _OneProcessEnviron(type(os.environ)):  # type: ignore[misc]
    """Environment variables that show one process to threads inside `single_device_view`."""

    def __getitem__(self, key: str) -> str:
        value: str = super().__getitem__(key)
        if sees_single_device():
            return "1" if key in _WORLD_SIZES else "0" if key in _RANKS else value
        return value


def _group_for_thread(group: Any, user_code: str, allows_collectives: bool) -> Any:
    """Return the group that the calling thread sees: the real one outside of the view."""
    if not sees_single_device():
        return group
    return _OneRankGroup(group, user_code, allows_collectives)


class _OneRankGroup:
    """Stand-in for the default process group that shows rank 0 and size 1."""

    def __init__(self, group: Any, user_code: str, allows_collectives: bool) -> None:
        self._group, self._user_code = group, user_code
        self._allows_collectives = allows_collectives

    def rank(self) -> int:
        return 0

    def size(self) -> int:
        return 1

    def __getattr__(self, name: str) -> Any:
        if self._allows_collectives or name.startswith("__"):
            return getattr(self._group, name)
        raise UnsupportedStepError(
            f"{self._user_code} must not call torch.distributed, got a call of {name}. This code "
            "runs on one rank on behalf of all, so the other ranks would not join the call. Remove "
            "the call; this rank has the whole batch."
        )
