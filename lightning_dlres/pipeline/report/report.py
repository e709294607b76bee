"""Report of a run: the plan's prediction beside the measurement, as a line, as Markdown and as
panels of a chart.

It is a pure function of the plan and the measured steps, and uses neither ranks nor files.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from lightning_dlres.core.tables import render
from lightning_dlres.core.units import format_bytes, format_seconds
from lightning_dlres.pipeline.plan.cost_model.simulator import Timeline, simulate
from lightning_dlres.pipeline.plan.plan import PipelinePlan
from lightning_dlres.pipeline.report.gantt import Panel, RowLabels
from lightning_dlres.pipeline.report.timeline import Measurement, pipeline_seconds

# Characters of a device's kind in a row label; a longer kind is cut.
_MAX_KIND_LENGTH = 26


@dataclass(frozen=True)
class RunReport:
    """A plan and the measurement of its run.

    Attributes:
        plan: The plan, with the schedule that was run.
        planned_schedule: Schedule for which the plan was made.
        predicted: Simulated step; None if the plan was made without a measurement.
        even_seconds: Simulated seconds of a step of the even split, in which every stage has the
            same number of layers. None if the plan was made without a measurement.
        measured: Measured steps; None if no step was recorded on all ranks.
        clock_error: Seconds by which another host's spans may be shifted against those of rank 0.
    """

    plan: PipelinePlan
    planned_schedule: str
    predicted: Timeline | None
    even_seconds: float | None
    measured: Measurement | None
    clock_error: float = 0.0

    @property
    def speedup(self) -> tuple[float | None, float | None]:
        """Speed-up over the simulated even split: (predicted, measured); None if unknown."""
        even = self.even_seconds
        if even is None or self.predicted is None:
            return None, None
        measured = even / self.measured.step_seconds if self.measured is not None else None
        return even / self.predicted.step_seconds, measured

    def line(self) -> str:
        """Return the figures of the run in one line."""
        predicted, measured = self.predicted, self.measured
        if measured is None:
            prediction = (
                "" if predicted is None else f", {_format_time(predicted.step_seconds)} predicted"
            )
            return f"dlres: no training step was measured{prediction}."
        count = _format_steps(len(measured.counted))
        parts = [f"dlres: step {_format_time(measured.step_seconds)} measured (median of {count})"]
        if predicted is None:
            parts.append(f"bubble {measured.bubble:.0%} measured")
            parts.append("nothing predicted, because the plan was made without a measurement")
        else:
            parts[0] += f", {_format_time(predicted.step_seconds)} predicted"
            parts.append(f"bubble {measured.bubble:.0%} measured, {predicted.bubble:.0%} predicted")
        predicted_speedup, measured_speedup = self.speedup
        if predicted_speedup is not None and measured_speedup is not None:
            parts.append(
                f"{measured_speedup:.2f} times as fast as the simulated even split, "
                f"{predicted_speedup:.2f} predicted"
            )
        return "; ".join(parts) + "."

    def row_labels(self) -> RowLabels:
        """Return the label of each row of the chart: stage, rank, and kind of the device."""
        plan, labels = self.plan, {}
        for replica, ranks in enumerate(plan.replicas):
            for stage, rank in enumerate(ranks):
                prefix = f"replica {replica} · " if len(plan.replicas) > 1 else ""
                kind = _kind_name(plan, rank)
                short = (
                    kind if len(kind) <= _MAX_KIND_LENGTH else f"{kind[: _MAX_KIND_LENGTH - 1]}…"
                )
                labels[replica, stage] = f"{prefix}stage {stage} · rank {rank}\n{short}".rstrip()
        return labels

    def panels(self) -> list[Panel]:
        """Return the panels of the chart: the planned step, then the measured one, if known."""
        panels = []
        if self.predicted is not None:
            panels.append(Panel(f"Planned: {_format_figures(self.predicted)}", self.predicted))
        if self.measured is not None:
            typical, count = self.measured.typical, len(self.measured.counted)
            title = f"Measured: {_format_figures(typical.timeline)}"
            if count > 1:
                title += (
                    f", batch {typical.batch}, the closest to the median of {_format_steps(count)}"
                )
            panels.append(Panel(title, typical.timeline))
        return panels

    def markdown(self, picture: str | None, trace: str | None) -> str:
        """Return the report as Markdown.

        Args:
            picture: File name of the chart, in the report's directory; None if there is none.
            trace: File name of the trace, in the report's directory; None if there is none.
        """
        parts = ["# Resource report", self.line(), self._summary_table()]
        if picture is not None:
            parts.append(f"![Work of every stage in a step]({picture})")
        parts += ["## Stages", self._stages_table(), "## Plan", _without_title(self.plan.table())]
        parts += self._cluster_sections()
        notes = self.notes()
        if notes:
            parts += ["## Notes", "\n".join(f"- {note}" for note in notes)]
        if trace is not None:
            parts += [
                "## Trace",
                f"[{trace}]({trace}) holds the work of every rank in the last steps. Open it "
                "in <https://ui.perfetto.dev>.",
            ]
        return "\n\n".join(parts) + "\n"

    def notes(self) -> list[str]:
        """Return the notes that a reader needs to interpret the figures of this run."""
        plan, measured, notes = self.plan, self.measured, []
        if not plan.is_measured:
            notes.append(
                "The plan was made without a measurement of this model and these devices, so "
                "nothing is predicted."
            )
        if plan.schedule != self.planned_schedule:
            notes.append(
                f"The plan was made for {self.planned_schedule}, and {plan.schedule} was run. The "
                f"prediction here is for the same split under {plan.schedule}."
            )
        if measured is None:
            return [*notes, "No training step was recorded on all ranks, so nothing is measured."]
        used = measured.typical.microbatches
        if plan.is_measured and used != plan.microbatches:
            notes.append(
                f"The plan is for {plan.microbatches} micro-batches, and the batch was cut into "
                f"{used}, so predicted and measured steps differ."
            )
        if any(plan.step.message):
            notes.append(
                "Predicted busy times include the time that a stage spends on messages. Measured "
                "busy times are those of computation alone."
            )
        if measured.includes_warm_up:
            notes.append(
                "There were too few steps to leave out the first two. In these, caches and "
                "connections warm up."
            )
        if not measured.is_steady:
            notes.append(
                "No step directly followed another. So the time of a step does not include the "
                "work between steps, such as the optimizer's."
            )
        if any(step.checked for step in measured.counted):
            notes.append(
                "In some of these steps dlres checked the loss, for which the layers ran forward "
                "twice."
            )
        if self.clock_error:
            notes.append(
                "The clocks of the hosts were compared. Spans of another host may be shifted by up "
                f"to {format_seconds(self.clock_error)} against those of rank 0."
            )
        return notes

    def _summary_table(self) -> str:
        predicted, measured = self.predicted, self.measured
        predicted_speedup, measured_speedup = self.speedup
        planned, measured_figures = ["-"] * 4, ["-"] * 4
        if predicted is not None:
            planned = [
                _format_time(predicted.step_seconds),
                _format_time(pipeline_seconds(predicted)),
                f"{predicted.bubble:.0%}",
                _format_ratio(predicted_speedup),
            ]
        if measured is not None:
            measured_figures = [
                _format_time(measured.step_seconds),
                _format_time(measured.pipeline_seconds),
                f"{measured.bubble:.0%}",
                _format_ratio(measured_speedup),
            ]
        names = ["step", "first to last work of a step", "bubble", "times as fast as even split"]
        rows = [list(row) for row in zip(names, planned, measured_figures, strict=True)]
        # Both speed-ups above compare with this simulated time, since the even split is not run.
        rows.append(["step of the even split", _format_time(self.even_seconds), "-"])
        count = (
            f", median of {_format_steps(len(measured.counted))}" if measured is not None else ""
        )
        return render("", ["", "predicted", f"measured{count}"], rows)

    def _stages_table(self) -> str:
        plan, rows = self.plan, []
        predicted_busy = self.predicted.busy_seconds if self.predicted is not None else None
        measured_busy = self.measured.busy_seconds if self.measured is not None else None
        workload = plan.workload() if plan.is_measured else None
        for replica, ranks in enumerate(plan.replicas):
            for stage, rank in enumerate(ranks):
                predicted = predicted_busy[replica][stage] if predicted_busy is not None else None
                measured = measured_busy[replica][stage] if measured_busy is not None else None
                ratio = measured / predicted if measured is not None and predicted else None
                peak = self.predicted.peak_bytes[stage] if self.predicted is not None else None
                limit = workload.memory_limit(stage) if workload is not None else None
                rows.append(
                    [
                        replica,
                        stage,
                        rank,
                        _kind_name(plan, rank) or "-",
                        _format_time(predicted),
                        _format_time(measured),
                        _format_ratio(ratio),
                        "-" if peak is None else format_bytes(peak),
                        "-" if limit is None else format_bytes(limit),
                    ]
                )
        columns = [
            "replica",
            "stage",
            "rank",
            "device",
            "busy, predicted",
            "busy, measured",
            "ratio",
        ]
        return render("", [*columns, "peak memory, predicted", "memory limit"], rows)

    def _cluster_sections(self) -> list[str]:
        cluster = self.plan.cluster
        if cluster is None:
            return []
        devices = [
            [rank, cluster.kinds[device.kind], f"{device.power:.2f}", device.host or "-"]
            for rank, device in enumerate(cluster.devices)
        ]
        sections = ["## Devices", render("", ["rank", "kind", "power", "host"], devices)]
        links = [
            [
                " - ".join(map(str, link.ranks)),
                format_seconds(link.latency),
                f"{format_bytes(round(link.bytes_per_second))}/s"
                if link.bytes_per_second != float("inf")
                else "unlimited",
            ]
            for link in cluster.links
        ]
        if links:
            sections += ["## Links", render("", ["ranks", "latency", "bandwidth"], links)]
        return sections


def run_report(
    plan: PipelinePlan,
    schedule: str,
    *,
    even_seconds: float | None,
    measured: Measurement | None,
    clock_error: float = 0.0,
    planned_schedule: str | None = None,
) -> RunReport:
    """Return the report on a run of a plan.

    The prediction is simulated for the schedule that was run.

    Args:
        plan: Plan at the end of the run.
        schedule: Schedule that was run.
        even_seconds: Simulated seconds of a step of the even split under this schedule.
        measured: Measured steps; None if no step was recorded on all ranks.
        clock_error: See `RunReport`.
        planned_schedule: Schedule for which the plan was made; None for the plan's own.
    """
    as_run = msgspec.structs.replace(plan, schedule=schedule)
    predicted = None
    if as_run.is_measured:
        predicted = simulate(as_run.workload(), as_run.split, as_run.recompute)
    planned = planned_schedule or plan.schedule
    return RunReport(as_run, planned, predicted, even_seconds, measured, clock_error)


def _format_figures(timeline: Timeline) -> str:
    return f"{_format_time(timeline.step_seconds)} a step, bubble {timeline.bubble:.0%}"


def _kind_name(plan: PipelinePlan, rank: int) -> str:
    cluster = plan.cluster
    return cluster.kinds[cluster.devices[rank].kind] if cluster is not None else ""


def _format_steps(count: int) -> str:
    return f"{count} step" if count == 1 else f"{count} steps"


def _format_time(seconds: float | None) -> str:
    return "-" if seconds is None else format_seconds(float(f"{seconds:.3g}"))


def _format_ratio(ratio: float | None) -> str:
    return "-" if ratio is None else f"{ratio:.2f}"


def _without_title(text: str) -> str:
    """Return a printed table without its title, which Markdown would read as the first row."""
    lines: Sequence[str] = text.splitlines()
    return "\n".join(line for line in lines if line.startswith("|"))
