"""The benchmark of many hosts runs to its end on few of them, and reads measured costs."""

from __future__ import annotations

import json
from typing import Any

import pytest

from benchmarks import gradsync_scale
from benchmarks.support.gradsync_scale_rank import LARGE, SMALL
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
def test_bytes_on_the_links_are_those_of_the_plan(codec: str, topology: str) -> None:
    stated = gradsync_scale.Stated(gradients=3, elements=1 << 15, message_seconds=0.0)
    step = gradsync_scale.stated_step(4, codec, topology, stated)
    # Each unit passes N - 1 links on its way to the sum, and N - 1 links after it.
    expected = 2 * 3 * sum(step.payload_bytes) / stated.bandwidth
    assert sum(simulate(step).sending_busy) == pytest.approx(expected)


def reply(factor: float) -> dict[str, Any]:
    seconds = [[factor * 1e-3] * 3, [factor * (1e-3 + 1e-9 * (LARGE - SMALL))] * 3]
    # In the second exchange one rank was late, and so the other one saw less than its time.
    large = [1e-4 + 0.5, 9.0 if factor > 1 else 0.1]
    times: dict[str, Any] = {
        "small": [5e-4] * 2,
        "burst": [1e-4] * 2,
        "large": large,
        "large_bytes": 100,
    }
    times["call"] = 5e-5
    return {"codecs": {"raw": seconds}, **times}


def test_costs_are_those_of_the_slowest_rank() -> None:
    costs, coordinator = gradsync_scale.costs_of([reply(1.0), reply(2.0), reply(1.0)])
    assert costs.codecs["raw"].encode.seconds(SMALL) == pytest.approx(2e-3)
    assert costs.codecs["raw"].merge.seconds(LARGE) == pytest.approx(2e-3 + 2e-9 * (LARGE - SMALL))
    assert costs.links.bandwidths == pytest.approx([200.0] * 3)
    assert costs.links.message_seconds + costs.links.latency_seconds == pytest.approx(5e-4)
    assert coordinator.handling_seconds == pytest.approx(2 * 5e-5)


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
