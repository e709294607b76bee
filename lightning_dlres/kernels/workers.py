"""Threads for kernels that release the interpreter's lock: as many as torch computes with.

Numba's own parallel loops may use a threading layer that crashes in two cases. One is two threads
that call it at once, as a background copy does. The other is a forked process, as of a data loader.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch

T = TypeVar("T")
_pool: ThreadPoolExecutor | None = None


def count() -> int:
    """Return the number of threads that compute at once, including the calling thread."""
    return max(torch.get_num_threads(), 1)


def run(tasks: Sequence[Callable[[], T]]) -> list[T]:
    """Run tasks in parallel, the last one in this thread; return their results in order.

    Raises:
        Exception: The first failing task's exception, after all tasks have ended.
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


def _forget_pool() -> None:
    global _pool
    _pool = None


# A forked process has the pool object, but none of its threads.
os.register_at_fork(after_in_child=_forget_pool)
