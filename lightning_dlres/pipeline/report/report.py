"""Predicted beside measured: what a plan promised and what its run did, in one line, as Markdown
and as panels of a picture.

A pure function of the plan and the measured steps: it knows neither ranks nor files.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from lightning_dlres.core.tables import render
from lightning_dlres.core.units import format_bytes, format_seconds
from lightning_dlres.pipeline.plan.cost_model.simulator import Timeline, simulate
from lightning_dlres.pipeline.plan.plan import PipelinePlan
from lightning_dlres.pipeline.report.gantt import Panel, Places
from lightning_dlres.pipeline.report.timeline import Measurement, pipeline_seconds

_LONGEST_KIND = 26


@dataclass(frozen=True)
class RunReport:
    """What is known of a run.

    Attributes:
        plan: the plan, with the schedule that was run.
        planned_schedule: the schedule that it was made for.
        predicted: the simulated step; None where the plan was not measured.
        even_seconds: time of a step of the even split, in the simulator.
        measured: the steps as they were; None where there were none.
        clock_error: seconds by which spans of unlike hosts may be shifted against each other.
    """

    plan: PipelinePlan
    planned_schedule: str
    predicted: Timeline | None
    even_seconds: float | None
    measured: Measurement | None
    clock_error: float = 0.0

    @property
    def speedup(self) -> tuple[float | None, float | None]:
        """How many times as fast as the even split the step is: predicted, measured."""
        even = self.even_seconds
        if even is None or self.predicted is None:
            return None, None
        measured = even / self.measured.step_seconds if self.measured is not None else None
        return even / self.predicted.step_seconds, measured

    def line(self) -> str:
        """Return the figures in one line."""
        predicted, measured = self.predicted, self.measured
        if measured is None:
            promise = "" if predicted is None else f", {_time(predicted.step_seconds)} predicted"
            return f"dlres: no training step was measured{promise}."
        count = _steps(len(measured.counted))
        parts = [f"dlres: step {_time(measured.step_seconds)} measured (median of {count})"]
        if predicted is None:
            parts.append(f"bubble {measured.bubble:.0%} measured")
            parts.append("nothing predicted, since the plan was made without a measurement")
        else:
            parts[0] += f", {_time(predicted.step_seconds)} predicted"
            parts.append(f"bubble {measured.bubble:.0%} measured, {predicted.bubble:.0%} predicted")
        promised, reached = self.speedup
        if promised is not None and reached is not None:
            parts.append(
                f"{reached:.2f} times as fast as the simulated even split, {promised:.2f} predicted"
            )
        return "; ".join(parts) + "."

    def places(self) -> Places:
        """Return what each row of the picture is called."""
        plan, found = self.plan, {}
        for replica, ranks in enumerate(plan.replicas):
            for stage, rank in enumerate(ranks):
                prefix = f"replica {replica} · " if len(plan.replicas) > 1 else ""
                kind = _kind(plan, rank)
                short = kind if len(kind) <= _LONGEST_KIND else f"{kind[: _LONGEST_KIND - 1]}…"
                found[replica, stage] = f"{prefix}stage {stage} · rank {rank}\n{short}".rstrip()
        return found

    def panels(self) -> list[Panel]:
        """Return the panels of the picture: planned above measured, as far as there are any."""
        found = []
        if self.predicted is not None:
            found.append(Panel(f"Planned: {_figures(self.predicted)}", self.predicted))
        if self.measured is not None:
            typical, count = self.measured.typical, len(self.measured.counted)
            of = f", batch {typical.batch}: the typical one of {_steps(count)}" if count > 1 else ""
            found.append(Panel(f"Measured: {_figures(typical.timeline)}{of}", typical.timeline))
        return found

    def markdown(self, picture: str | None, trace: str | None) -> str:
        """Return the report.

        Args:
            picture: name of the picture's file, beside the report.
            trace: name of the trace's file, beside the report.
        """
        parts = ["# Resource report", self.line(), self._summary()]
        if picture is not None:
            parts.append(f"![What every stage does in a step]({picture})")
        parts += ["## Stages", self._stages(), "## Plan", _table(self.plan.table())]
        parts += self._cluster()
        notes = self.notes()
        if notes:
            parts += ["## Notes", "\n".join(f"- {note}" for note in notes)]
        if trace is not None:
            parts += [
                "## Trace",
                f"[{trace}]({trace}) holds what every rank did in the last steps: open it in "
                "<https://ui.perfetto.dev>.",
            ]
        return "\n\n".join(parts) + "\n"

    def notes(self) -> list[str]:
        """Return what a reader must know to read the figures right."""
        plan, measured, found = self.plan, self.measured, []
        if not plan.is_measured:
            found.append(
                "The plan was made without a measurement of this model and these devices, so "
                "nothing is predicted."
            )
        if plan.schedule != self.planned_schedule:
            found.append(
                f"The plan was made for {self.planned_schedule}, and {plan.schedule} was run. What "
                f"is predicted here is that split under {plan.schedule}."
            )
        if measured is None:
            return [*found, "No training step was recorded on all ranks: nothing is measured."]
        used = measured.typical.microbatches
        if plan.is_measured and used != plan.microbatches:
            found.append(
                f"The plan is for {plan.microbatches} micro-batches, and the batch was cut into "
                f"{used}: predicted and measured are different steps."
            )
        if any(plan.step.message):
            found.append(
                "Predicted busy times include what it takes to hand messages over; the measured "
                "ones are those of computing alone."
            )
        if measured.includes_warm_up:
            found.append(
                "There were too few steps to leave out the first two, in which caches and "
                "connections warm up."
            )
        if not measured.is_steady:
            found.append(
                "No step followed another at once, so the time of a step lacks what comes between "
                "steps, such as the optimizer."
            )
        if any(step.checked for step in measured.counted):
            found.append(
                "Steps are among these in which the loss was checked, for which the layers run "
                "forward twice."
            )
        if self.clock_error:
            found.append(
                "The clocks of the hosts were compared: spans of unlike hosts may be shifted by up "
                f"to {format_seconds(self.clock_error)} against each other."
            )
        return found

    def _summary(self) -> str:
        predicted, measured = self.predicted, self.measured
        promised, reached = self.speedup
        planned, found = ["-"] * 4, ["-"] * 4
        if predicted is not None:
            planned = [
                _time(predicted.step_seconds),
                _time(pipeline_seconds(predicted)),
                f"{predicted.bubble:.0%}",
                _ratio(promised),
            ]
        if measured is not None:
            found = [
                _time(measured.step_seconds),
                _time(measured.pipeline_seconds),
                f"{measured.bubble:.0%}",
                _ratio(reached),
            ]
        names = ["step", "first to last work of a step", "bubble", "times as fast as even split"]
        rows = [list(row) for row in zip(names, planned, found, strict=True)]
        # The even split is not run: its predicted time is what both figures of the row above are
        # about.
        rows.append(["step of the even split", _time(self.even_seconds), "-"])
        count = f", median of {_steps(len(measured.counted))}" if measured is not None else ""
        return render("", ["", "predicted", f"measured{count}"], rows)

    def _stages(self) -> str:
        plan, rows = self.plan, []
        busy = self.predicted.busy_seconds if self.predicted is not None else None
        took = self.measured.busy_seconds if self.measured is not None else None
        workload = plan.workload() if plan.is_measured else None
        for replica, ranks in enumerate(plan.replicas):
            for stage, rank in enumerate(ranks):
                promised = busy[replica][stage] if busy is not None else None
                reached = took[replica][stage] if took is not None else None
                ratio = reached / promised if reached is not None and promised else None
                peak = self.predicted.peak_bytes[stage] if self.predicted is not None else None
                limit = workload.limit(stage) if workload is not None else None
                rows.append(
                    [
                        replica,
                        stage,
                        rank,
                        _kind(plan, rank) or "-",
                        _time(promised),
                        _time(reached),
                        _ratio(ratio),
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
        return render("", [*columns, "peak memory, planned", "memory limit"], rows)

    def _cluster(self) -> list[str]:
        cluster = self.plan.cluster
        if cluster is None:
            return []
        devices = [
            [rank, cluster.kinds[device.kind], f"{device.power:.2f}", device.host or "-"]
            for rank, device in enumerate(cluster.devices)
        ]
        found = ["## Devices", render("", ["rank", "kind", "power", "host"], devices)]
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
            found += ["## Links", render("", ["ranks", "latency", "bandwidth"], links)]
        return found


def run_report(
    plan: PipelinePlan,
    schedule: str,
    even_seconds: float | None,
    measured: Measurement | None,
    clock_error: float = 0.0,
    planned_schedule: str | None = None,
) -> RunReport:
    """Return the report on a run of a plan, whose prediction is simulated for the schedule that
    was run.

    Args:
        plan: as it is at the end of the run.
        schedule: what was run.
        even_seconds: time of a step of the even split under that schedule, in the simulator.
        measured: the steps.
        clock_error: see `RunReport`.
        planned_schedule: the schedule that was planned for, where the plan does not say it any
            more.
    """
    as_run = msgspec.structs.replace(plan, schedule=schedule)
    predicted = None
    if as_run.is_measured:
        predicted = simulate(as_run.workload(), as_run.split, as_run.recompute)
    planned = planned_schedule or plan.schedule
    return RunReport(as_run, planned, predicted, even_seconds, measured, clock_error)


def _figures(timeline: Timeline) -> str:
    return f"{_time(timeline.step_seconds)} a step, bubble {timeline.bubble:.0%}"


def _kind(plan: PipelinePlan, rank: int) -> str:
    cluster = plan.cluster
    return cluster.kinds[cluster.devices[rank].kind] if cluster is not None else ""


def _steps(count: int) -> str:
    return f"{count} step" if count == 1 else f"{count} steps"


def _time(seconds: float | None) -> str:
    return "-" if seconds is None else format_seconds(float(f"{seconds:.3g}"))


def _ratio(ratio: float | None) -> str:
    return "-" if ratio is None else f"{ratio:.2f}"


def _table(text: str) -> str:
    """Return a printed table without its title, which Markdown would take for its first row."""
    lines: Sequence[str] = text.splitlines()
    return "\n".join(line for line in lines if line.startswith("|"))
