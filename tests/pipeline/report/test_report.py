"""A report has the predicted and the measured figures, and notes on how to read them."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import msgspec
import pytest

from lightning_dlres.pipeline.plan.cost_model.simulator import simulate
from lightning_dlres.pipeline.plan.plan import PipelinePlan
from lightning_dlres.pipeline.profile.cluster import Link
from lightning_dlres.pipeline.profile.run_profile import StepCosts
from lightning_dlres.pipeline.report.report import RunReport, run_report
from lightning_dlres.pipeline.report.timeline import Measurement, measure
from tests.support.pipeline_profiles import plain_cluster, plain_layers
from tests.support.recorded_spans import add_step, no_spans

REPLICAS = ((1, 0),)
SPLIT = (2, 2)
SLOWER = 1.25


def plan(schedule: str = "1f1b", message: float = 0.0) -> PipelinePlan:
    links = [Link(ranks=(0, 1), latency=1e-3, bytes_per_second=1e9)]
    return PipelinePlan(
        replicas=REPLICAS,
        split=SPLIT,
        schedule=schedule,
        microbatches=4,
        layers=plain_layers([0.010] * 4, parameter_bytes=1 << 20, output_bytes=1 << 10),
        step=StepCosts(message=(message,)),
        cluster=plain_cluster(2, hosts=["here", "here"], limits=[1 << 30, None], links=links),
        even_seconds=0.5,
    )


def steps(run_plan: PipelinePlan, count: int = 6, microbatches: int = 4) -> Measurement:
    """Return a measurement in which every activity takes `SLOWER` times its predicted time."""
    timeline = simulate(replace(run_plan.workload(), microbatches=microbatches), run_plan.split)
    slower = replace(
        timeline,
        activities=tuple(
            replace(a, start=a.start * SLOWER, end=a.end * SLOWER) for a in timeline.activities
        ),
    )
    spans, interval = no_spans(run_plan.replicas), timeline.step_seconds * SLOWER
    for batch in range(count):
        start = 3.0 + batch * interval
        add_step(
            spans, run_plan.replicas, slower, microbatches, batch, start, start + interval - 1e-6
        )
    measured = measure(run_plan.replicas, spans)
    assert measured is not None
    return measured


def report(run_plan: PipelinePlan, schedule: str | None = None, count: int = 6) -> RunReport:
    return run_report(
        run_plan,
        schedule or run_plan.schedule,
        even_seconds=run_plan.even_seconds,
        measured=steps(run_plan, count),
    )


def test_the_report_has_predicted_beside_measured_figures() -> None:
    run = report(plan())
    predicted = simulate(plan().workload(), SPLIT)
    milliseconds = f"{predicted.step_seconds * 1e3:.3g} ms"
    slower = f"{predicted.step_seconds * SLOWER * 1e3:.3g} ms"
    assert f"step {slower} measured (median of 3 steps), {milliseconds} predicted" in run.line()
    assert f"{0.5 / predicted.step_seconds / SLOWER:.2f} times as fast as the" in run.line()
    assert f"{0.5 / predicted.step_seconds:.2f} predicted" in run.line()
    assert "\n" not in run.line()
    text = run.markdown("timeline.png", "trace.json")
    assert run.line() in text
    assert "![Work of every stage in a step](timeline.png)" in text
    assert "[trace.json](trace.json)" in text
    stages = [line for line in text.splitlines() if line.count("|") == 10 and "1.25" in line]
    assert len(stages) == 2, "one row for each stage, with measured over predicted"
    assert "| 0 - 1 | 1 ms    |" in text
    assert "1 GiB" in text
    assert run.notes() == []
    assert [panel.title.split(":")[0] for panel in run.panels()] == ["Planned", "Measured"]
    assert run.row_labels()[0, 0] == "stage 0 · rank 1\ndevice"


def test_every_table_begins_after_an_empty_line() -> None:
    lines = report(plan()).markdown(None, None).splitlines()
    for before, line in pairwise(lines):
        if line.startswith("|"):
            assert not before or before.startswith("|"), line
    assert "timeline.png" not in "\n".join(lines)


def test_a_plan_without_a_measurement_predicts_nothing() -> None:
    unmeasured = PipelinePlan(replicas=REPLICAS, split=SPLIT)
    run = run_report(unmeasured, "1f1b", even_seconds=None, measured=steps(plan()))
    assert "nothing predicted" in run.line()
    assert "even split" not in run.line()
    assert "without a measurement" in run.notes()[0]
    assert [panel.title.split(":")[0] for panel in run.panels()] == ["Measured"]
    assert "| step                         | -         |" in run.markdown(None, None)


def test_a_run_without_steps_has_only_the_prediction() -> None:
    run = run_report(plan(), "1f1b", even_seconds=0.5, measured=None)
    assert "no training step was measured" in run.line()
    assert "predicted" in run.line()
    assert [panel.title.split(":")[0] for panel in run.panels()] == ["Planned"]
    assert "nothing is measured" in run.notes()[-1]
    run.markdown("timeline.png", None)
    neither = run_report(
        PipelinePlan(replicas=REPLICAS, split=SPLIT), "1f1b", even_seconds=None, measured=None
    )
    assert neither.panels() == []
    neither.markdown(None, None)


@pytest.mark.parametrize("planned_again", [False, True])
def test_the_prediction_is_for_the_schedule_that_was_run(planned_again: bool) -> None:
    as_run = msgspec.structs.replace(plan(), schedule="gpipe") if planned_again else plan()
    run = run_report(
        as_run, "gpipe", even_seconds=0.6, measured=steps(plan("gpipe")), planned_schedule="1f1b"
    )
    assert run.predicted == simulate(plan("gpipe").workload(), SPLIT)
    assert run.notes()[0].startswith("The plan was made for 1f1b, and gpipe was run.")
    assert run.speedup[0] == pytest.approx(0.6 / run.predicted.step_seconds)


def test_notes_explain_the_figures() -> None:
    assert "too few steps" in " ".join(report(plan(), count=2).notes())
    assert "the optimizer" in " ".join(report(plan(), count=1).notes())
    other = run_report(plan(), "1f1b", even_seconds=0.5, measured=steps(plan(), microbatches=3))
    assert "is for 4 micro-batches, and the batch was cut into 3" in " ".join(other.notes())
    two_hosts = run_report(
        plan(), "1f1b", even_seconds=0.5, measured=steps(plan()), clock_error=2e-3
    )
    assert "up to 2 ms against those of rank 0" in " ".join(two_hosts.notes())
    assert "spends on messages" in " ".join(report(plan(message=1e-3)).notes())


def test_replicas_have_rows_of_their_own() -> None:
    two = msgspec.structs.replace(plan(), replicas=((0,), (1,)), split=(4,))
    run = run_report(two, "1f1b", even_seconds=0.5, measured=steps(two))
    names = [f"replica {replica} · stage 0 · rank {replica}\ndevice" for replica in (0, 1)]
    assert list(run.row_labels().values()) == names
    assert run.markdown(None, None).count("1.25") == 2
