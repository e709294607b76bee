"""Figures of the steps of one rank, from spans made by hand."""

from __future__ import annotations

import pytest

from lightning_dlres.gradsync.report.rank_steps import (
    BACKWARD,
    SYNC,
    WAIT,
    covered_seconds,
    metrics,
    rank_steps,
)
from tests.gradsync.report.hand_made import MS, run_spans, span, step_spans


def test_a_step_has_its_bytes_and_times() -> None:
    first, second = rank_steps(run_spans(2)[0])
    assert (first.step, second.step) == (0, 1)
    assert (second.start_ns, second.ready_ns, second.end_ns) == (20 * MS, 30 * MS, 38 * MS)
    assert (first.sent_bytes, first.raw_sent_bytes, first.received_bytes) == (100, 1600, 50)
    times = {name: first.task_seconds(name) for name in ("encode", "merge", "decode", "send")}
    assert times == pytest.approx({"encode": 3e-3, "merge": 2e-3, "decode": 4e-3, "send": 1e-3})
    assert first.exposed_seconds == pytest.approx(8e-3)
    assert first.exposed_compute_seconds == pytest.approx(5e-3)
    assert first.residual_norm is None


def test_a_message_that_arrives_early_belongs_to_its_own_step() -> None:
    spans = run_spans(3)[0]
    early = span("receive", "transfer", 37, 37.5, peer=1, step=2, nbytes=7)
    later = span("receive", "transfer", 57, 57.5, peer=1, step=3, nbytes=9)
    steps = rank_steps([*spans, early, later])
    assert [step.received_bytes for step in steps] == [50, 50, 57]


def test_steps_with_equal_numbers_of_two_runs_are_kept_apart() -> None:
    spans = [*step_spans(0, 0, rank=0), *step_spans(0, 100, rank=0)]
    assert [step.sent_bytes for step in rank_steps(spans)] == [100, 100]


def test_accumulated_backwards_belong_to_the_step_that_synchronises() -> None:
    spans = [
        span(BACKWARD, "compute", 0, 5),
        span(BACKWARD, "compute", 10, 16),
        span(WAIT, SYNC, 14, 16, step=0),
    ]
    (step,) = rank_steps(spans)
    assert (step.start_ns, step.exposed_seconds) == (10 * MS, pytest.approx(2e-3))


def test_the_first_step_is_left_out_if_older_spans_were_dropped() -> None:
    spans = run_spans(3)[0]
    assert [step.step for step in rank_steps(spans, is_truncated=True)] == [1, 2]
    assert rank_steps([], is_truncated=True) == []


def test_metrics_are_means_over_the_steps() -> None:
    spans = [*step_spans(0, 0, 0, residual_norm=9.0), *step_spans(1, 20, 0, residual_norm=1.5)]
    spans.append(span("encode", "compute", 25, 27))
    assert metrics(rank_steps(spans)) == pytest.approx(
        {
            "wire_mb": 150e-6,
            "ratio": 16.0,
            "encode_ms": 4.0,
            "merge_ms": 2.0,
            "decode_ms": 4.0,
            "transfer_ms": 1.5,
            "exposed_ms": 8.0,
            "wait_ms": 3.0,
            "residual_norm": 1.5,
        }
    )


def test_without_tasks_only_the_exposed_time_is_known() -> None:
    spans = [span(BACKWARD, "compute", 0, 18), span(WAIT, SYNC, 10, 18, step=0)]
    assert metrics(rank_steps(spans)) == {"exposed_ms": pytest.approx(8.0)}
    assert metrics([]) == {}


@pytest.mark.parametrize(
    ("intervals", "bounds", "expected"),
    [
        ([], None, 0),
        ([(0, 4), (2, 6), (8, 9)], None, 7),
        ([(8, 9), (0, 9)], None, 9),
        ([(0, 4), (2, 6), (8, 9)], (3, 8), 3),
        ([(0, 4)], (5, 8), 0),
    ],
)
def test_overlapping_intervals_count_once(
    intervals: list[tuple[int, int]], bounds: tuple[int, int] | None, expected: int
) -> None:
    assert covered_seconds(intervals, bounds) == pytest.approx(expected / 1e9)
