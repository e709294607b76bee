"""The pipeline strategy's sections of the resource report: its plan beside the measured steps."""

from __future__ import annotations

from dataclasses import replace

from lightning.pytorch.utilities import rank_zero_warn

from lightning_dlres.pipeline.plan.plan import PipelinePlan
from lightning_dlres.pipeline.plan.planner import even_step_seconds
from lightning_dlres.pipeline.plan.schedules.registry import schedule_named
from lightning_dlres.pipeline.report.gantt import draw
from lightning_dlres.pipeline.report.report import RunReport, run_report
from lightning_dlres.pipeline.report.timeline import WARM_UP_STEPS, measure
from lightning_dlres.strategies.capabilities import TIMELINE_PICTURE, MeasuredRun, ReportSections


def pipeline_sections(plan: PipelinePlan, schedule: str, run: MeasuredRun) -> ReportSections:
    """Return the report's sections on a run of a plan.

    Args:
        plan: Plan at the end of the run.
        schedule: Schedule that was run.
        run: Measurements of the run.
    """
    # The tracer holds the last steps only, so it may hold fewer warm-up steps, or none.
    traced_steps = sum(span.category == "step" for span in run.spans.get(0, ()))
    warm_up = max(WARM_UP_STEPS - (run.steps - traced_steps), 0)
    report = run_report(
        plan,
        schedule,
        even_seconds=_even_seconds(plan, schedule),
        measured=measure(plan.replicas, run.spans, warm_up),
        clock_error=run.clock_error,
        planned_schedule=run.plan_at_start.schedule if run.plan_at_start is not None else None,
    )
    pictures = _pictures(report) if run.draws else {}
    return ReportSections(
        line=report.line(),
        text=report.markdown(TIMELINE_PICTURE if pictures else None, run.trace_file),
        pictures=pictures,
        rank_names={rank: plan.rank_name(rank) for rank in run.spans},
    )


def _pictures(report: RunReport) -> dict[str, bytes]:
    panels = report.panels()
    if not panels:
        return {}
    try:
        return {TIMELINE_PICTURE: draw(panels, report.row_labels())}
    except Exception as error:
        # Do not lose the report because its picture fails.
        rank_zero_warn(
            f"ResourceReport: the timeline could not be drawn: {type(error).__name__}: {error}"
        )
        return {}


def _even_seconds(plan: PipelinePlan, schedule: str) -> float | None:
    """Return the simulated step time of the even split under a schedule, in seconds."""
    if not plan.is_measured:
        return None
    if schedule == plan.schedule and plan.even_seconds is not None:
        return plan.even_seconds
    return even_step_seconds(replace(plan.workload(), schedule=schedule_named(schedule)))
