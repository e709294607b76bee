"""A report says what was predicted and what was measured, and what it cannot know."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import msgspec
import pytest

from lightning_dlres.pipeline.plan.cost_model.costs import Workload
from lightning_dlres.pipeline.plan.cost_model.simulator import simulate
from lightning_dlres.pipeline.plan.plan import PipelinePlan
from lightning_dlres.pipeline.profile.cluster import Link
from lightning_dlres.pipeline.profile.run_profile import StepCosts
from lightning_dlres.pipeline.report.report import RunReport, run_report
from lightning_dlres.pipeline.report.timeline import Measurement, measure
from tests.support.pipeline_profiles import plain_cluster, plain_layers
from tests.support.recorded_spans import add_step, empty

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


def workload(given: PipelinePlan) -> Workload:
    return given.workload()


def steps(given: PipelinePlan, count: int = 6, microbatches: int = 4) -> Measurement:
    """Return a measurement in which everything takes `SLOWER` times as long as predicted."""
    timeline = simulate(replace(workload(given), microbatches=microbatches), given.split)
    slower = replace(
        timeline,
        activities=tuple(
            replace(a, start=a.start * SLOWER, end=a.end * SLOWER) for a in timeline.activities
        ),
    )
    spans, every = empty(given.replicas), timeline.step_seconds * SLOWER
    for batch in range(count):
        start = 3.0 + batch * every
        add_step(spans, given.replicas, slower, microbatches, batch, start, start + every - 1e-6)
    found = measure(given.replicas, spans)
    assert found is not None
    return found


def report(given: PipelinePlan, schedule: str | None = None, count: int = 6) -> RunReport:
    return run_report(given, schedule or given.schedule, given.even_seconds, steps(given, count))


def test_predicted_stands_beside_measured() -> None:
    made = report(plan())
    predicted = simulate(workload(plan()), SPLIT)
    milliseconds = f"{predicted.step_seconds * 1e3:.3g} ms"
    slower = f"{predicted.step_seconds * SLOWER * 1e3:.3g} ms"
    assert f"step {slower} measured (median of 3 steps), {milliseconds} predicted" in made.line()
    assert f"{0.5 / predicted.step_seconds / SLOWER:.2f} times as fast as the" in made.line()
    assert f"{0.5 / predicted.step_seconds:.2f} predicted" in made.line()
    assert "\n" not in made.line()
    text = made.markdown("timeline.png", "trace.json")
    assert made.line() in text
    assert "![What every stage does in a step](timeline.png)" in text
    assert "[trace.json](trace.json)" in text
    stages = [line for line in text.splitlines() if line.count("|") == 10 and "1.25" in line]
    assert len(stages) == 2, "one row for each stage, with measured over predicted"
    assert "| 0 - 1 | 1 ms    |" in text
    assert "1 GiB" in text
    assert made.notes() == []
    assert [panel.title.split(":")[0] for panel in made.panels()] == ["Planned", "Measured"]
    assert made.places()[0, 0] == "stage 0 · rank 1\ndevice"


def test_every_table_is_one_for_markdown() -> None:
    lines = report(plan()).markdown(None, None).splitlines()
    for before, line in pairwise(lines):
        if line.startswith("|"):
            assert not before or before.startswith("|"), line
    assert "timeline.png" not in "\n".join(lines)


def test_a_plan_without_a_measurement_promises_nothing() -> None:
    bare = PipelinePlan(replicas=REPLICAS, split=SPLIT)
    made = run_report(bare, "1f1b", None, steps(plan()))
    assert "nothing predicted" in made.line()
    assert "even split" not in made.line()
    assert "without a measurement" in made.notes()[0]
    assert [panel.title.split(":")[0] for panel in made.panels()] == ["Measured"]
    assert "| step                         | -         |" in made.markdown(None, None)


def test_a_run_without_steps_has_the_prediction_only() -> None:
    made = run_report(plan(), "1f1b", 0.5, None)
    assert "no training step was measured" in made.line()
    assert "predicted" in made.line()
    assert [panel.title.split(":")[0] for panel in made.panels()] == ["Planned"]
    assert "nothing is measured" in made.notes()[-1]
    made.markdown("timeline.png", None)
    neither = run_report(PipelinePlan(replicas=REPLICAS, split=SPLIT), "1f1b", None, None)
    assert neither.panels() == []
    neither.markdown(None, None)


@pytest.mark.parametrize("planned_again", [False, True])
def test_another_schedule_than_planned_is_named_and_simulated(planned_again: bool) -> None:
    as_run = msgspec.structs.replace(plan(), schedule="gpipe") if planned_again else plan()
    made = run_report(as_run, "gpipe", 0.6, steps(plan("gpipe")), 0.0, "1f1b")
    assert made.predicted == simulate(workload(plan("gpipe")), SPLIT)
    assert made.notes()[0].startswith("The plan was made for 1f1b, and gpipe was run.")
    assert made.speedup[0] == pytest.approx(0.6 / made.predicted.step_seconds)


def test_notes_say_how_to_read_the_figures() -> None:
    assert "too few steps" in " ".join(report(plan(), count=2).notes())
    assert "the optimizer" in " ".join(report(plan(), count=1).notes())
    other = run_report(plan(), "1f1b", 0.5, steps(plan(), microbatches=3))
    assert "is for 4 micro-batches, and the batch was cut into 3" in " ".join(other.notes())
    far = run_report(plan(), "1f1b", 0.5, steps(plan()), clock_error=2e-3)
    assert "up to 2 ms against each other" in " ".join(far.notes())
    assert "hand messages over" in " ".join(report(plan(message=1e-3)).notes())


def test_virtual_machines_have_rows_of_their_own() -> None:
    two = msgspec.structs.replace(plan(), replicas=((0,), (1,)), split=(4,))
    made = run_report(two, "1f1b", 0.5, steps(two))
    names = [f"replica {replica} · stage 0 · rank {replica}\ndevice" for replica in (0, 1)]
    assert list(made.places().values()) == names
    assert made.markdown(None, None).count("1.25") == 2
