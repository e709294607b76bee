"""Models that are larger than the memory of their process train with their data in files."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from lightning_dlres.paramserver.execute.server.service import ParameterServer
from tests.support.memory_limit import memory_limit

# Parameters and gradients take 189 MB, AdamW's history takes as much, and the saved tensors of the
# large batch take 252 MB, beside Python, torch and Lightning.
SMALL_BATCH, LARGE_BATCH = 2, 2048
SMALL_LIMIT, LARGE_LIMIT = 600 << 20, 800 << 20
SCRIPT = "tests.callbacks.little_memory"


def run(limit: int, *arguments: object) -> subprocess.CompletedProcess[str]:
    with memory_limit(limit) as prefix:
        return subprocess.run(
            [*prefix, sys.executable, "-m", SCRIPT, *map(str, arguments)],
            capture_output=True,
            text=True,
            timeout=240,
        )


def require_only_ours_trains(
    plain: subprocess.CompletedProcess[str], ours: subprocess.CompletedProcess[str]
) -> None:
    # SIGKILL, of the kernel's memory control.
    assert plain.returncode == -9, plain.stderr[-2000:]
    assert ours.returncode == 0, ours.stderr[-2000:]
    assert "trained" in ours.stdout
    # The weights are those of plain construction, in which each layer's are drawn one by one.
    (initial,) = [line for line in ours.stdout.splitlines() if line.startswith("initial")]
    assert initial in plain.stdout


@pytest.mark.root
def test_a_mirror_in_a_file_trains_where_plain_training_is_killed(tmp_path: Path) -> None:
    plain = run(SMALL_LIMIT, "plain", tmp_path, SMALL_BATCH)
    require_only_ours_trains(plain, run(SMALL_LIMIT, "mirror", tmp_path, SMALL_BATCH))


@pytest.mark.exhaustive
@pytest.mark.root
def test_all_parts_together_train_where_plain_training_is_killed(tmp_path: Path) -> None:
    plain = run(LARGE_LIMIT, "plain", tmp_path, LARGE_BATCH)
    with ParameterServer() as server:
        ours = run(LARGE_LIMIT, "all", tmp_path, LARGE_BATCH, server.address)
    require_only_ours_trains(plain, ours)
