"""The benchmark of captured models: its verdicts and tables, and a run on a model by hand."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from benchmarks import capture
from benchmarks.support.capture.cuts import even_split, split_points
from benchmarks.support.capture.rank_report import DONE, START, RankReport, reporting
from benchmarks.support.capture.runs import Run
from benchmarks.support.capture.tables import CaseRow, by_family, counts, document
from benchmarks.support.capture.task import (
    BATCH,
    MICRO_BATCHES,
    ONE_MICRO_BATCH,
    make_net,
    microbatches,
    reference,
)
from benchmarks.support.capture.verdicts import (
    DIFFERS,
    EQUAL,
    FAILED_AT_START,
    FAILED_AT_STEP,
    NO_REFERENCE,
    REFUSED,
    TIMEOUT,
    Verdict,
    compare,
    failure,
    first_sentence,
    judge,
    weight_differences,
)
from benchmarks.support.capture_models import family_cases
from benchmarks.support.capture_models.names import NAMES

WEIGHTS = {"weight": torch.tensor([1.0, -2.0]), "steps": torch.tensor(3)}


def failed(*reports: RankReport, is_late: bool = False, exits: list[int] | None = None) -> Verdict:
    statuses = exits or [1] * len(reports)
    outputs = [""] * len(reports)
    return failure(Run(reports, is_late=is_late, exits=statuses, outputs=outputs))


def test_equal_is_equal_up_to_rounding() -> None:
    weights = {**WEIGHTS, "weight": torch.tensor([1.001, -2.0])}
    verdict = compare([2.0, 1.0], [2.0, 1.00005], WEIGHTS, weights)
    assert verdict.kind == EQUAL
    assert verdict.loss_difference == pytest.approx(5e-5)
    assert verdict.weight_difference == pytest.approx(5e-4, rel=1e-3)
    assert verdict.text() == "equal (5e-05, 5e-04)"


@pytest.mark.parametrize(
    ("losses", "weight", "detail"),
    [
        ([2.0, 1.001], [1.0, -2.0], "losses from step 2"),
        ([math.nan, 1.0], [1.0, -2.0], "losses from step 1"),
        ([2.0, 1.0], [1.0, -2.01], "weights, most weight"),
        ([2.0, 1.0], [1.0, -2.0, 0.0], "weights, most weight"),
        ([2.0], [1.0, -2.0], "1 losses, not 2"),
    ],
)
def test_a_difference_is_named(losses: list[float], weight: list[float], detail: str) -> None:
    weights = {**WEIGHTS, "weight": torch.tensor(weight)}
    verdict = compare([2.0, 1.0], losses, WEIGHTS, weights)
    assert (verdict.kind, verdict.detail) == (DIFFERS, detail)


def test_a_run_without_weights_differs() -> None:
    assert compare([1.0], [1.0], WEIGHTS, {}).text() == "differs (0e+00, inf): no weights"


def test_weights_are_compared_at_their_scale() -> None:
    expected = {"large": torch.full((2,), 8.0), "zero": torch.zeros(2), "count": torch.tensor(2)}

    def differences(**changed: Tensor) -> dict[str, float]:
        return weight_differences(expected, {**expected, **changed})

    assert set(differences().values()) == {0.0}
    # A tensor of zeros is compared at a thousandth of the largest weight.
    assert differences(zero=torch.full((2,), 8e-6))["zero"] == pytest.approx(1e-3)
    assert differences(count=torch.tensor(3))["count"] == math.inf
    assert differences(large=torch.empty(2, device="meta"))["large"] == math.inf


def test_errors_before_and_after_the_first_step_are_told_apart() -> None:
    refusal = RankReport(error="It must not. Do so.", error_class="ConfigError", is_refusal=True)
    assert failed(refusal).text() == f"{REFUSED}: It must not."
    crash = RankReport(error="list index", error_class="IndexError")
    assert failed(crash).text() == f"{FAILED_AT_START}: IndexError: list index"
    late = RankReport(phase="step 2", error="it", error_class="ConfigError", is_refusal=True)
    assert failed(late).text() == f"{FAILED_AT_STEP}: step 2: ConfigError: it"


def test_the_cause_comes_before_the_rank_that_lost_a_peer() -> None:
    lost = RankReport(phase="step 1", error="lost", error_class="PeerLostError", seconds=1.0)
    cause = RankReport(phase="step 1", error="cause", error_class="ValueError", seconds=2.0)
    assert failed(lost, cause).detail == "step 1: ValueError: cause"


def test_a_hang_and_a_crash_have_no_message() -> None:
    hanging = RankReport(phase="step 3")
    assert failed(hanging, is_late=True).text() == f"{TIMEOUT}: at step 3"
    killed = failed(RankReport(phase=START), exits=[-9])
    assert killed.kind == FAILED_AT_START
    assert killed.detail == "a process ended without a report: SIGKILL"


def test_nothing_is_equal_to_a_plain_training_that_failed() -> None:
    other = Run([RankReport(phase=DONE, losses=[1.0])])
    for plain in (RankReport(phase="step 1"), RankReport(phase=DONE, losses=[math.nan])):
        verdict = judge(Run([plain], exits=[1], outputs=[""]), other)
        assert verdict.kind == NO_REFERENCE


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("a.b must\nbe c. Use d.", "a.b must be c."),
        ("no end", "no end"),
        ("A guard.  (Note)\nit", "A guard."),
        ("first\n\nsecond", "first"),
        ("x" * 400, "x" * 297 + "..."),
        ("", ""),
    ],
)
def test_the_first_sentence_is_one_line(text: str, sentence: str) -> None:
    assert first_sentence(text) == sentence


def test_the_peer_is_cut_into_equal_numbers_of_layers() -> None:
    assert split_points(list("abcdef"), 2) == ["d"]
    assert split_points(list("abcdef"), 3) == ["c", "e"]
    assert split_points(list("abc"), 2) == ["b"]
    assert even_split(7, 3) == (2, 2, 3)


def test_the_reference_follows_from_how_samples_affect_each_other() -> None:
    cases = family_cases("by hand")
    references = {name: reference(case, make_net(case)) for name, case in cases.items()}
    assert references.pop("batchnorm_cnn") == MICRO_BATCHES
    assert references.pop("running_statistics") == ONE_MICRO_BATCH
    assert set(references.values()) == {BATCH}
    assert [microbatches(each) for each in (BATCH, MICRO_BATCHES, ONE_MICRO_BATCH)] == [2, 2, 1]


@pytest.mark.parametrize("name", NAMES["by hand"])
def test_models_by_hand_draw_no_random_numbers(name: str) -> None:
    net = make_net(family_cases("by hand")[name])
    for module in net.modules():
        assert not isinstance(module, nn.Dropout) or module.p == 0.0
        assert not isinstance(module, nn.LSTM | nn.MultiheadAttention) or module.dropout == 0.0


def test_a_report_survives_an_error_in_the_middle_of_a_step(tmp_path: Path) -> None:
    path = tmp_path / "report"
    if not (pid := os.fork()):
        with reporting(path, (ValueError,)) as report:
            report.enter("step 7")
            report.losses.append(1.5)
            raise ValueError("seven")
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 1
    read = RankReport.read(path)
    assert (read.phase, read.error, read.is_refusal) == ("step 7", "seven", True)
    assert read.losses == [1.5]
    assert RankReport.read(tmp_path / "none").phase == START


def test_the_tables_count_verdicts_by_family() -> None:
    rows = [
        CaseRow("a_b", "one", Verdict(EQUAL, "", 0.0, 0.0, notes={"split": [1, 2]}), Verdict("x")),
        CaseRow("c", "two", Verdict(REFUSED, "a | b"), Verdict(EQUAL, "", 0.0, 0.0)),
    ]
    assert counts(rows) == {
        "cases": 2,
        "ours": {EQUAL: 1, REFUSED: 1},
        "ours_equal_share": 0.5,
        "peer": {EQUAL: 1},
        "peer_equal_share": 0.5,
    }
    assert by_family(rows)["one"]["ours_equal_share"] == 1.0
    page = document(rows, "settings")
    assert "| a\\_b | 1 + 2 | - | - | equal (0e+00, 0e+00) | x |" in page
    assert "refused at start: a \\| b" in page
    assert page.index("## One") < page.index("## Two")


def test_unknown_models_are_refused() -> None:
    with pytest.raises(SystemExit, match="got \\['gpt5'\\]"):
        capture.main(["--models", "unet,gpt5"])


def test_the_quick_dozen_is_of_the_list() -> None:
    listed = {name for names in NAMES.values() for name in names}
    assert len(capture.QUICK) == 12
    assert listed.issuperset(capture.QUICK)


@pytest.mark.exhaustive
def test_models_by_hand_are_trained_and_reported(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    page = tmp_path / "table.md"
    arguments = ["--models", "lstm_classifier", "--steps", "3", "--table", str(page)]
    assert capture.main(arguments) == 0
    *text, last = capsys.readouterr().out.splitlines()
    line: dict[str, Any] = json.loads(last)
    assert line["bench"] == "capture"
    assert line["checks"]["share of equal cases"]["ok"]
    assert line["raw"]["all"]["ours"] == line["raw"]["all"]["peer"] == {EQUAL: 1}
    assert any(row.startswith("lstm_classifier: ") for row in text)
    assert "lstm\\_classifier" in page.read_text()
