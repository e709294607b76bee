"""Control group that limits the memory of a process; needs root."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

_ROOT = Path("/sys/fs/cgroup")


@contextmanager
def memory_limit(nbytes: int) -> Iterator[list[str]]:
    """Context manager that makes a group; it yields the start of a command that runs in it.

    The kernel kills a process that exceeds the limit. Page cache counts, but is freed first.
    """
    is_unified = (_ROOT / "cgroup.controllers").exists()
    parent = _ROOT if is_unified else _ROOT / "memory"
    group = parent / f"dlres-test-{uuid.uuid4().hex}"
    try:
        group.mkdir()
        limit = group / ("memory.max" if is_unified else "memory.limit_in_bytes")
        limit.write_text(str(nbytes))
    except OSError as error:
        pytest.skip(f"control groups for memory cannot be made here: {error}")
    swap = group / ("memory.swap.max" if is_unified else "memory.memsw.limit_in_bytes")
    if swap.exists():
        swap.write_text("0" if is_unified else str(nbytes))
    try:
        yield ["sh", "-c", f'echo $$ > {group}/cgroup.procs && exec "$@"', "sh"]
    finally:
        group.rmdir()
