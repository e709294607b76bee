"""`ResourceReport` writes a report under any strategy, and a report that fails loses no model."""

from __future__ import annotations

import json
import logging
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from jsonargparse import ArgumentParser
from lightning.pytorch import Trainer, seed_everything
from lightning.pytorch.demos.boring_classes import BoringModel
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy
from torch import Tensor
from torch.nn import functional as F

from lightning_dlres.callbacks import ResourceReport, resource_report
from lightning_dlres.core.errors import ConfigError
from lightning_dlres.core.trace import Tracer
from lightning_dlres.pipeline.plan.plan import PipelinePlan
from lightning_dlres.strategies import HeteroPipeStrategy
from lightning_dlres.strategies.capabilities import MeasuredRun, ReportSections
from lightning_dlres.strategies.hetero_pipe import report_sections
from tests.support.models import QUIET, Task, loaders
from tests.support.rank_pool import RankContext, RankPool
from tests.support.training_cases import QUICK

TRAINER_OPTIONS: dict[str, Any] = {**QUIET, "accelerator": "cpu", "devices": 1}


@pytest.fixture
def printed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Lines that the callback prints."""
    lines: list[str] = []
    monkeypatch.setattr(resource_report, "rank_zero_info", lines.append)
    return lines


def fit(callback: ResourceReport, steps: int = 6, **options: Any) -> Trainer:
    """Train in this process, without a strategy of this package."""
    trainer = Trainer(**{"max_steps": steps, "callbacks": [callback], **TRAINER_OPTIONS, **options})
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*(val_dataloader|GPU available).*")
        trainer.fit(BoringModel())
    return trainer


@pytest.mark.parametrize("value", ["", 3, "s3://bucket/report"])
def test_a_bad_directory_is_refused_at_construction(value: Any) -> None:
    with pytest.raises(ConfigError, match=r", got .*"):
        ResourceReport(value)


def test_lightning_cli_can_construct_the_callback() -> None:
    parser = ArgumentParser(exit_on_error=False)
    parser.add_class_arguments(ResourceReport, "report")
    assert ResourceReport(**parser.parse_args(["--report.dir=here"]).report).dir == "here"
    assert parser.parse_args([]).report.dir is None
    assert "Directory for the files" in parser.format_help()


def test_a_plain_trainer_gets_the_time_of_a_step_and_a_warning(
    tmp_path: Path, printed: list[str]
) -> None:
    with pytest.warns(UserWarning, match="SingleDeviceStrategy has no pipeline plan") as shown:
        fit(ResourceReport(tmp_path))
    assert sum("ResourceReport" in str(warning.message) for warning in shown) == 1
    assert [path.name for path in tmp_path.iterdir()] == ["report.md"]
    text = (tmp_path / "report.md").read_text()
    assert "there is no prediction to compare with" in text
    assert "trace.json" not in text
    (line,) = printed
    assert "measured (median of 3 steps)" in line
    assert line.endswith(f"Report: {tmp_path / 'report.md'}")


def test_a_strategy_with_a_tracer_gets_a_trace_file(tmp_path: Path, printed: list[str]) -> None:
    callback = ResourceReport(tmp_path)

    class Traces(BoringModel):
        def on_train_start(self) -> None:
            self.trainer.strategy.tracer = Tracer()

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            with self.trainer.strategy.tracer.span("work", "compute"):
                return super().training_step(batch, batch_idx)

    trainer = Trainer(max_steps=3, callbacks=[callback], **TRAINER_OPTIONS)
    with pytest.warns(UserWarning, match="no pipeline plan"):
        trainer.fit(Traces())
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    assert [event["name"] for event in events if event["ph"] == "X"] == ["work"] * 3
    assert "[trace.json](trace.json)" in (tmp_path / "report.md").read_text()


def test_any_strategy_can_contribute_sections(tmp_path: Path, printed: list[str]) -> None:
    class Reporting(SingleDeviceStrategy):
        def report_sections(self, run: MeasuredRun) -> ReportSections:
            assert (run.steps, run.draws, run.trace_file) == (3, True, None)
            return ReportSections(line="Its line.", text="Its text.", pictures={"its.png": b"PNG"})

    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*ResourceReport.*")
        fit(ResourceReport(tmp_path), 3, strategy=Reporting("cpu"))
    assert printed == [f"Its line. Report: {tmp_path / 'report.md'}"]
    assert (tmp_path / "report.md").read_text() == "Its text."
    assert (tmp_path / "its.png").read_bytes() == b"PNG"


def test_the_default_directory_is_inside_that_of_the_logger(
    tmp_path: Path, printed: list[str]
) -> None:
    logger = CSVLogger(tmp_path)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*directory.*")
        fit(ResourceReport(), logger=logger)
    (report,) = tmp_path.rglob("report.md")
    assert report == Path(logger.log_dir, "resource_report", "report.md")
    fit(ResourceReport(), default_root_dir=tmp_path / "root")
    assert (tmp_path / "root" / "resource_report" / "report.md").is_file()


def test_a_directory_that_cannot_be_written_stops_fit_before_training(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    callback = ResourceReport(tmp_path / "file" / "report")
    trainer = Trainer(max_steps=2, callbacks=[callback], **TRAINER_OPTIONS)
    with pytest.raises(ConfigError, match=r"dir must be .*Not a directory"):
        trainer.fit(BoringModel())
    assert trainer.global_step == 0


def test_fast_dev_run_writes_no_files(
    tmp_path: Path, printed: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    fit(ResourceReport(tmp_path / "report"), fast_dev_run=2)
    fit(ResourceReport(), fast_dev_run=True)
    assert list(tmp_path.rglob("*.md")) == []
    assert "no files with fast_dev_run" in printed[0]


def test_a_run_without_steps_reports_that_nothing_was_measured(
    tmp_path: Path, printed: list[str]
) -> None:
    fit(ResourceReport(tmp_path), steps=0)
    fit(ResourceReport(tmp_path), limit_train_batches=0)
    assert all("nothing was measured" in line for line in printed)
    assert "nothing was measured" in (tmp_path / "report.md").read_text()


def test_evaluation_alone_writes_no_files(tmp_path: Path) -> None:
    callback = ResourceReport(tmp_path / "report")
    trainer = Trainer(callbacks=[callback], limit_val_batches=1, **TRAINER_OPTIONS)
    trainer.validate(BoringModel(), verbose=False)
    assert not (tmp_path / "report").exists()


def test_a_report_that_fails_is_a_warning_and_keeps_the_earlier_one(
    tmp_path: Path, printed: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*args: Any) -> None:
        raise OSError("the disk is full")

    (tmp_path / "report.md").write_text("an earlier one")
    monkeypatch.setattr(resource_report.os, "replace", fail)
    with pytest.warns(UserWarning, match="no report was written: OSError: the disk is full"):
        assert fit(ResourceReport(tmp_path)).global_step == 6
    assert (tmp_path / "report.md").read_text() == "an earlier one"
    assert len(list(tmp_path.iterdir())) == 1, "no partial file stays"


class Sums(Task):
    """A loss that is a sum over samples, which 1F1B cannot compute."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return F.cross_entropy(self(batch[0]), batch[1], reduction="sum") / 8


def fit_pipeline(
    context: RankContext,
    callback: ResourceReport,
    task: Task | None = None,
    batches: int = 3,
    plan: PipelinePlan | None = None,
    ckpt_path: str | None = None,
    **options: Any,
) -> Trainer:
    """Train as a pipeline of two stages over the job's ranks."""
    strategy = HeteroPipeStrategy(stages=2, microbatches=4, timeout=60, plan=plan, profile=QUICK)
    arguments = {"max_epochs": 1, **TRAINER_OPTIONS, "devices": context.world_size}
    trainer = Trainer(
        **{**arguments, **options},
        strategy=strategy,
        plugins=[context.environment],
        callbacks=[callback],
    )
    task = task or Task("mlp", metrics=False)
    data = loaders(task, 8 * batches, 8, False, 0, torch.float32)
    trainer.fit(task, *data, ckpt_path=ckpt_path)
    return trainer


def report_on_pipelines(context: RankContext, directory: str) -> dict[str, dict[str, str]]:
    """Fit several times; return the files and the last line of each report, on rank 0."""
    seed_everything(3, verbose=False)
    lines: list[str] = []
    # The rank process serves other tests afterwards.
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(resource_report, "rank_zero_info", lines.append)
        return fit_several_times(context, Path(directory), lines, patch)


def fit_several_times(
    context: RankContext, path: Path, lines: list[str], patch: pytest.MonkeyPatch
) -> dict[str, dict[str, str]]:
    reports: dict[str, dict[str, str]] = {}

    def collect(name: str, directory: Path) -> None:
        if context.rank == 0:
            files = sorted(directory.iterdir()) if directory.exists() else []
            reports[name] = {file.name: file.read_text(errors="replace") for file in files}
            reports[name]["line"] = lines[-1]

    one = ResourceReport(path / "one")
    trainer = fit_pipeline(context, one, batches=8, val_check_interval=3)
    trainer.save_checkpoint(path / "mid.ckpt")
    collect("measured", path / "one")
    # Drawing takes longer than training; one real picture is enough.
    patch.setattr(report_sections, "draw", lambda panels, places: b"\x89PNG, another one")
    fit_pipeline(context, one, batches=2, max_epochs=2, ckpt_path=str(path / "mid.ckpt"))
    collect("resumed", path / "one")
    unmeasured = PipelinePlan(replicas=((1, 0),), split=(4, 4))
    fit_pipeline(context, one, batches=5, plan=unmeasured)
    collect("unmeasured", path / "one")
    fit_pipeline(context, ResourceReport(path / "two"), Sums("mlp", metrics=False))
    collect("gpipe", path / "two")
    fit_pipeline(context, ResourceReport(path / "two"), plan=unmeasured, max_steps=0)
    collect("no step", path / "two")
    fit_pipeline(context, ResourceReport(path / "three"), plan=unmeasured, fast_dev_run=True)
    collect("fast_dev_run", path / "three")
    return reports


def test_pipelines_are_reported_by_rank_zero(pool: RankPool, tmp_path: Path) -> None:
    reports, other_rank = pool.run(report_on_pipelines, 2, str(tmp_path), timeout=150)
    assert other_rank == {}
    files = {"report.md", "timeline.png", "trace.json", "line"}
    for name in ("measured", "resumed", "unmeasured", "gpipe"):
        assert reports[name].keys() == files, name
        assert "PNG" in reports[name]["timeline.png"][:5]
    measured = reports["measured"]
    assert " predicted; bubble " in measured["line"]
    assert " times as fast as the simulated even split" in measured["line"]
    assert "(timeline.png)" in measured["report.md"]
    assert "too few steps" not in measured["report.md"]
    events = json.loads(measured["trace.json"])["traceEvents"]
    names = {e["args"]["name"] for e in events if e["name"] == "process_name"}
    assert {name.split(" (")[0] for name in names} == {"stage 0", "stage 1"}
    assert sum(e["name"] == "step" for e in events if e["ph"] == "X") == 2 * 8
    # The second report holds no spans of the first fit.
    events = json.loads(reports["resumed"]["trace.json"])["traceEvents"]
    assert sum(e["name"] == "step" for e in events if e["ph"] == "X") == 2 * 2
    assert "too few steps" in reports["resumed"]["report.md"]
    assert "nothing predicted" in reports["unmeasured"]["line"]
    assert "without a measurement" in reports["unmeasured"]["report.md"]
    assert "made for 1f1b, and gpipe was run" in reports["gpipe"]["report.md"]
    # Files of an earlier report in the directory are removed if this one has none of their kind.
    assert reports["no step"].keys() == {"report.md", "line"}
    assert "no training step was measured" in reports["no step"]["line"]
    assert reports["fast_dev_run"].keys() == {"line"}
    assert "measured (median of 1 step)" in reports["fast_dev_run"]["line"]
    assert "no files with fast_dev_run" in reports["fast_dev_run"]["line"]


def fit_with_ddp(context: RankContext, directory: str) -> None:
    strategy = DDPStrategy(process_group_backend="gloo")
    callback = ResourceReport(directory)
    options = {"strategy": strategy, "plugins": [context.environment], "callbacks": [callback]}
    trainer = Trainer(**{**TRAINER_OPTIONS, "devices": context.world_size}, **options, max_steps=4)
    trainer.fit(BoringModel())


def test_ddp_gets_the_time_of_a_step(pool: RankPool, tmp_path: Path) -> None:
    pool.run(fit_with_ddp, 2, str(tmp_path), timeout=60)
    assert [path.name for path in tmp_path.iterdir()] == ["report.md"]
    text = (tmp_path / "report.md").read_text()
    assert "measured (median of 1 step)" in text
    assert "DDPStrategy has no pipeline plan" in text


class Fails(Task):
    """A step that fails on one rank."""

    fails: bool

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if self.fails and batch_idx == 1:
            raise KeyError("a bug of the user")
        return super().training_step(batch, batch_idx)


def fit_and_fail(context: RankContext, directory: str) -> None:
    plan = PipelinePlan(replicas=((0, 1),), split=(4, 4))
    model = Fails("mlp", metrics=False)
    model.fails = context.rank == 1
    fit_pipeline(context, ResourceReport(directory), model, plan=plan)


def test_no_rank_waits_for_a_report_after_an_exception(pool: RankPool, tmp_path: Path) -> None:
    outcomes = pool.run_expecting_errors(fit_and_fail, 2, str(tmp_path), timeout=60, keep=True)
    assert [outcome.error_type for outcome in outcomes] == ["PeerLostError", "KeyError"]
    assert list(tmp_path.iterdir()) == []


def fit_with_unusable_directory(context: RankContext, directory: str) -> None:
    fit_pipeline(context, ResourceReport(directory))


def test_all_ranks_raise_if_the_directory_cannot_be_written(pool: RankPool, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    directory = str(tmp_path / "file" / "report")
    outcomes = pool.run_expecting_errors(
        fit_with_unusable_directory, 2, directory, timeout=60, keep=True
    )
    assert [outcome.error_type for outcome in outcomes] == ["ConfigError"] * 2
    assert all("Not a directory" in outcome.error_message for outcome in outcomes)


def test_the_callback_prints_one_line(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    logger = logging.getLogger("lightning.pytorch.utilities.rank_zero")
    monkeypatch.setattr(logger, "propagate", True)
    with caplog.at_level(logging.INFO, logger=logger.name):
        fit(ResourceReport(tmp_path))
    assert len([r for r in caplog.records if r.getMessage().startswith("dlres:")]) == 1
