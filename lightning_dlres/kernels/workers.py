"""Thread pool for kernels that release the interpreter's lock.

It replaces Numba's parallel loops, whose threading layer may crash in two cases: if two threads use
it at once (training and a background copy), and in a forked process (a data loader's worker).
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
        Exception: The exception of the last task if that fails, else of the first task in order
            that fails. Raised after all tasks have ended.
    """
    if len(tasks) < 2:
        return [task() for task in tasks]
    futures = [_thread_pool().submit(task) for task in tasks[:-1]]
    try:
        last = tasks[-1]()
    finally:
        # Wait for all, even after an error: a running task may still write to its output.
        for future in futures:
            future.exception()
    return [*(future.result() for future in futures), last]


def _thread_pool() -> ThreadPoolExecutor:
    global _pool
    if _pool is None:
        _pool = ThreadPoolExecutor(os.cpu_count() or 1, thread_name_prefix="dlres-kernels")
    return _pool


def _forget_pool() -> None:
    global _pool
    _pool = None


# A forked process has the pool object, but none of its threads.
os.register_at_fork(after_in_child=_forget_pool)
