"""The pipeline benchmark runs to its end on tiny sizes, and reports every figure it promises."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest

from benchmarks import hetero_pipeline
from benchmarks.hetero_pipeline import bound_on_ratio, noise_of
from benchmarks.support import command
from benchmarks.support.hetero_pipeline.contenders import require_same_losses
from benchmarks.support.testbed import reason_unavailable


def test_the_bound_is_that_of_the_slowest_stage_and_of_filling_the_pipeline() -> None:
    # With halves, the slow stage takes 0.5 / 0.2 per micro-batch, and the fast one adds 0.5 / 0.8.
    # With the best split, each stage takes 1.
    assert bound_on_ratio((0.8, 0.2), 16) == pytest.approx((16 * 2.5 + 0.625) / 17)
    assert bound_on_ratio((0.8, 0.8), 16) == pytest.approx(1.0)


def test_noise_falls_with_the_number_of_starts() -> None:
    starts = [[0.8, 0.9, 1.0], [0.9, 1.0, 1.1], [1.0, 1.1, 1.2]]
    assert noise_of([[0.9, 1.0, 1.1]] * 3) == 0.0
    assert noise_of(starts) == pytest.approx(1.2533 * 0.1 / math.sqrt(3))
    assert noise_of(starts * 9) < noise_of(starts) / 2.9


def test_losses_that_differ_or_are_not_numbers_are_unfair() -> None:
    require_same_losses([2.0, 1.0], [2.0, 1.0005], [2.0])
    for loss in (1.1, math.nan):
        with pytest.raises(command.FairnessError, match="losses of step 1 must be equal"):
            require_same_losses([2.0, 1.0], [2.0, loss])


@pytest.mark.exhaustive
@pytest.mark.root
def test_both_sides_train_alike_and_every_figure_is_reported(
    capsys: pytest.CaptureFixture[str],
) -> None:
    if reason := reason_unavailable():
        pytest.skip(reason)
    assert hetero_pipeline.main(["--quick"]) == 0
    *text, last = capsys.readouterr().out.splitlines()
    line: dict[str, Any] = json.loads(last)
    assert line.keys() == {"bench", "hardware", "checks", "raw"}
    assert line["bench"] == "hetero_pipeline"
    assert list(line["checks"]) == [
        "over the peer's even split, part of the bound",
        "prediction error",
        "over the peer with our split, within noise",
        "equal devices, over the peer",
        "equal devices, over the peer with our split",
        "processor seconds, over the peer with our split",
    ]
    for check in line["checks"].values():
        assert check.keys() == {"value", "target", "ok"}
        assert math.isfinite(check["value"])
        assert check["value"] > 0
        assert isinstance(check["ok"], bool)
    unequal, equal = line["raw"]["unequal"], line["raw"]["equal"]
    # Seconds and processor seconds of ours, and of the peer under each setting.
    assert [[len(row) for row in rows] for rows in unequal["seconds"]] == [[8]] * 2
    assert [[len(row) for row in rows] for rows in equal["seconds"]] == [[6]] * 2
    assert sum(unequal["split"]) == sum(equal["split"]) == 8
    assert len(unequal["peer_swept"]) == 2
    assert any("the bound is 2.125" in printed for printed in text)


def test_it_says_why_it_cannot_measure(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(command, "reason_unavailable", lambda: "no root here")
    assert hetero_pipeline.main(["--quick"]) == 2
    printed = capsys.readouterr()
    assert "no root here" in printed.err
    assert not printed.out
