"""`ResourceReport()`: predicted beside measured when training has ended, as a report, a picture and
a trace, so that nobody has to believe a planner."""

from __future__ import annotations

import os
import shutil
import statistics
import tempfile
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from typing_extensions import override

from lightning_dlres.callbacks.gathering import Gathered, gather, last_steps
from lightning_dlres.callbacks.offloading import memory_of
from lightning_dlres.core.errors import ConfigError, got_expected
from lightning_dlres.core.trace import Span, Tracer, write_chrome_trace
from lightning_dlres.core.units import format_seconds
from lightning_dlres.pipeline.plan.plan import PipelinePlan
from lightning_dlres.pipeline.plan.planning import even_step_seconds
from lightning_dlres.pipeline.report.gantt import draw
from lightning_dlres.pipeline.report.report import RunReport, run_report
from lightning_dlres.pipeline.report.timeline import WARM_UP_STEPS, measure
from lightning_dlres.strategies import HeteroPipeStrategy

REPORT, PICTURE, TRACE = "report.md", "timeline.png", "trace.json"
MEMORY = "memory.png"
_DEFAULT_NAME = "resource_report"
# Steps whose time this callback keeps itself, for strategies that record nothing.
_TIMED_STEPS = 1000


class ResourceReport(Callback):
    """Reports at the end of `fit` what was predicted and what was measured.

    Under `HeteroPipeStrategy` it prints one line with the time of a step, the bubble and the
    speed-up over the even split, predicted and measured, and writes three files: `report.md`,
    `timeline.png` (what every stage does in a step, planned above measured) and `trace.json` (the
    last steps of all ranks, for https://ui.perfetto.dev). Under other strategies `report.md` has
    the time of a step, and says what is missing. With `ActivationOffload` or `MemoryPrecision`
    there is `memory.png`, too: what is on the device over one step, planned and measured. The last
    `fit` counts: it replaces the files of one before. With `fast_dev_run` no files are written, as
    no logs and checkpoints are.

    Attributes:
        line: the line of the last `fit`, on rank 0; None before.

    Args:
        dir: Directory for the files; made where it is missing. None: `resource_report` in the
            logger's directory, or in the Trainer's `default_root_dir` without a logger.

    Raises:
        ConfigError: `dir` is no local path, or, when `fit` starts, cannot be written to.
    """

    def __init__(self, dir: str | Path | None = None) -> None:
        super().__init__()
        if dir is not None and (not isinstance(dir, (str, Path)) or not str(dir)):
            raise ConfigError(got_expected("dir", dir, "the path of a directory", "dir=None"))
        if dir is not None and "://" in str(dir):
            raise ConfigError(got_expected("dir", dir, "a local path", "dir='resource_report'"))
        self.dir = dir
        self.line: str | None = None
        self._forget()

    def _forget(self) -> None:
        self._directory: Path | None = None
        self._since_ns: int | None = None
        self._starts: deque[float] = deque(maxlen=_TIMED_STEPS)
        self._steps = 0
        self._planned_schedule: str | None = None
        self._gathered: Gathered | None = None
        self._memory: tuple[str, str, bytes] | None = None

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self._forget()
        if stage != "fit":
            return
        log_dir = trainer.log_dir  # every rank has to ask
        refusal = None
        if not trainer.fast_dev_run:  # type: ignore[attr-defined]
            base = str(log_dir or trainer.default_root_dir)
            self._directory = Path(self.dir) if self.dir is not None else Path(base, _DEFAULT_NAME)
            refusal = _why_not_writable(self._directory) if trainer.is_global_zero else None
        refusal = trainer.strategy.broadcast(refusal, 0)
        if refusal is not None:
            raise ConfigError(refusal)
        if not isinstance(trainer.strategy, HeteroPipeStrategy):
            rank_zero_warn(
                f"ResourceReport: {type(trainer.strategy).__name__} has no pipeline plan, so the "
                "report will show the time of a step, but no prediction, bubble or timeline."
            )

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._since_ns = time.perf_counter_ns()
        plan = _plan_of(trainer)
        # The strategy plans again for the schedule that it falls back to.
        self._planned_schedule = plan.schedule if plan is not None else None

    @override
    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int
    ) -> None:
        self._starts.append(time.perf_counter())
        self._steps += 1

    @override
    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        # The last hook at which the ranks can talk: the strategy closes its connection before
        # on_fit_end. After an exception no hook comes but on_exception, where nobody would answer.
        tracer = getattr(trainer.strategy, "tracer", None)
        if isinstance(tracer, Tracer):
            mine = last_steps(tracer, self._since_ns or 0)
            self._gathered = gather(
                trainer.strategy.broadcast, trainer.global_rank, trainer.world_size, mine
            )

    @override
    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        # Nobody waits for rank 0 any more, which may take a few seconds to draw.
        if trainer.is_global_zero:
            try:
                self._report(trainer)
            except Exception as error:
                # The model is trained; a report is not worth losing it.
                rank_zero_warn(
                    f"ResourceReport: no report was written: {type(error).__name__}: {error}"
                )
        self._forget()

    @override
    def on_exception(
        self, trainer: Trainer, pl_module: LightningModule, exception: BaseException
    ) -> None:
        self._forget()

    def _report(self, trainer: Trainer) -> None:
        strategy, plan = trainer.strategy, _plan_of(trainer)
        self._memory = memory_of(trainer)
        if plan is None or not isinstance(strategy, HeteroPipeStrategy):
            text = _plain_text(type(strategy).__name__, self._line(), bool(self._spans))
            self._conclude(self._line(), text, {}, {})
            return
        # The first steps may be older than what was gathered.
        steps = sum(span.category == "step" for span in self._spans.get(0, ()))
        warm_up = max(WARM_UP_STEPS - (self._steps - steps), 0)
        report = run_report(
            plan,
            strategy.schedule,
            _even_seconds(plan, strategy.schedule),
            measure(plan.replicas, self._spans, warm_up),
            self._gathered.clock_error if self._gathered is not None else 0.0,
            self._planned_schedule,
        )
        names = {rank: plan.rank_name(rank) for rank in self._spans}
        pictures = _picture(report) if self._directory is not None else {}
        trace = TRACE if self._spans else None
        text = report.markdown(PICTURE if pictures else None, trace)
        self._conclude(report.line(), text, pictures, names)

    @property
    def _spans(self) -> Mapping[int, list[Span]]:
        found = self._gathered.spans if self._gathered is not None else {}
        return found if any(found.values()) else {}

    def _line(self) -> str:
        """Return what the callback's own clock says of the steps."""
        took = [after - before for before, after in pairwise(self._starts)]
        counted = took[WARM_UP_STEPS:] if self._steps <= _TIMED_STEPS else took
        counted = counted or took
        if not counted:
            return "dlres: no two training steps followed each other: nothing was measured."
        seconds = format_seconds(float(f"{statistics.median(counted):.3g}"))
        plural = "step" if len(counted) == 1 else "steps"
        return f"dlres: step {seconds} measured (median of {len(counted)} {plural})."

    def _conclude(
        self, line: str, text: str, pictures: Mapping[str, bytes], names: Mapping[int, str]
    ) -> None:
        """Write the files, and print the line."""
        memory = self._memory
        if memory is not None:
            text += f"\n## Memory\n\n{memory[0]}\n\n![memory]({MEMORY})\n\n{memory[1]}\n"
            pictures = {**pictures, MEMORY: memory[2]}
        where = "no files with fast_dev_run"
        if self._directory is not None:
            spans = {names.get(rank, f"rank {rank}"): s for rank, s in self._spans.items()}
            _write_whole(self._directory, text, pictures, spans)
            where = str(self._directory / REPORT)
        self.line = line
        rank_zero_info(f"{line} Report: {where}")


def _plan_of(trainer: Trainer) -> PipelinePlan | None:
    strategy = trainer.strategy
    return strategy.plan if isinstance(strategy, HeteroPipeStrategy) else None


def _why_not_writable(directory: Path) -> str | None:
    """Make the directory, and return why no file can be written there; None if one can."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=directory):
            return None
    except OSError as error:
        reason = error.strerror or str(error)
        expected = f"a directory that can be written to ({reason})"
        return got_expected("ResourceReport's dir", str(directory), expected, "another directory")


def _write_whole(
    directory: Path, text: str, pictures: Mapping[str, bytes], spans: Mapping[str, list[Span]]
) -> None:
    """Write the report's files; each appears whole or not at all, and none of an earlier report
    stays beside them."""
    directory.mkdir(parents=True, exist_ok=True)
    partial = Path(tempfile.mkdtemp(prefix=".partial-", dir=directory))
    try:
        for name, data in pictures.items():
            (partial / name).write_bytes(data)
        if spans:
            write_chrome_trace(partial / TRACE, _from_zero(spans))
        (partial / REPORT).write_text(text, "utf-8")
        # The report last: what it points to is there.
        for name in (PICTURE, MEMORY, TRACE, REPORT):
            if (partial / name).exists():
                os.replace(partial / name, directory / name)
            else:
                (directory / name).unlink(missing_ok=True)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _from_zero(spans: Mapping[str, list[Span]]) -> dict[str, list[Span]]:
    """Return the spans with times since the first of them, not since the machine was started."""
    first = min((span.start_ns for found in spans.values() for span in found), default=0)
    return {
        name: [
            Span(s.name, s.category, s.start_ns - first, s.end_ns - first, s.thread, s.args)
            for s in found
        ]
        for name, found in spans.items()
    }


def _picture(report: RunReport) -> dict[str, bytes]:
    panels = report.panels()
    if not panels:
        return {}
    try:
        return {PICTURE: draw(panels, report.places())}
    except Exception as error:
        # What was measured can be read without it.
        rank_zero_warn(f"ResourceReport: no picture was drawn: {type(error).__name__}: {error}")
        return {}


def _even_seconds(plan: PipelinePlan, schedule: str) -> float | None:
    if not plan.is_measured:
        return None
    if schedule == plan.schedule and plan.even_seconds is not None:
        return plan.even_seconds
    return even_step_seconds(replace(plan.workload(), schedule=schedule))


def _plain_text(strategy: str, line: str, traced: bool) -> str:
    parts = [
        "# Resource report",
        line,
        f"{strategy} has no pipeline plan, and so there is no prediction to compare with, no "
        'bubble and no timeline of stages. `Trainer(strategy="dlres_hetero_pipe")` has them.',
    ]
    if traced:
        parts.append(
            f"[{TRACE}]({TRACE}) holds what every rank did in the last steps: open it in "
            "<https://ui.perfetto.dev>."
        )
    return "\n\n".join(parts) + "\n"
