"""Freed blocks leave the process while a context asks for it."""

from __future__ import annotations

import subprocess
import sys

import pytest

from lightning_dlres.core.host.lightweight_process import lightweight_command

MIB = 1 << 20


@pytest.mark.skipif(sys.platform != "linux", reason="needs Linux")
def test_freed_tensors_leave_the_process_while_a_context_is_open() -> None:
    done = subprocess.run(
        lightweight_command("tests.core.host.freed_memory_script:main"),
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    within, in_second, after, after_error = (int(line) / MIB for line in done.stdout.split())
    assert min(within, in_second) > 60
    # The allocator keeps what fits its heap.
    assert max(after, after_error) < 30
