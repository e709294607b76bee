"""Spans made from simulated steps are measured as the same steps, and other spans are left out."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from lightning_dlres.core.trace import Span
from lightning_dlres.pipeline.plan.cost_model.simulator import Activity, Timeline, simulate
from lightning_dlres.pipeline.report.timeline import (
    Measurement,
    measure,
    measured_steps,
    pipeline_seconds,
)
from tests.support.examples import examples
from tests.support.pipeline_profiles import small_workload
from tests.support.recorded_spans import Spans, add_pass, add_step, no_spans, rounded, span

TWO = ((0, 1),)


def one_f_one_b(forward: float = 1.0, backward: float = 2.0, loss: bool = False) -> Timeline:
    """Return a step of two stages and two micro-batches."""
    whole_loss = [Activity("loss", 0, 1, -1, 2 * forward + 1.5, 2 * forward + 1.5)] if loss else []
    activities = [
        Activity("forward", 0, 0, 0, 0.0, forward),
        Activity("activation", 0, 0, 0, forward, forward + 0.5),
        Activity("forward", 0, 1, 0, forward + 0.5, 2 * forward + 0.5),
        Activity("backward", 0, 1, 0, 5.0, 5.0 + backward),
        Activity("gradient", 0, 1, 0, 5.0 + backward, 5.5 + backward),
        Activity("backward", 0, 0, 0, 5.5 + backward, 5.5 + 2 * backward),
        *whole_loss,
    ]
    busy = forward + backward
    return Timeline(tuple(activities), 10.0, ((busy, busy),), ())


def steps_of(timelines: list[Timeline], interval: float = 12.0, first: int = 0) -> Spans:
    """Return the spans of one step for each timeline, `interval` seconds apart."""
    spans = no_spans(TWO)
    for index, timeline in enumerate(timelines):
        start = 100.0 + interval * index
        add_step(spans, TWO, timeline, 1, first + index, start, start + 11.0)
    return spans


def measured(spans: Spans, warm_up: int = 2) -> Measurement:
    measurement = measure(TWO, spans, warm_up)
    assert measurement is not None
    return measurement


@given(seed=st.integers(0, 10_000), stages=st.integers(1, 3), count=st.integers(1, 2))
@settings(max_examples=examples(40), derandomize=True)
def test_spans_of_a_simulated_step_are_measured_as_that_step(
    seed: int, stages: int, count: int
) -> None:
    random = Random(seed)
    workload = small_workload(random, stages=stages, replicas=count)
    split = [1] * (stages - 1) + [len(workload.layers) - stages + 1]
    recompute = [index for index in range(len(workload.layers)) if random.random() < 0.3]
    timeline = simulate(workload, split, recompute)
    assume(any(a.name == "forward" for a in timeline.activities))
    assume(all(a.end - a.start > 1e-6 for a in timeline.activities))
    # The simulator leaves out activities without duration. Passes are found by their activations,
    # so a run without these would have no gradients either.
    assume(stages == 1 or any(a.name == "activation" for a in timeline.activities))
    spans = no_spans(workload.replicas)
    for batch in range(3):
        start = 50.0 + (timeline.step_seconds + 1.0) * batch
        end = start + timeline.step_seconds + 0.5
        add_step(spans, workload.replicas, timeline, workload.microbatches, batch, start, end)
    for rank_spans in spans.values():
        random.shuffle(rank_spans)
    steps = measured_steps(workload.replicas, spans)
    assert [step.batch for step in steps] == [0, 1, 2]
    for step in steps:
        assert rounded(step.timeline) == rounded(timeline)
        for busy, expected in zip(step.timeline.busy_seconds, timeline.busy_seconds, strict=True):
            assert busy == pytest.approx(expected, abs=1e-6)
        assert not step.checked
    for step in steps[:-1]:
        assert step.interval == pytest.approx(timeline.step_seconds + 1.0, abs=1e-6)
    assert pipeline_seconds(steps[0].timeline) == pytest.approx(pipeline_seconds(timeline))


def test_figures_are_medians_after_the_warm_up() -> None:
    spans = no_spans(TWO)
    start = 0.0
    for batch, length in enumerate([90.0, 50.0, 14.0, 10.0, 12.0, 11.0]):
        add_step(spans, TWO, one_f_one_b(), 1, batch, start, start + 9.9)
        start += length
    measurement = measured(spans)
    assert [step.batch for step in measurement.counted] == [2, 3, 4], (
        "the last step has no interval"
    )
    assert measurement.step_seconds == pytest.approx(12.0)
    assert measurement.typical.batch == 4
    assert measurement.bubble == pytest.approx(1 - 3.0 / 12.0)
    assert measurement.busy_seconds == ((pytest.approx(3.0), pytest.approx(3.0)),)
    assert measurement.pipeline_seconds == pytest.approx(9.5)
    assert measurement.is_steady
    assert not measurement.includes_warm_up


def test_steps_that_are_normally_left_out_count_if_there_are_no_others() -> None:
    two = measured(steps_of([one_f_one_b()] * 2))
    assert [step.batch for step in two.counted] == [0]
    assert two.includes_warm_up
    assert two.is_steady
    one = measured(steps_of([one_f_one_b()]))
    assert not one.is_steady
    assert one.step_seconds == pytest.approx(11.0), "until the last rank leaves the step"
    assert measure(TWO, no_spans(TWO)) is None
    assert measure(TWO, {}) is None


def test_only_steps_that_all_ranks_recorded_count() -> None:
    spans = steps_of([one_f_one_b()] * 4)
    spans[1] = [s for s in spans[1] if s.args.get("batch") != 1]
    steps = measured_steps(TWO, spans)
    assert [step.batch for step in steps] == [0, 2, 3]
    assert [step.interval for step in steps] == [None, pytest.approx(12.0), None]


def test_a_step_that_raised_does_not_count() -> None:
    spans = steps_of([one_f_one_b()] * 2)
    spans[0] = [
        s._replace(args={**s.args, "error": "KeyError"}) if s.args.get("batch") == 1 else s
        for s in spans[0]
    ]
    assert [step.batch for step in measured_steps(TWO, spans)] == [0]


def test_the_second_pass_of_a_checked_step_counts() -> None:
    spans = steps_of([one_f_one_b()] * 5)
    # The pass of the check is earlier in the same step, and has a smaller number.
    check = Timeline((Activity("forward", 0, 0, 0, 0.0, 0.2),), 1.0, ((0.2, 0.0),), ())
    late = [s._replace(start_ns=s.start_ns - 10**9) for s in spans[0] if s.args.get("batch") == 3]
    spans[0] = [s for s in spans[0] if s.args.get("batch") != 3] + late
    add_pass(spans, TWO, check, 1, 6, 100.0 + 36 - 0.9)
    message = span("send activation", "transfer", 135.3, 135.4, key="(0, 6)", peer=1)
    spans[0].append(message)
    spans[1].append(span("receive activation", "transfer", 135.3, 135.4, peer=0))
    measurement = measured(spans)
    assert [step.checked for step in measurement.steps] == [False, False, False, True, False]
    assert [step.batch for step in measurement.counted] == [2], (
        "step 3 was checked, and step 4 has no interval"
    )
    step = measurement.steps[3]
    shifted = [replace(a, start=a.start - 1.0, end=a.end - 1.0) for a in step.timeline.activities]
    assert rounded(replace(step.timeline, activities=tuple(shifted))) == rounded(one_f_one_b())


def training_pass(loss: list[int], start: float = 0.0) -> Timeline:
    """Return a run of two stages and one micro-batch, with losses of the given micro-batches."""
    activities = [
        Activity("forward", 0, 0, 0, start, start + 0.1),
        Activity("activation", 0, 0, 0, start + 0.1, start + 0.2),
        Activity("forward", 0, 1, 0, start + 0.2, start + 0.3),
        *(Activity("loss", 0, 1, m, start + 0.3, start + 0.4) for m in loss),
        Activity("backward", 0, 1, 0, start + 0.4, start + 0.5),
        Activity("sync", 0, 1, -1, start + 0.5, start + 0.6),
        Activity("gradient", 0, 1, 0, start + 0.5, start + 0.6),
        Activity("backward", 0, 0, 0, start + 0.6, start + 0.7),
    ]
    return Timeline(tuple(activities), 1.0, ((0.2, 0.3),), ())


def forward_pass(start: float) -> Timeline:
    """Return the pass of a check of the loss."""
    activities = [
        Activity("forward", 0, 0, 0, start, start + 0.1),
        Activity("activation", 0, 0, 0, start + 0.1, start + 0.2),
        Activity("forward", 0, 1, 0, start + 0.2, start + 0.3),
    ]
    return Timeline(tuple(activities), 1.0, ((0.1, 0.1),), ())


def test_a_repeated_step_keeps_nothing_of_its_first_run() -> None:
    """After a fallback to GPipe the loss is computed over the whole batch."""
    spans, repeated = no_spans(TWO), training_pass([-1], 4.0)
    add_step(spans, TWO, training_pass([0]), 1, 0, 0.0, 9.0)
    add_pass(spans, TWO, forward_pass(2.0), 1, 2, 0.0)
    add_pass(spans, TWO, repeated, 1, 3, 0.0)
    (step,) = measured_steps(TWO, spans)
    assert step.checked
    assert step.whole_loss
    assert rounded(step.timeline) == rounded(repeated)
    assert step.timeline.busy_seconds == ((pytest.approx(0.2), pytest.approx(0.3)),)


def test_a_check_after_the_step_leaves_its_timeline() -> None:
    spans, step_run = no_spans(TWO), training_pass([0])
    add_step(spans, TWO, step_run, 1, 0, 0.0, 9.0)
    add_pass(spans, TWO, forward_pass(2.0), 1, 2, 0.0)
    (step,) = measured_steps(TWO, spans)
    assert step.checked
    assert rounded(step.timeline) == rounded(step_run)


def test_an_interval_with_an_evaluation_does_not_count() -> None:
    spans = steps_of([one_f_one_b()] * 4)
    spans[1].append(span("forward", "compute", 123.2, 123.4, stage=1, microbatch=0))
    spans[0].append(span("send activation", "transfer", 123.1, 123.2, key="(0, 99)", peer=1))
    spans[1].append(span("receive activation", "transfer", 123.1, 123.2, peer=0))
    steps = measured_steps(TWO, spans)
    assert [step.interval is None for step in steps] == [False, True, False, True]
    assert all(rounded(step.timeline) == rounded(one_f_one_b()) for step in steps)


def test_only_steps_of_the_last_schedule_count() -> None:
    spans = steps_of([one_f_one_b()] * 4 + [one_f_one_b(loss=True)] * 4)
    measurement = measured(spans)
    assert [step.batch for step in measurement.counted] == [4, 5, 6]
    assert measurement.typical.whole_loss


def test_a_transfer_ends_when_the_receiver_has_the_message() -> None:
    spans = steps_of([one_f_one_b()] * 3)
    # On a slow link the send ends when the message is in the sender's buffers. Also, the tracer of
    # the sender may have dropped a span that the receiver's still has.
    spans[1] = [
        s._replace(end_ns=s.end_ns + 10**8) if s.name == "receive activation" else s
        for s in spans[1]
    ]
    spans[1].append(span("receive activation", "transfer", 1.0, 2.0, peer=0))
    for step in measured_steps(TWO, spans):
        (transfer,) = [a for a in step.timeline.activities if a.name == "activation"]
        assert (transfer.start, transfer.end) == (pytest.approx(1.0), pytest.approx(1.6))


def test_the_key_of_a_message_determines_its_step() -> None:
    # The last gradient of stage 1 is still in its outbox when the rank begins the next step.
    spans = steps_of([one_f_one_b()] * 3)

    def delayed(s: Span) -> Span:
        late = s.args.get("key") == "(0, 1)" and s.name == "send gradient"
        return s._replace(start_ns=113 * 10**9, end_ns=114 * 10**9) if late else s

    spans[1] = [delayed(s) for s in spans[1]]
    first, second, _ = measured_steps(TWO, spans)
    gradients = [
        [a for a in s.timeline.activities if a.name == "gradient"] for s in (first, second)
    ]
    assert [len(messages) for messages in gradients] == [1, 1]
    assert gradients[0][0].start == pytest.approx(13.0)


def test_activities_number_the_microbatches_of_their_replica() -> None:
    replicas = ((1,), (0,))
    timeline = Timeline(
        tuple(Activity("forward", m, 0, i, i, i + 1.0) for m in (0, 1) for i in range(2)),
        2.0,
        ((2.0,), (2.0,)),
        (),
    )
    spans = no_spans(replicas)
    add_step(spans, replicas, timeline, 4, 7, 0.0, 3.0)
    assert {s.args.get("microbatch") for s in spans[0]} == {None, 2, 3}
    (step,) = measured_steps(replicas, spans)
    assert rounded(step.timeline) == rounded(timeline)
    assert step.microbatches == 4
