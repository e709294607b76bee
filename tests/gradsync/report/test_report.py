"""The report names its figures, and says what is missing."""

from __future__ import annotations

from dataclasses import dataclass

from lightning_dlres.gradsync.plan.plan import RAW, CodecChoice, SyncPlan, make_plan
from lightning_dlres.gradsync.plan.units import GradientSpec
from lightning_dlres.gradsync.report.measurement import SyncMeasurement, measure_sync
from lightning_dlres.gradsync.report.rank_steps import BACKWARD, SYNC, WAIT
from lightning_dlres.gradsync.report.report import SyncReport
from tests.gradsync.report.hand_made import Spans, run_spans, span


@dataclass(frozen=True)
class Times:
    """Predicted times, named as in `StepPrediction`."""

    step_seconds: float
    compute_seconds: float
    transfer_seconds: float


def plan() -> SyncPlan:
    specs = [GradientSpec(name="weight", count=8192), GradientSpec(name="bias", count=8)]
    choices = [CodecChoice(codec="tbq", partitions=2), CodecChoice(codec=RAW, partitions=1)]
    return make_plan(specs, choices, world_size=2, topology="ps", alignment=4096)


def measurement(spans: Spans) -> SyncMeasurement:
    measured = measure_sync(spans)
    assert measured is not None
    return measured


def without_tasks(ranks: int) -> Spans:
    return {
        rank: [span(BACKWARD, "compute", 0, 18), span(WAIT, SYNC, 10, 18, step=0)]
        for rank in range(ranks)
    }


def rows(text: str) -> list[list[str]]:
    """Return the cells of all rows of all tables."""
    lines = [line for line in text.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def test_the_report_has_a_row_for_each_rank_and_the_plan() -> None:
    report = SyncReport(algorithm="tbq", plan=plan(), measured=measurement(run_spans(4)))
    assert report.line() == (
        "dlres: step 20 ms, backward with synchronisation 18 ms measured (median of 2 steps); rank "
        "0 sends 100 B a step, compressed 16.0 times; exposed 8 ms on rank 0."
    )
    text = report.markdown("timeline.png", "trace.json")
    table = rows(text)
    times = ["3", "2", "4", "1", "0.5", "6", "8", "5", "-"]
    assert ["0", "100 B", "50 B", "16", *times] in table
    assert ["1", "50 B", "100 B", "16", *times] in table
    for name, value in {
        "algorithm": "tbq",
        "topology": "ps",
        "units": "3",
        "compressed gradients": "1",
        "raw gradients": "1",
        "raw elements": "8 (0.1%)",
    }.items():
        assert [name, value] in table
    assert "](timeline.png)" in text
    assert "](trace.json)" in text
    assert "predicted" not in text


def test_a_prediction_stands_beside_the_measurement() -> None:
    report = SyncReport(
        algorithm="tbq",
        plan=plan(),
        measured=measurement(run_spans(4)),
        predicted=Times(0.0165, 0.0085, 0.0072),
        clock_error=1e-3,
    )
    assert "18 ms measured (median of 2 steps), 16.5 ms predicted" in report.line()
    text = report.markdown(None, None)
    table = rows(text)
    assert ["backward with synchronisation", "16.5", "18"] in table
    assert ["compute tasks, busiest rank", "8.5", "9"] in table
    assert ["messages, busiest link", "7.2", "6"] in table
    assert "up to 1 ms" in text
    assert "png" not in text
    assert "trace.json" not in text


def test_torchs_all_reduce_has_no_tasks() -> None:
    report = SyncReport(algorithm="none", plan=None, measured=measurement(without_tasks(2)))
    assert "synchronised by DistributedDataParallel's all-reduce, exposed 8 ms" in report.line()
    text = report.markdown(None, "trace.json")
    assert "Algorithm `none`" in text
    assert "there are no tasks" in text
    assert ["1", "8"] in rows(text)


def test_a_single_rank_has_nothing_to_synchronise() -> None:
    report = SyncReport(algorithm="tbq", plan=None, measured=measurement(without_tasks(1)))
    assert "a single rank has nothing to synchronise" in report.line()
