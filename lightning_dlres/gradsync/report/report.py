"""Report of gradient synchronisation: the measured steps and the plan, as a line and as Markdown.

It is a pure function of the plan and the measured steps, and uses neither ranks nor files.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from lightning_dlres.core.tables import render
from lightning_dlres.core.units import format_bytes, format_seconds
from lightning_dlres.gradsync.plan.plan import RAW, SyncPlan
from lightning_dlres.gradsync.report.measurement import RankFigures, SyncMeasurement
from lightning_dlres.gradsync.report.rank_steps import TASKS

# Hooks of torch that synchronise gradients without tasks of ours, by algorithm.
_TORCH_HOOKS = {"powersgd": "torch's PowerSGD hook"}


class PredictedStep(Protocol):
    """Predicted times of a step, in seconds.

    Attributes:
        step_seconds: Backward and synchronisation; time in which both run counts once.
        compute_seconds: Compute tasks of the busiest rank.
        transfer_seconds: Transfers of the busiest direction of a link.
    """

    @property
    def step_seconds(self) -> float: ...

    @property
    def compute_seconds(self) -> float: ...

    @property
    def transfer_seconds(self) -> float: ...


@dataclass(frozen=True, kw_only=True)
class SyncReport:
    """The plan of a run and the measurement of its steps.

    Attributes:
        algorithm: Name of a gradient codec, "raw", "powersgd", or "none".
        plan: The plan; None if the gradients were not synchronised by tasks.
        measured: Measured steps.
        predicted: Predicted times of a step; None if nothing was predicted.
        clock_error: Seconds by which another host's spans may be shifted against those of rank 0.
    """

    algorithm: str
    plan: SyncPlan | None
    measured: SyncMeasurement
    predicted: PredictedStep | None = None
    clock_error: float = 0.0

    def line(self) -> str:
        """Return the figures of the run in one line."""
        measured = self.measured
        count = len(measured.steps)
        step = "" if measured.step_seconds is None else f"step {_time(measured.step_seconds)}, "
        backward = _time(measured.backward_and_sync_seconds)
        parts = [
            f"dlres: {step}backward with synchronisation {backward} "
            f"measured (median of {count} {'step' if count == 1 else 'steps'})"
        ]
        if self.predicted is not None:
            parts[0] += f", {_time(self.predicted.step_seconds)} predicted"
        exposed = max(measured.ranks, key=lambda rank: rank.exposed_seconds)
        waiting = f"exposed {_time(exposed.exposed_seconds)}"
        if len(measured.ranks) > 1:
            waiting += f" on rank {exposed.rank}"
        if not measured.has_tasks:
            return "; ".join([*parts, f"{self._without_tasks()}, {waiting}"]) + "."
        busiest = max(measured.ranks, key=lambda rank: rank.sent_bytes)
        sent = f"rank {busiest.rank} sends {format_bytes(busiest.sent_bytes)} a step"
        if busiest.ratio is not None:
            sent += f", compressed {busiest.ratio:.1f} times"
        return "; ".join([*parts, sent, waiting]) + "."

    def markdown(self, picture: str | None, trace: str | None) -> str:
        """Return the report as Markdown.

        Args:
            picture: File name of the timeline, in the report's directory; None if there is none.
            trace: File name of the trace, in the report's directory; None if there is none.
        """
        parts = ["# Resource report", self.line()]
        if self.predicted is not None:
            parts += ["## Predicted and measured", self._prediction_table(self.predicted)]
        parts += ["## Ranks", self._ranks_table()]
        if picture is not None:
            parts.append(f"![Tasks of every rank in a step]({picture})")
        parts += ["## Plan", self._plan_text()]
        parts += ["## Notes", "\n".join(f"- {note}" for note in self.notes())]
        if trace is not None:
            parts += [
                "## Trace",
                f"[{trace}]({trace}) holds the work of every rank in the last steps. Open it in "
                "<https://ui.perfetto.dev>. Compute tasks are in the row `dlres-sync-compute`, "
                "sent messages in `dlres-sync-transfer`, received ones in `receive-GRADIENT_SYNC-` "
                "with the number of the sender, or in `receive-sockets` over ZeroMQ.",
            ]
        return "\n\n".join(parts) + "\n"

    def notes(self) -> list[str]:
        """Return the notes that a reader needs to interpret the figures of this run."""
        notes = [
            "Figures of a rank are medians over the steps.",
            "*Exposed* is the time from the readiness of a rank's last gradients until all its "
            "gradients are means. The step waits for it. On a GPU it starts when the host has "
            "queued the last gradients, so it may include the end of the device's backward.",
        ]
        if self.measured.has_tasks:
            notes += [
                "*Computing* is the part of the exposed time in which compute tasks ran on the "
                "rank itself. In the rest, it waited for messages.",
                "*Sent* and *received* are bytes of payloads. *Ratio* is the size of the sent "
                "gradients without compression over that of their payloads.",
                "*Send* and *receive* are the time that threads of the rank worked on messages. "
                "*Link* is the time in which a message was on its way in the busier direction of "
                "the rank's link.",
            ]
            if any(rank.residual_norm is not None for rank in self.measured.ranks):
                notes.append(
                    "*Residual* is the norm of what a rank has not sent, over that of the mean "
                    "gradient. It is measured every `log_every_n_steps` steps only."
                )
        if self.measured.includes_warm_up:
            notes.append(
                "There were too few steps to leave out the first ones, in which connections are "
                "made."
            )
        if self.clock_error:
            notes.append(
                "The clocks of the hosts were compared. Spans of another host may be shifted by up "
                f"to {format_seconds(self.clock_error)} against those of rank 0."
            )
        return notes

    def _without_tasks(self) -> str:
        if len(self.measured.ranks) == 1:
            return "a single rank has nothing to synchronise"
        return f"gradients are synchronised by {self._torch_hook()}"

    def _torch_hook(self) -> str:
        return _TORCH_HOOKS.get(self.algorithm, "DistributedDataParallel's all-reduce")

    def _prediction_table(self, predicted: PredictedStep) -> str:
        measured = self.measured
        rows = [
            (
                "backward with synchronisation",
                predicted.step_seconds,
                measured.backward_and_sync_seconds,
            ),
            ("compute tasks, busiest rank", predicted.compute_seconds, measured.compute_seconds),
            ("messages, busiest link", predicted.transfer_seconds, measured.link_seconds),
        ]
        cells = [[name, _ms(expected), _ms(actual)] for name, expected, actual in rows]
        return render("", ["ms", "predicted", "measured"], cells)

    def _ranks_table(self) -> str:
        ranks = self.measured.ranks
        if not self.measured.has_tasks:
            rows = [[rank.rank, _ms(rank.exposed_seconds)] for rank in ranks]
            return render("", ["rank", "exposed ms"], rows)
        columns = ["rank", "sent", "received", "ratio", *(f"{name} ms" for name in TASKS)]
        columns += ["link ms", "exposed ms", "computing ms", "residual"]
        return render("", columns, [_row(rank) for rank in ranks])

    def _plan_text(self) -> str:
        plan = self.plan
        if plan is None or not self.measured.has_tasks:
            return (
                f"Algorithm `{self.algorithm}`: {self._without_tasks()}. So there are no tasks, "
                "and no timeline of them."
            )
        codecs: dict[str, set[str]] = {}
        for unit in plan.units:
            codecs.setdefault(unit.gradient, set()).add(unit.codec)
        raw = sum(names == {RAW} for names in codecs.values())
        elements = sum(unit.count for unit in plan.units)
        raw_elements = sum(unit.count for unit in plan.units if unit.codec == RAW)
        share = raw_elements / elements if elements else 0.0
        rows: list[list[object]] = [
            ["algorithm", self.algorithm],
            ["topology", plan.topology],
            ["ranks", plan.world_size],
            ["units", len(plan.units)],
            ["compressed gradients", len(codecs) - raw],
            ["raw gradients", raw],
            ["elements", elements],
            ["raw elements", f"{raw_elements} ({share:.1%})"],
        ]
        return render("", ["plan", ""], rows)


def _row(rank: RankFigures) -> list[object]:
    return [
        rank.rank,
        format_bytes(rank.sent_bytes),
        format_bytes(rank.received_bytes),
        rank.ratio,
        *(_ms(rank.task_seconds[name]) for name in TASKS),
        _ms(rank.link_seconds),
        _ms(rank.exposed_seconds),
        _ms(rank.exposed_compute_seconds),
        rank.residual_norm,
    ]


def _time(seconds: float) -> str:
    return format_seconds(float(f"{seconds:.3g}"))


def _ms(seconds: float) -> float:
    return float(f"{1e3 * seconds:.3g}")
