"""Figures of synchronisation in the Trainer's loggers and in `ResourceReport`."""

from __future__ import annotations

import csv
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

from lightning_dlres.callbacks import ResourceReport
from lightning_dlres.codecs import base as registry
from lightning_dlres.codecs.gradient import GradientCodec
from lightning_dlres.core.trace import Span
from lightning_dlres.gradsync.plan.graph import TaskKind, topology
from lightning_dlres.gradsync.plan.plan import RAW, SyncPlan
from lightning_dlres.strategies import CompressedDDPStrategy
from lightning_dlres.strategies.capabilities import MeasuredRun
from tests.strategies.compressed_ddp.test_training import Points
from tests.support.models import QUIET
from tests.support.rank_pool import RankContext, RankPool

STEPS = 6
# Logged figures of every run, and those of runs whose gradients are synchronised by tasks.
EXPOSED = {"gradient_sync/exposed_ms"}
TASKS = {
    f"gradient_sync/{name}"
    for name in ("wire_mb", "ratio", "encode_ms", "merge_ms", "decode_ms", "transfer_ms", "wait_ms")
}


class Wide(LightningModule):
    """A network with gradients of unlike sizes."""

    def __init__(self, *, manual: bool) -> None:
        super().__init__()
        self.automatic_optimization = not manual
        torch.manual_seed(3)
        self.net = nn.Sequential(nn.Linear(12, 2048), nn.Tanh(), nn.Linear(2048, 8))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = F.mse_loss(self.net(batch[0]).mean(1, keepdim=True), batch[1])
        self.log("loss", loss)
        if not self.automatic_optimization:
            self.optimizers().zero_grad()
            self.manual_backward(loss)
            self.optimizers().step()
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.01)


def fit(
    context: RankContext,
    directory: str,
    options: dict[str, Any],
    *,
    manual: bool = False,
    **trainer_options: Any,
) -> dict[str, Any]:
    """Train with a report and a logger; return what this rank knows of the run.

    Args:
        context: This rank.
        directory: Directory of the logs, with the report in the folder "report".
        options: Arguments of the strategy.
        manual: True trains with manual optimization.
        trainer_options: Further arguments of the Trainer.

    Returns:
        The plan, the report's line, the names of the callback metrics, the names of the main
        thread's spans, and the threads of all spans.
    """
    strategy = CompressedDDPStrategy(**{"topology": "ps", "timeout": 30.0, **options})
    report = ResourceReport(Path(directory) / "report")
    trainer = Trainer(
        strategy=strategy,
        accelerator="cpu",
        devices=context.world_size,
        plugins=[context.environment],
        callbacks=[report],
        max_steps=STEPS,
        **{
            **QUIET,
            "logger": CSVLogger(directory, "", ""),
            "log_every_n_steps": 2,
            **trainer_options,
        },
    )
    trainer.fit(Wide(manual=manual), DataLoader(Points(96), batch_size=4))
    state = strategy.sync_state
    return {
        "plan": state.plan,
        "line": report.line,
        "callback_metrics": set(trainer.callback_metrics),
        "names": {span.name for span in strategy.tracer.spans() if span.thread == "MainThread"},
        "threads": {span.thread for span in strategy.tracer.spans()},
    }


def logged(directory: Path) -> list[dict[str, float]]:
    """Return the logged figures of synchronisation, by step."""
    with (directory / "metrics.csv").open() as file:
        rows = [{key: float(v) for key, v in row.items() if v} for row in csv.DictReader(file)]
    return [row for row in rows if any(key.startswith("gradient_sync/") for key in row)]


def planned_bytes(plan: SyncPlan, rank: int, kind: TaskKind) -> int:
    """Return the bytes of the payloads that a rank sends or receives in a step."""
    total = 0
    for unit in plan.units:
        graph = topology(plan.topology)(rank, plan.world_size, unit.owner)
        codec = None if unit.codec == RAW else registry.codec(unit.codec)
        assert codec is None or isinstance(codec, GradientCodec)
        nbytes = 4 * unit.count if codec is None else codec.payload_bytes(unit.count)
        total += nbytes * sum(task.kind is kind for task in graph)
    return total


@pytest.mark.parametrize("topology_name", ["ps", "ring"])
def test_a_run_has_its_figures_in_the_loggers_and_in_the_report(
    pool: RankPool, tmp_path: Path, topology_name: str
) -> None:
    # Only the last bias, of 8 elements, is not compressed.
    options = {"algorithm": "tbq", "topology": topology_name, "min_bytes": 1024}
    ranks = pool.run(fit, 2, str(tmp_path), options)
    plan = ranks[0]["plan"]
    rows = logged(tmp_path)
    assert [row["step"] for row in rows] == [1, 3, 5]
    for row in rows:
        assert row.keys() - {"step"} == EXPOSED | TASKS | {"gradient_sync/residual_norm"}
        sent, received = (
            planned_bytes(plan, 0, kind) for kind in (TaskKind.SEND, TaskKind.RECEIVE)
        )
        assert row["gradient_sync/wire_mb"] == pytest.approx((sent + received) / 1e6)
        assert 15.5 < row["gradient_sync/ratio"] < 16
        assert 0 <= row["gradient_sync/wait_ms"] <= row["gradient_sync/exposed_ms"]
        assert all(row[f"gradient_sync/{name}_ms"] > 0 for name in ("encode", "transfer", "decode"))
        assert row["gradient_sync/residual_norm"] > 0
    for rank in ranks:
        assert rank["callback_metrics"] == {"loss"}
        assert {"forward", "backward", "step"} <= rank["names"]
        assert {"MainThread", "dlres-sync-compute", "dlres-sync-transfer"} <= rank["threads"]

    text = (tmp_path / "report" / "report.md").read_text()
    assert ranks[0]["line"].startswith("dlres: step ")
    assert ranks[0]["line"] in text
    # The table of the ranks has a row for each.
    assert re.findall(r"^\| +(\d+) \|", text, re.MULTILINE) == ["0", "1"]
    assert "| topology             | " + topology_name in text
    assert (tmp_path / "report" / "timeline.png").read_bytes().startswith(b"\x89PNG")
    events = json.loads((tmp_path / "report" / "trace.json").read_text())["traceEvents"]
    names = [event["args"]["name"] for event in events if event["name"] == "thread_name"]
    for thread in ("dlres-sync-compute", "dlres-sync-transfer"):
        assert names.count(thread) == 2


def test_uncompressed_gradients_have_no_ratio_above_one_and_no_residual(
    pool: RankPool, tmp_path: Path
) -> None:
    pool.run(fit, 2, str(tmp_path), {"algorithm": "raw"}, accumulate_grad_batches=2)
    rows = logged(tmp_path)
    assert [row["step"] for row in rows] == [1, 3, 5]
    for row in rows:
        assert row.keys() - {"step"} == EXPOSED | TASKS
        assert row["gradient_sync/ratio"] == 1


def test_manual_optimization_has_the_same_figures(pool: RankPool, tmp_path: Path) -> None:
    ranks = pool.run(fit, 2, str(tmp_path), {"algorithm": "raw"}, manual=True)
    assert all("backward" in rank["names"] and "forward" not in rank["names"] for rank in ranks)
    assert all(row.keys() - {"step"} == EXPOSED | TASKS for row in logged(tmp_path))


def test_without_an_algorithm_the_report_has_no_tasks(pool: RankPool, tmp_path: Path) -> None:
    pool.run(fit, 2, str(tmp_path), {"algorithm": "none"})
    assert all(row.keys() - {"step"} == EXPOSED for row in logged(tmp_path))
    text = (tmp_path / "report" / "report.md").read_text()
    assert "there are no tasks" in text
    assert not (tmp_path / "report" / "timeline.png").exists()


def test_a_single_rank_without_a_logger_gets_a_report(pool: RankPool, tmp_path: Path) -> None:
    pool.run(fit, 1, str(tmp_path), {"algorithm": "tbq"}, logger=False)
    assert "a single rank" in (tmp_path / "report" / "report.md").read_text()
    assert not (tmp_path / "metrics.csv").exists()


@pytest.mark.parametrize("spans", [{}, {0: [], 1: []}, {0: [Span("x", "y", 0, 1, "t")], 1: []}])
def test_there_are_no_sections_if_nothing_was_measured(spans: dict[int, list[Span]]) -> None:
    run = MeasuredRun(
        spans=spans, clock_error=0.0, steps=0, plan_at_start=None, trace_file=None, draws=True
    )
    assert CompressedDDPStrategy().report_sections(run) is None
