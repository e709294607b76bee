"""The benchmark of a parameter server's memory runs, and prints its line of JSON."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from benchmarks.parameter_server_memory import _wait_for_snapshot, main


@pytest.fixture(autouse=True)
def threads() -> Iterator[None]:
    """Restore the number of threads, which the benchmark sets."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.mark.exhaustive
def test_the_quick_run_ends_with_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--quick"]) == 0
    line = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert line["bench"] == "parameter_server_memory"
    checks = line["checks"]
    assert checks["SGD: values equal after the restart"]["ok"]
    assert sum("peak" in name for name in checks) == 2


class _Status:
    """Status client of a server that ended a snapshot some seconds ago."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds

    def ask(self, _: float) -> list[SimpleNamespace]:
        state = SimpleNamespace(snapshot_error="", snapshot_seconds=self._seconds)
        return [SimpleNamespace(status=state)]


def test_the_time_of_a_snapshot_ends_with_the_snapshot() -> None:
    now = time.perf_counter()
    status: Any = _Status(5.0)
    assert _wait_for_snapshot(status, since=now - 8.0) == pytest.approx(now - 5.0, abs=1.0)
