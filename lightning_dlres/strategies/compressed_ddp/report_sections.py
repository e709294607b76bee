"""Sections of the resource report on gradient synchronisation: figures, plan and timeline."""

from __future__ import annotations

from lightning.pytorch.utilities import rank_zero_warn

from lightning_dlres.gradsync.hook.ddp_state import GradientSyncState
from lightning_dlres.gradsync.report.measurement import (
    WARM_UP_STEPS,
    SyncMeasurement,
    measure_sync,
)
from lightning_dlres.gradsync.report.report import PredictedStep, SyncReport
from lightning_dlres.gradsync.report.timeline import draw_timeline
from lightning_dlres.strategies.capabilities import TIMELINE_PICTURE, MeasuredRun, ReportSections


def sync_sections(
    state: GradientSyncState, run: MeasuredRun, predicted: PredictedStep | None = None
) -> ReportSections | None:
    """Return the report's sections on a run; None if no step was recorded on all ranks.

    Args:
        state: State of the synchronisation at the end of the run.
        run: Measurements of the run.
        predicted: Predicted times of a step; None if the plan has no prediction.
    """
    # The tracer may have dropped the spans of the first steps, which count as warm-up, too. Leave
    # out at least one step: the oldest one left may have lost some of its spans.
    traced = sum(span.category == "step" for span in run.spans.get(0, ()))
    dropped = run.steps - traced
    warm_up = max(WARM_UP_STEPS - dropped, 1)
    measured = measure_sync(run.spans, warm_up=warm_up)
    if measured is None:
        return None
    report = SyncReport(
        algorithm=state.algorithm,
        plan=state.plan,
        measured=measured,
        predicted=predicted,
        clock_error=run.clock_error,
    )
    pictures = _pictures(measured) if run.draws and measured.has_tasks else {}
    return ReportSections(
        line=report.line(),
        text=report.markdown(TIMELINE_PICTURE if pictures else None, run.trace_file),
        pictures=pictures,
    )


def _pictures(measured: SyncMeasurement) -> dict[str, bytes]:
    """Return the timeline as PNG by its file name; an empty dict if it cannot be drawn."""
    step = measured.typical
    title = (
        f"Step {step.number}: {1e3 * step.backward_and_sync_seconds:.3g} ms from backward to means"
    )
    if len(measured.steps) > 1:
        title += f", the closest to the median of {len(measured.steps)} steps"
    try:
        return {TIMELINE_PICTURE: draw_timeline(step, title)}
    except Exception as error:
        # Do not lose the report because its picture fails.
        rank_zero_warn(
            f"ResourceReport: the timeline could not be drawn: {type(error).__name__}: {error}"
        )
        return {}
