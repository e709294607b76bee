"""The benchmark of recomputation runs to its end on tiny sizes, with equal losses on both sides."""

from __future__ import annotations

import json

import pytest

from benchmarks import recompute
from benchmarks.support.testbed import reason_unavailable


@pytest.mark.root
@pytest.mark.exhaustive
def test_a_plan_runs_with_and_without_recomputation(
    capsys: pytest.CaptureFixture[str],
) -> None:
    if reason := reason_unavailable():
        pytest.skip(reason)
    assert recompute.main(["--quick"]) == 0
    line = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert line["checks"].keys() == {"step with recomputation over without"}
    assert line["raw"]["simulated"] > 0
    assert len(line["raw"]["seconds"]) == 2
