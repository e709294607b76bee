"""Limit on the memory of a process, in tests; needs root."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import pytest

from benchmarks.support.memory_limit import memory_group


@contextmanager
def memory_limit(nbytes: int) -> Iterator[list[str]]:
    """Context manager that limits memory; it yields the start of a command that runs within it.

    The test is skipped where no limit can be set.
    """
    with ExitStack() as stack:
        try:
            group = stack.enter_context(memory_group(nbytes))
        except OSError as error:
            pytest.skip(f"control groups for memory cannot be made here: {error}")
        yield group.command
