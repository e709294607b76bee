"""Optional capabilities of strategies, read as attributes by callbacks, data modules and commands.

Their code never tests for a strategy's class, so a new strategy needs no change in it. Every
attribute is optional: Lightning's own strategies have none.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from lightning.pytorch.strategies import Strategy

from lightning_dlres.core.trace import Span, Tracer
from lightning_dlres.pipeline.plan.plan import PipelinePlan
from lightning_dlres.pipeline.plan.planner import PlanConstraints
from lightning_dlres.pipeline.profile.config import ProfileConfig

# File name of the timeline picture. `ResourceReport` removes an old file of this name from the
# directory if the new report has no such picture.
TIMELINE_PICTURE = "timeline.png"


@dataclass(frozen=True, kw_only=True)
class MeasuredRun:
    """Measurements of one `fit`, from which a strategy makes its sections of the resource report.

    Attributes:
        spans: Spans of the last steps, by rank, on rank 0's clock; empty if none were recorded.
        clock_error: Seconds by which another host's spans may be shifted against those of rank 0.
        steps: Number of training steps of the `fit`; the spans may hold fewer.
        plan_at_start: Pipeline plan when training began, None without one; the plan's schedule may
            have changed since.
        trace_file: Name of the trace file beside the report; None if none is written.
        draws: True if the strategy should draw pictures. False if no files are written.
    """

    spans: Mapping[int, Sequence[Span]]
    clock_error: float
    steps: int
    plan_at_start: PipelinePlan | None
    trace_file: str | None
    draws: bool


@dataclass(frozen=True, kw_only=True)
class ReportSections:
    """A strategy's part of the resource report.

    Attributes:
        line: The figures in one line, for the console.
        text: The report as Markdown.
        pictures: PNG files by file name, to which the text may refer.
        rank_names: Names of ranks in the trace; ranks without a name are called "rank N".
    """

    line: str
    text: str
    pictures: Mapping[str, bytes] = field(default_factory=dict)
    rank_names: Mapping[int, str] = field(default_factory=dict)


class PlanningOptions(Protocol):
    """Options that constrain a pipeline plan.

    Attributes:
        module: Name of the module to pipeline; None chooses the only candidate.
        split_batch: The user's function that cuts a batch into parts of given sizes; None cuts
            along the first dimension.
        profile: Options of the profile.
        plan_constraints: Parts of the plan that the user fixed.
    """

    @property
    def module(self) -> str | None: ...

    @property
    def split_batch(self) -> Callable[[Any, Sequence[int]], Sequence[Any]] | None: ...

    @property
    def profile(self) -> ProfileConfig: ...

    @property
    def plan_constraints(self) -> PlanConstraints: ...

    def num_microbatches(self, devices: int) -> int:
        """Return the number of micro-batches of a batch on this many devices."""

    def memory_limit_of(self, rank: int, world_size: int) -> int | None:
        """Return the bytes that the model may take on a rank's device; None without a limit."""


@runtime_checkable
class PipelinePlanning(Protocol):
    """A strategy that plans a pipeline for the model.

    Attributes:
        plan: Plan of the current or last run; None before the first.
        options: Checked arguments, which constrain the plan.
    """

    @property
    def plan(self) -> PipelinePlan | None: ...

    @property
    def options(self) -> PlanningOptions: ...


@runtime_checkable
class ReportsRun(Protocol):
    """A strategy that contributes sections to `ResourceReport`."""

    def report_sections(self, run: MeasuredRun) -> ReportSections | None:
        """Return the sections on a run, or None if nothing can be reported.

        Called on rank 0 only.
        """


@runtime_checkable
class FetchesOptimizerStates(Protocol):
    """A strategy that fetches optimizer states from servers, for checkpoints.

    Attributes:
        state_directory: Directory of the files in which it puts them; None for memory.
    """

    state_directory: Path | None


def reads_for_all_ranks(strategy: Strategy) -> bool:
    """Return True if one rank reads the data and sends it to all others."""
    return bool(getattr(strategy, "reads_for_all_ranks", False))


def updates_elsewhere(strategy: Strategy) -> bool:
    """Return True if servers update the parameters, and the optimizers keep no state on a rank."""
    return bool(getattr(strategy, "updates_elsewhere", False))


def plan_of(strategy: Strategy) -> PipelinePlan | None:
    """Return the strategy's pipeline plan, or None if it has none."""
    plan = getattr(strategy, "plan", None)
    return plan if isinstance(plan, PipelinePlan) else None


def server_report_of(strategy: Strategy) -> str | None:
    """Return the strategy's report of its parameter servers, or None if it has none."""
    report = getattr(strategy, "server_report", None)
    return report if isinstance(report, str) else None


def tracer_of(strategy: Strategy) -> Tracer | None:
    """Return the tracer in which the strategy records spans, or None if it records none."""
    tracer = getattr(strategy, "tracer", None)
    return tracer if isinstance(tracer, Tracer) else None
