"""The benchmark of parameter servers counts the bytes of its bound, and runs to its end."""

from __future__ import annotations

import json

import pytest

from benchmarks import parameter_server
from benchmarks.support.testbed import reason_unavailable

GRADIENTS = parameter_server.GRADIENT_BYTES


@pytest.mark.parametrize(("servers", "gradients"), [(1, 3.0), (2, 2.0), (4, 1.5)])
def test_link_carries_pushes_of_others_and_own_pulls(servers: int, gradients: float) -> None:
    assert parameter_server.link_bytes(servers) == gradients * GRADIENTS


@pytest.mark.root
@pytest.mark.exhaustive
@pytest.mark.parametrize("part", ["fast", "snapshot"])
def test_every_part_is_reported(capsys: pytest.CaptureFixture[str], part: str) -> None:
    if reason := reason_unavailable():
        pytest.skip(reason)
    assert parameter_server.main(["--quick", f"--{part}"]) == 0
    line = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert line["bench"] == "parameter_server"
    assert line["checks"]
    assert part in line["raw"]
