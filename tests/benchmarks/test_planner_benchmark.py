"""The planner's benchmark runs to its end on small models, and reports every figure it promises."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest

from benchmarks import planner


def test_every_figure_is_reported(capsys: pytest.CaptureFixture[str]) -> None:
    assert planner.main(["--quick"]) == 0
    printed = capsys.readouterr().out.splitlines()
    lines: list[dict[str, Any]] = [json.loads(line) for line in printed if line.startswith("{")]
    assert [line["bench"] for line in lines] == [size.name for size in planner.QUICK]
    for line in lines:
        assert line.keys() == {"bench", "hardware", "checks", "raw"}
        assert list(line["checks"]) == [
            "median seconds",
            "step over the ratio order with a proportional split",
            "solver's gap",
        ]
        assert all(math.isfinite(check["value"]) for check in line["checks"].values())
        assert all(check["ok"] for check in line["checks"].values())
        assert line["raw"]["versions"].keys() == {"python", "highspy", "numpy"}
        for row in line["raw"]["profiles"]:
            assert sum(row["split"]) == line["raw"]["layers"]
            assert sorted(row["order"]) == list(range(line["raw"]["stages"]))
            assert row["step"] > 0


def test_without_order_search_the_ratio_order_stays() -> None:
    (size,) = (size for size in planner.QUICK if not size.any_order)
    row = planner.measure(size, 3, 0.4)
    assert row["order"] == planner.profile(size, 3, 0.4).replicas[0]
    assert 0 < row["over_start"] <= 1
