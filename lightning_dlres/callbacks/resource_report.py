"""Callback that compares predictions with measurements at the end of `fit`."""

from __future__ import annotations

import os
import shutil
import statistics
import tempfile
import time
from collections import deque
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from typing_extensions import override

from lightning_dlres.callbacks.gathering import GatheredSpans, gather, last_steps
from lightning_dlres.callbacks.offloading import memory_report
from lightning_dlres.callbacks.parameter_mirror import mirror_report
from lightning_dlres.core.checks import local_path
from lightning_dlres.core.errors import ConfigError, got_expected
from lightning_dlres.core.trace import Span, write_chrome_trace
from lightning_dlres.core.units import format_seconds
from lightning_dlres.pipeline.plan.plan import PipelinePlan
from lightning_dlres.pipeline.report.timeline import WARM_UP_STEPS
from lightning_dlres.strategies.capabilities import (
    TIMELINE_PICTURE,
    MeasuredRun,
    ReportSections,
    ReportsRun,
    plan_of,
    server_report_of,
    tracer_of,
)

REPORT_FILE, TRACE_FILE, MEMORY_PICTURE = "report.md", "trace.json", "memory.png"
_DEFAULT_NAME = "resource_report"
# Number of step starts that the callback keeps, for strategies that record no spans.
_TIMED_STEPS = 1000


class ResourceReport(Callback):
    """Callback that reports predicted and measured figures at the end of `fit`.

    Under `HeteroPipeStrategy` it prints one line with the time of a step, the bubble and the
    speed-up over the even split, predicted and measured. It writes three files:

    - `report.md`, with the figures of the run and of every stage;
    - `timeline.png`, the work of every stage in one step, planned above measured;
    - `trace.json`, the last steps of all ranks, for https://ui.perfetto.dev.

    Under `CompressedDDPStrategy` the line and the files show gradient synchronisation instead.
    Under `ParameterServerStrategy` a section shows servers and workers at the end of training.
    Under other strategies `report.md` has the time of a step, and names the missing figures.

    With `ActivationOffload` or `MemoryPrecision`, `memory.png` shows the memory on the device over
    one step, planned and measured. Each `fit` replaces the files of the previous one. With
    `fast_dev_run` no files are written, as Lightning writes no logs and checkpoints either.

    Attributes:
        line: The figures in one line, as the latest `fit` printed them, without the report's path.
            Set on rank 0 only; None before the first report.

    Args:
        dir: Directory for the files; created if it does not exist. None: `resource_report` in the
            logger's directory, or in the Trainer's `default_root_dir` without a logger.

    Raises:
        ConfigError: If `dir` is not a local path, or cannot be written to when `fit` starts.
    """

    def __init__(self, dir: str | Path | None = None) -> None:
        super().__init__()
        local_path("dir", dir, "the path of a local directory", "dir='resource_report'")
        self.dir = dir
        self.line: str | None = None
        self._reset()

    def _reset(self) -> None:
        """Drop the state of a `fit`."""
        self._directory: Path | None = None
        self._since_ns: int | None = None
        self._step_starts: deque[float] = deque(maxlen=_TIMED_STEPS)
        self._steps = 0
        self._plan_at_start: PipelinePlan | None = None
        self._gathered: GatheredSpans | None = None
        self._memory: tuple[str, str, bytes] | None = None
        self._mirror: str | None = None
        self._servers: str | None = None

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self._reset()
        if stage != "fit":
            return
        # `log_dir` broadcasts, so every rank must read it.
        log_dir = trainer.log_dir
        error = None
        if not trainer.fast_dev_run:  # type: ignore[attr-defined]
            base = str(log_dir or trainer.default_root_dir)
            self._directory = Path(self.dir) if self.dir is not None else Path(base, _DEFAULT_NAME)
            error = _directory_error(self._directory) if trainer.is_global_zero else None
        # Only rank 0 writes. If it cannot, all ranks must raise, or the others would wait for it.
        error = trainer.strategy.broadcast(error, 0)
        if error is not None:
            raise ConfigError(error)
        if not isinstance(trainer.strategy, ReportsRun):
            rank_zero_warn(
                f"ResourceReport: {type(trainer.strategy).__name__} has no pipeline plan, so the "
                "report will show the time of a step, but no prediction, bubble or timeline."
            )

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._since_ns = time.perf_counter_ns()
        # The strategy may plan again during training, if it falls back to another schedule.
        self._plan_at_start = plan_of(trainer.strategy)

    @override
    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int
    ) -> None:
        self._step_starts.append(time.perf_counter())
        self._steps += 1

    @override
    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        # This is the last hook in which the ranks can exchange messages: the strategy closes its
        # connection before `on_fit_end`. After an exception Lightning calls only `on_exception`.
        # There the ranks must not exchange messages, because some of them may not take part.
        tracer = tracer_of(trainer.strategy)
        if tracer is not None:
            self._gathered = gather(
                trainer.strategy.broadcast,
                trainer.global_rank,
                trainer.world_size,
                last_steps(tracer, self._since_ns or 0),
            )

    @override
    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        # No rank waits for rank 0 in this hook, so rank 0 may draw pictures for a few seconds.
        if trainer.is_global_zero:
            try:
                self._report(trainer)
            except Exception as error:
                # The model is trained: a failed report must not lose it.
                rank_zero_warn(
                    f"ResourceReport: no report was written: {type(error).__name__}: {error}"
                )
        self._reset()

    @override
    def on_exception(
        self, trainer: Trainer, pl_module: LightningModule, exception: BaseException
    ) -> None:
        self._reset()

    def _report(self, trainer: Trainer) -> None:
        strategy, spans = trainer.strategy, self._spans
        self._memory, self._mirror = memory_report(trainer), mirror_report(trainer)
        self._servers = server_report_of(strategy)
        sections = None
        if isinstance(strategy, ReportsRun):
            run = MeasuredRun(
                spans=spans,
                clock_error=self._gathered.clock_error if self._gathered is not None else 0.0,
                steps=self._steps,
                plan_at_start=self._plan_at_start,
                trace_file=TRACE_FILE if spans else None,
                draws=self._directory is not None,
            )
            sections = strategy.report_sections(run)
        if sections is None:
            line = self._step_time_line()
            text = _text_without_plan(type(strategy).__name__, line, bool(spans))
            sections = ReportSections(line=line, text=text)
        self._publish(sections)

    @property
    def _spans(self) -> Mapping[int, list[Span]]:
        """Spans of all ranks; empty if no rank recorded any."""
        spans = self._gathered.spans if self._gathered is not None else {}
        return spans if any(spans.values()) else {}

    def _step_time_line(self) -> str:
        """Return a line with the median time between step starts, as this callback measured them.

        Warm-up steps count only if there are no others.
        """
        durations = [after - before for before, after in pairwise(self._step_starts)]
        # Beyond `_TIMED_STEPS` the deque has dropped the warm-up steps already.
        counted = durations[WARM_UP_STEPS:] if self._steps <= _TIMED_STEPS else durations
        counted = counted or durations
        if not counted:
            return (
                "dlres: nothing was measured. The time of a step needs two training steps in a row."
            )
        seconds = format_seconds(float(f"{statistics.median(counted):.3g}"))
        plural = "step" if len(counted) == 1 else "steps"
        return f"dlres: step {seconds} measured (median of {len(counted)} {plural})."

    def _publish(self, sections: ReportSections) -> None:
        """Write the files, and print the line."""
        text, pictures = sections.text, dict(sections.pictures)
        if self._memory is not None:
            summary, plan_text, picture = self._memory
            text += f"\n## Memory\n\n{summary}\n\n![memory]({MEMORY_PICTURE})\n\n{plan_text}\n"
            pictures[MEMORY_PICTURE] = picture
        if self._mirror is not None:
            text += f"\n## Parameter mirror\n\n{self._mirror}\n"
        if self._servers is not None:
            text += f"\n## Parameter servers\n\n{self._servers}\n"
        location = "no files with fast_dev_run"
        if self._directory is not None:
            names = sections.rank_names
            spans = {names.get(rank, f"rank {rank}"): s for rank, s in self._spans.items()}
            _write_files(self._directory, text, pictures, spans)
            location = str(self._directory / REPORT_FILE)
        self.line = sections.line
        rank_zero_info(f"{sections.line} Report: {location}")


def _directory_error(directory: Path) -> str | None:
    """Create the directory. Return an error message if no file can be written there, else None."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=directory):
            return None
    except OSError as error:
        reason = error.strerror or str(error)
        expected = f"a directory that can be written to ({reason})"
        return got_expected("ResourceReport's dir", str(directory), expected, "another directory")


def _write_files(
    directory: Path,
    text: str,
    pictures: Mapping[str, bytes],
    spans: Mapping[str, Sequence[Span]],
) -> None:
    """Write the report's files, each atomically, and remove those of an earlier report."""
    directory.mkdir(parents=True, exist_ok=True)
    staging = Path(tempfile.mkdtemp(prefix=".partial-", dir=directory))
    try:
        for name, data in pictures.items():
            (staging / name).write_bytes(data)
        if spans:
            write_chrome_trace(staging / TRACE_FILE, _relative_to_first(spans))
        (staging / REPORT_FILE).write_text(text, "utf-8")
        # The report comes last, so that the files to which it refers exist.
        names = [*dict.fromkeys([TIMELINE_PICTURE, MEMORY_PICTURE, *pictures])]
        for name in (*names, TRACE_FILE, REPORT_FILE):
            if (staging / name).exists():
                os.replace(staging / name, directory / name)
            else:
                (directory / name).unlink(missing_ok=True)
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def _relative_to_first(spans: Mapping[str, Sequence[Span]]) -> dict[str, list[Span]]:
    """Return the spans with times since the first one, which is easier to read in a trace viewer
    than the time since the host's start."""
    first = min((span.start_ns for group in spans.values() for span in group), default=0)
    return {
        name: [
            Span(s.name, s.category, s.start_ns - first, s.end_ns - first, s.thread, s.args)
            for s in group
        ]
        for name, group in spans.items()
    }


def _text_without_plan(strategy: str, line: str, has_trace: bool) -> str:
    """Return the report of a run for which the strategy made no sections."""
    parts = [
        "# Resource report",
        line,
        f"{strategy} has no pipeline plan, so there is no prediction to compare with, no bubble "
        'and no timeline of stages. `Trainer(strategy="dlres_hetero_pipe")` has them.',
    ]
    if has_trace:
        parts.append(
            f"[{TRACE_FILE}]({TRACE_FILE}) holds the work of every rank in the last steps. Open it "
            "in <https://ui.perfetto.dev>."
        )
    return "\n\n".join(parts) + "\n"
