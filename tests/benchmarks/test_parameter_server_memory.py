"""The benchmark of a parameter server's memory runs, and prints its line of JSON."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest
import torch

from benchmarks.parameter_server_memory import main


@pytest.fixture(autouse=True)
def threads() -> Iterator[None]:
    """Restore the number of threads, which the benchmark sets."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def test_the_quick_run_ends_with_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--quick"]) == 0
    line = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert line["bench"] == "parameter_server_memory"
    checks = line["checks"]
    assert checks["SGD: values equal after the restart"]["ok"]
    assert sum("peak" in name for name in checks) == 2
