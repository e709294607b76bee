"""Figures of all ranks, from spans made by hand."""

from __future__ import annotations

import pytest

from lightning_dlres.gradsync.report.measurement import Delivery, measure_sync
from tests.gradsync.report.hand_made import MS, run_spans, span


def test_figures_of_a_rank_are_medians_over_the_steps() -> None:
    spans = run_spans(5)
    # One step takes longer.
    spans[0].append(span("encode", "compute", 65, 79))
    measured = measure_sync(spans)
    assert measured is not None
    assert [step.number for step in measured.steps] == [2, 3, 4]
    assert measured.has_tasks
    assert not measured.includes_warm_up
    zero, one = measured.ranks
    assert (zero.sent_bytes, zero.received_bytes, one.sent_bytes) == (100, 50, 50)
    assert zero.ratio == one.ratio == 16
    assert zero.task_seconds["encode"] == pytest.approx(3e-3)
    assert measured.step_seconds == pytest.approx(20e-3)
    assert measured.backward_and_sync_seconds == pytest.approx(18e-3)
    assert measured.compute_seconds == pytest.approx(9e-3)
    assert (zero.exposed_seconds, zero.exposed_compute_seconds) == pytest.approx((8e-3, 5e-3))


def test_a_message_is_on_its_way_until_its_receiver_has_it() -> None:
    measured = measure_sync(run_spans(1))
    assert measured is not None
    assert measured.includes_warm_up
    (step,) = measured.steps
    assert set(step.deliveries) == {
        Delivery(source=0, destination=1, start_ns=4 * MS, end_ns=9 * MS),
        Delivery(source=1, destination=0, start_ns=8 * MS, end_ns=14 * MS),
    }
    # 5 ms in one direction, and 6 ms in the other; the busier one counts.
    assert step.link_seconds == pytest.approx({0: 6e-3, 1: 6e-3})


def test_messages_between_two_ranks_are_paired_in_their_order() -> None:
    spans = run_spans(1)
    spans[0].append(span("send", "transfer", 6, 7, peer=1, step=0, nbytes=1, raw_nbytes=1))
    spans[1].append(span("receive", "transfer", 11, 12, peer=0, step=0, nbytes=1))
    measured = measure_sync(spans)
    assert measured is not None
    sent = [(d.start_ns, d.end_ns) for d in measured.steps[0].deliveries if d.source == 0]
    assert sent == [(4 * MS, 9 * MS), (6 * MS, 12 * MS)]


def test_only_steps_of_all_ranks_count() -> None:
    spans = run_spans(4)
    spans[1] = [s for s in spans[1] if s.args.get("step") != 3]
    measured = measure_sync(spans, warm_up=1)
    assert measured is not None
    assert [step.number for step in measured.steps] == [1, 2]


def test_nothing_is_measured_without_a_step_of_all_ranks() -> None:
    assert measure_sync({}) is None
    assert measure_sync({0: [], 1: []}) is None
    assert measure_sync({0: run_spans(1)[0], 1: []}) is None


def test_the_typical_step_is_the_one_nearest_to_the_median() -> None:
    spans = run_spans(3)
    for rank in spans:
        spans[rank] += [
            span("backward", "compute", 60, 90),
            span("wait for gradients", "sync", 80, 90, step=3),
        ]
    measured = measure_sync(spans, warm_up=0)
    assert measured is not None
    assert measured.typical.number < 3
