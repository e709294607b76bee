"""The benchmark of simulated hosts runs to its end on a few of them."""

from __future__ import annotations

import json

import pytest

from benchmarks import gradsync_scale
from benchmarks.support.testbed import reason_unavailable
from lightning_dlres.gradsync.plan.simulation.simulator import simulate


def test_every_figure_is_reported(capsys: pytest.CaptureFixture[str]) -> None:
    assert gradsync_scale.main(["--quick"]) == 0
    line = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert line["bench"] == "gradsync_scale"
    assert all(check["ok"] for check in line["checks"].values())
    for efficiency in line["raw"]["efficiency"].values():
        assert len(efficiency) == len(gradsync_scale.QUICK_NODES)
        assert all(0 < value < 1 for value in efficiency)


@pytest.mark.parametrize(("codec", "topology"), gradsync_scale.CONTENDERS.values())
def test_links_are_busy_for_the_bytes_of_the_plan(codec: str, topology: str) -> None:
    stated = gradsync_scale.Stated(gradients=3, elements=1 << 15, message_seconds=0.0)
    step = gradsync_scale.stated_step(4, codec, topology, stated)
    # Each unit passes N - 1 links on its way to the sum, and N - 1 links after it.
    expected_seconds = 2 * 3 * sum(step.payload_bytes) / stated.bandwidth
    assert sum(simulate(step).sending_busy) == pytest.approx(expected_seconds)


@pytest.mark.root
@pytest.mark.exhaustive
def test_real_steps_are_compared(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    if reason := reason_unavailable():
        pytest.skip(reason)
    monkeypatch.setattr(gradsync_scale, "REAL_HOSTS", (2,))
    assert gradsync_scale.main(["--real", "--quick"]) == 0
    line = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert len(line["checks"]) == len(gradsync_scale.REAL_CONTENDERS)
    assert all(check["value"] > 0 for check in line["checks"].values())
