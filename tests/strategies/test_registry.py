"""A strategy from outside of the package is registered, and asked for its capabilities."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from lightning.pytorch import Trainer
from lightning.pytorch.demos.boring_classes import BoringModel
from lightning.pytorch.strategies import SingleDeviceStrategy, StrategyRegistry

from lightning_dlres import ResourceReport
from lightning_dlres.strategies.capabilities import (
    MeasuredRun,
    ReportSections,
    plan_of,
    reads_for_all_ranks,
)
from tests.support.models import QUIET


class ToyStrategy(SingleDeviceStrategy):
    """Trains on one device, reads for all ranks, and writes its own part of the report."""

    reads_for_all_ranks = True

    def report_sections(self, run: MeasuredRun) -> ReportSections:
        return ReportSections(line=f"toy: {run.steps} steps", text="## Toy\n\nAll went well.\n")


@pytest.fixture
def toy_strategy() -> Iterator[str]:
    StrategyRegistry.register("toy", ToyStrategy, device="cpu")
    yield "toy"
    StrategyRegistry.remove("toy")


def test_a_strategy_from_outside_is_asked_for_its_capabilities(
    toy_strategy: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    trainer = Trainer(
        strategy=toy_strategy,
        accelerator="cpu",
        devices=1,
        max_steps=3,
        callbacks=[ResourceReport(tmp_path)],
        **QUIET,
    )
    trainer.fit(BoringModel())
    assert isinstance(trainer.strategy, ToyStrategy)
    assert reads_for_all_ranks(trainer.strategy)
    assert plan_of(trainer.strategy) is None
    assert "toy: 3 steps" in caplog.text
    assert "All went well." in (tmp_path / "report.md").read_text()
