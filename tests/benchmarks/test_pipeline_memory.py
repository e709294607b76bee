"""A stage holds what the plan says: to 5 %, counted by an allocator that knows nothing of plans."""

from __future__ import annotations

import json
import sys

import pytest

from benchmarks import pipeline_memory


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="needs Linux's C library")
def test_a_stage_holds_what_the_plan_says(capsys: pytest.CaptureFixture[str]) -> None:
    assert pipeline_memory.main(["--quick"]) == 0
    line = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert all(check["ok"] for check in line["checks"].values()), line
    (case,) = line["raw"]["cases"]
    assert [row["stage"] for row in case["stages"]] == [0, 1, 2]
    assert all(row["recomputed"] == row["layers"] for row in case["stages"])
