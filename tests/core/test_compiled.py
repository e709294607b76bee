"""Code that several processes compile and keep in one place: one at a time, and always the right
one."""

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
from lightning_dlres.core.compiled import compiled, in_turn
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
        found = numbers[0] - numbers[0]
        for number in numbers:
            found += number
        return found

    def main():
        print(total(np.arange(5)), total(np.arange(5) / 2))
"""
DEADLINE = 120


def test_every_process_gets_the_code_for_its_types(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "totals.py").write_text(textwrap.dedent(MODULE))
    kept = tmp_path / "kept"
    environment = {**os.environ, "NUMBA_CACHE_DIR": str(kept)}
    running = [
        subprocess.Popen(
            lightweight_command("totals:main", order),
            env=environment,
            stdout=subprocess.PIPE,
            text=True,
        )
        # The last one loads what the others have kept.
        for order in ("forwards", "backwards", "forwards")
    ]
    found = [process.communicate(timeout=DEADLINE)[0].split() for process in running]
    assert found == [["10", "5.0"]] * 3
    assert len(list(kept.rglob("*.nbc"))) == 2


@pytest.mark.parametrize("writable", [True, False])
def test_network_file_systems_lock_what_may_be_written(
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

    def of_somebody_else(path: Path, flags: int, *mode: int) -> int:
        if flags & os.O_RDWR and not writable:
            raise PermissionError(errno.EACCES, "Permission denied")
        return open_(path, flags, *mode)

    monkeypatch.setattr(fcntl, "flock", as_nfs)
    monkeypatch.setattr(os, "open", of_somebody_else)
    with in_turn(str(tmp_path)):
        assert bool(held) == writable


def test_other_types_are_not_compiled() -> None:
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


def test_compiling_waits_for_its_turn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled_module, "PATIENCE", 0.05)

    @compiled((float64,))
    def twice(number: float) -> float:
        return 2 * number

    directory = twice.kept_in
    assert directory is not None
    with in_turn(directory), pytest.raises(PeerTimeoutError, match=r"NUMBA_CACHE_DIR"):
        twice(1.0)
    monkeypatch.undo()
    found = []
    waiting = threading.Thread(target=lambda: found.append(twice(1.5)))
    with in_turn(directory):
        waiting.start()
        waiting.join(0.2)
        assert not found
    waiting.join(DEADLINE)
    assert found == [3.0]
