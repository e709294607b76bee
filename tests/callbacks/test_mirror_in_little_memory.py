"""A model that is larger than the memory of its process trains with the mirror in a file."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.memory_limit import memory_limit

# Parameters, gradients and AdamW's history take 378 MB, beside Python, torch and Lightning.
LIMIT = 600 << 20
SCRIPT = "tests.callbacks.mirror_in_little_memory"


def run(kind: str, directory: Path) -> subprocess.CompletedProcess[str]:
    with memory_limit(LIMIT) as prefix:
        return subprocess.run(
            [*prefix, sys.executable, "-m", SCRIPT, kind, str(directory)],
            capture_output=True,
            text=True,
            timeout=240,
        )


@pytest.mark.root
def test_the_plain_run_is_killed_and_ours_trains(tmp_path: Path) -> None:
    plain, ours = run("plain", tmp_path), run("ours", tmp_path)
    # SIGKILL, of the kernel's memory control.
    assert plain.returncode == -9, plain.stderr[-2000:]
    assert ours.returncode == 0, ours.stderr[-2000:]
    assert "trained" in ours.stdout
    # The weights are those of plain construction, in which each layer's are drawn one by one.
    (initial,) = [line for line in ours.stdout.splitlines() if line.startswith("initial")]
    assert initial in plain.stdout
