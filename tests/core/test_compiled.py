"""Tests of compiled functions whose cache several processes share."""

from __future__ import annotations

import errno
import fcntl
import os
import subprocess
import textwrap
import threading
from pathlib import Path

import numpy as np
import pytest
from numba import float64, int64

from lightning_dlres.core import compiled as compiled_module
from lightning_dlres.core.compiled import cache_lock, compiled
from lightning_dlres.core.errors import PeerTimeoutError
from lightning_dlres.core.host.lightweight_process import lightweight_command

MODULE = """
    import sys
    import numpy as np
    from numba import float64, int64
    from lightning_dlres.core.compiled import compiled

    KINDS = [(int64[::1],), (float64[::1],)]

    @compiled(*(KINDS if sys.argv[1:] == ["forwards"] else KINDS[::-1]))
    def total(numbers):
        result = numbers[0] - numbers[0]
        for number in numbers:
            result += number
        return result

    def main():
        print(total(np.arange(5)), total(np.arange(5) / 2))
"""
# Deadline of a process or thread, in seconds. Only a failing test waits so long.
DEADLINE = 120


def test_every_process_gets_the_code_for_its_types(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "totals.py").write_text(textwrap.dedent(MODULE))
    cache = tmp_path / "cache"
    environment = {**os.environ, "NUMBA_CACHE_DIR": str(cache)}
    running = [
        subprocess.Popen(
            lightweight_command("totals:main", order),
            env=environment,
            stdout=subprocess.PIPE,
            text=True,
        )
        # The last one loads the code that the others stored.
        for order in ("forwards", "backwards", "forwards")
    ]
    printed = [process.communicate(timeout=DEADLINE)[0].split() for process in running]
    assert printed == [["10", "5.0"]] * 3
    assert len(list(cache.rglob("*.nbc"))) == 2


@pytest.mark.parametrize("writable", [True, False])
def test_network_file_systems_lock_only_writable_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, writable: bool
) -> None:
    lock, open_ = fcntl.flock, os.open
    held = []

    def as_nfs(descriptor: int, kind: int) -> None:
        written = fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_ACCMODE != os.O_RDONLY
        if kind & fcntl.LOCK_EX and not written:
            raise OSError(errno.EBADF, "Bad file descriptor")
        lock(descriptor, kind)
        held.append(kind)

    def of_another_user(path: Path, flags: int, *mode: int) -> int:
        if flags & os.O_RDWR and not writable:
            raise PermissionError(errno.EACCES, "Permission denied")
        return open_(path, flags, *mode)

    monkeypatch.setattr(fcntl, "flock", as_nfs)
    monkeypatch.setattr(os, "open", of_another_user)
    with cache_lock(str(tmp_path)):
        assert bool(held) == writable


def test_other_types_are_refused() -> None:
    @compiled((int64[::1],))
    def first(numbers: np.ndarray) -> int:
        """Return the first."""
        return numbers[0]

    assert first(np.arange(3, 5)) == 3
    assert first.__doc__ == "Return the first."
    with pytest.raises(TypeError, match="No matching definition"):
        first(np.arange(3.0))
    with pytest.raises(TypeError, match="No matching definition"):
        first(np.arange(8)[::2])


def test_one_process_at_a_time_compiles(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled_module, "LOCK_TIMEOUT", 0.05)

    @compiled((float64,))
    def twice(number: float) -> float:
        return 2 * number

    directory = twice.cache_directory
    assert directory is not None
    with cache_lock(directory), pytest.raises(PeerTimeoutError, match=r"NUMBA_CACHE_DIR"):
        twice(1.0)
    monkeypatch.undo()
    results = []
    waiting = threading.Thread(target=lambda: results.append(twice(1.5)))
    with cache_lock(directory):
        waiting.start()
        waiting.join(0.2)
        assert not results
    waiting.join(DEADLINE)
    assert results == [3.0]
