"""Freed blocks leave the process while a context asks for it."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from lightning_dlres.core.host.freed_memory import returning_freed_memory

MIB = 1 << 20

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="needs Linux")


def anonymous_bytes() -> int:
    """Return the bytes of anonymous memory of this process."""
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    (line,) = [line for line in lines if line.startswith("Anonymous:")]
    return int(line.split()[1]) * 1024


def freed_bytes() -> int:
    """Return the bytes by which the process shrinks when every second of many tensors is freed.

    The others keep a heap from shrinking at its end.
    """
    tensors = [torch.ones(2 * MIB, dtype=torch.uint8) for _ in range(64)]
    before = anonymous_bytes()
    del tensors[::2]
    return before - anonymous_bytes()


def test_freed_tensors_leave_the_process() -> None:
    with returning_freed_memory():
        assert freed_bytes() > 60 * MIB


def test_contexts_may_overlap() -> None:
    first, second = returning_freed_memory(), returning_freed_memory()
    with first:
        second.__enter__()
    assert freed_bytes() > 60 * MIB
    second.__exit__(None, None, None)
    # Now the allocator keeps what fits its heap.
    assert freed_bytes() < 60 * MIB


def test_a_failed_block_closes_its_context() -> None:
    with pytest.raises(ZeroDivisionError), returning_freed_memory():
        _ = 1 / 0
    assert freed_bytes() < 60 * MIB
