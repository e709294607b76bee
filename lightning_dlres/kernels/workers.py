"""Threads for kernels that let go of the interpreter's lock: as many as torch computes with.

Numba's own parallel loops may run on a layer that breaks down when two threads call it at a time,
and in a forked process; a copy in the background does the one, a data loader the other."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch

T = TypeVar("T")
_pool: ThreadPoolExecutor | None = None


def count() -> int:
    """Return how many threads compute at once, the calling one included."""
    return max(torch.get_num_threads(), 1)


def run(tasks: Sequence[Callable[[], T]]) -> list[T]:
    """Run tasks at once, the last one in this thread, and return what they return, in order.

    Raises:
        Exception: what the first failing task has raised, once all have ended.
    """
    if len(tasks) < 2:
        return [task() for task in tasks]
    others = [_threads().submit(task) for task in tasks[:-1]]
    try:
        last = tasks[-1]()
    finally:
        for other in others:
            other.exception()
    return [*(other.result() for other in others), last]


def _threads() -> ThreadPoolExecutor:
    global _pool
    if _pool is None:
        _pool = ThreadPoolExecutor(os.cpu_count() or 1, thread_name_prefix="dlres-kernels")
    return _pool


def _forget() -> None:
    global _pool
    _pool = None


# A fork has the object, and none of its threads.
os.register_at_fork(after_in_child=_forget)
