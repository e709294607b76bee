"""Captured modules have the user's keys in checkpoints, and resume in mid-epoch on any number of
stages."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Trainer, seed_everything
from lightning.pytorch.callbacks import ModelCheckpoint
from torchdata.stateful_dataloader import StatefulDataLoader

from benchmarks.support.capture_models import family_cases
from lightning_dlres import HeteroPipeStrategy, PipelinePlan
from lightning_dlres.pipeline.plan.plan import consecutive_replicas
from tests.strategies.hetero_pipe.test_captured_modules import Trained
from tests.support.models import QUIET
from tests.support.rank_pool import RankContext, RankPool

STEPS, SAVED = 6, 3
CASE = family_cases("by hand")["unet"]
# Layers of each stage of the case's eleven, by the number of stages.
SPLITS = {2: (6, 5), 3: (4, 3, 4), 4: (3, 3, 3, 2)}


class Resumable(Trained):
    """LightningModule that records its losses, and whose loader can be resumed."""

    def on_train_batch_end(self, outputs: Any, *args: Any) -> None:
        self.observed.append(float(outputs["loss"]))

    def train_dataloader(self) -> Any:
        data = [CASE.batch(4, step) for step in range(STEPS)]
        return StatefulDataLoader(data, batch_size=None, shuffle=True, num_workers=0)

    def val_dataloader(self) -> Any:
        return []

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.01)


def fit(context: RankContext, stages: int, directory: str, resume: str | None) -> list[float]:
    """Train for one epoch with a checkpoint in its middle, or resume from one; return losses."""
    seed_everything(11 if resume is None else 12, verbose=False)
    task = Resumable(CASE)
    if resume is not None:
        for parameter in task.parameters():
            parameter.data.zero_()
    saver = ModelCheckpoint(directory, "{step}", every_n_train_steps=SAVED, save_top_k=-1)
    options: dict[str, Any] = {}
    if stages > 1:
        plan = PipelinePlan(replicas=consecutive_replicas(stages, stages), split=SPLITS[stages])
        options["strategy"] = HeteroPipeStrategy(plan=plan, microbatches=2, module="net")
        options["plugins"] = [context.environment]
    trainer = Trainer(
        accelerator="cpu",
        devices=stages,
        max_epochs=1,
        callbacks=[saver] if resume is None else [],
        **{**QUIET, "enable_checkpointing": resume is None},
        **options,
    )
    trainer.fit(task, ckpt_path=resume)
    return task.observed


@pytest.mark.parametrize(
    ("saved_at", "resumed_at"),
    [
        pytest.param(p, q, marks=[] if (p, q) in ((1, 3), (3, 2)) else pytest.mark.exhaustive)
        for p in (1, 2, 3, 4)
        for q in (1, 2, 3, 4)
    ],
)
def test_a_captured_module_resumes_at_any_number_of_stages(
    pool: RankPool, tmp_path: Path, saved_at: int, resumed_at: int
) -> None:
    whole, *others = pool.run(fit, saved_at, saved_at, str(tmp_path), None)
    assert len(whole) == STEPS
    assert others == [whole] * len(others)
    path = tmp_path / f"step={SAVED}.ckpt"
    for resumed in pool.run(fit, resumed_at, resumed_at, str(tmp_path), str(path)):
        assert resumed == pytest.approx(whole[SAVED:], rel=1e-5)
    keys = torch.load(path, weights_only=False)["state_dict"].keys()
    assert list(keys) == list(Trained(CASE).state_dict())
