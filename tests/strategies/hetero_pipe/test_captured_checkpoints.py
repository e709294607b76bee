"""Captured modules and steps have the user's keys in checkpoints, and resume in mid-epoch on any
number of stages."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn
from torch.nn import functional as F
from torchdata.stateful_dataloader import StatefulDataLoader

from benchmarks.support.capture_models import family_cases
from lightning_dlres import HeteroPipeStrategy, PipelinePlan
from lightning_dlres.pipeline.plan.plan import consecutive_replicas
from tests.strategies.hetero_pipe.test_captured_modules import Trained
from tests.support.models import QUIET
from tests.support.rank_pool import RankContext, RankPool
from tests.support.training_cases import QUICK

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


class ResumableStep(LightningModule):
    """LightningModule whose step calls several modules and counts samples, and whose loader can be
    resumed."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(6, 8), nn.Tanh())
        self.middle, self.decoder, self.head = nn.Linear(8, 8), nn.Linear(8, 6), nn.Linear(8, 3)
        self.register_buffer("seen", torch.zeros(()))
        self.observed: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        code = self.middle(self.encoder(batch))
        self.seen += len(batch)
        kept = self.head(code).square().mean() / (1 + self.seen)
        return F.mse_loss(self.decoder(code.relu()), batch) + kept

    def on_train_batch_end(self, outputs: Any, *args: Any) -> None:
        self.observed += [float(outputs["loss"]), float(self.seen)]

    def train_dataloader(self) -> Any:
        data = torch.randn(STEPS, 5, 6, generator=torch.Generator().manual_seed(4))
        return StatefulDataLoader([*data], batch_size=None, shuffle=True, num_workers=0)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.01)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.5)
        return [optimizer], [{"scheduler": scheduler, "interval": "step"}]


def options_of(kind: str, stages: int) -> dict[str, Any]:
    """Return the options of the strategy for a module, or for a step."""
    if kind == "step":
        # Two stages cut the encoder, and more of them the step.
        return {"stages": stages, "profile": QUICK}
    plan = PipelinePlan(replicas=consecutive_replicas(stages, stages), split=SPLITS[stages])
    return {"plan": plan, "module": "net"}


def fit(
    context: RankContext, kind: str, stages: int, directory: str, resume: str | None
) -> list[float]:
    """Train for one epoch with a checkpoint in its middle, or resume from one; return losses."""
    seed_everything(11 if resume is None else 12, verbose=False)
    task = Resumable(CASE) if kind == "module" else ResumableStep()
    if resume is not None:
        for parameter in task.parameters():
            parameter.data.zero_()
    saver = ModelCheckpoint(directory, "{step}", every_n_train_steps=SAVED, save_top_k=-1)
    options: dict[str, Any] = {}
    if stages > 1:
        options["strategy"] = HeteroPipeStrategy(microbatches=2, **options_of(kind, stages))
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


PAIRS = [(p, q) for p in (1, 2, 3, 4) for q in (1, 2, 3, 4)]
# Pairs that `make test` runs.
COVERING = {("module", 1, 3), ("step", 3, 2)}


@pytest.mark.parametrize(
    ("kind", "saved_at", "resumed_at"),
    [
        pytest.param(kind, p, q, marks=[] if (kind, p, q) in COVERING else pytest.mark.exhaustive)
        for kind in ("module", "step")
        for p, q in PAIRS
    ],
)
def test_a_captured_model_resumes_at_any_number_of_stages(
    pool: RankPool, tmp_path: Path, kind: str, saved_at: int, resumed_at: int
) -> None:
    whole, *others = pool.run(fit, saved_at, kind, saved_at, str(tmp_path), None)
    per_step = 1 if kind == "module" else 2
    assert len(whole) == per_step * STEPS
    assert others == [whole] * len(others)
    path = tmp_path / f"step={SAVED}.ckpt"
    for resumed in pool.run(fit, resumed_at, kind, resumed_at, str(tmp_path), str(path)):
        assert resumed == pytest.approx(whole[per_step * SAVED :], rel=1e-5)
    keys = torch.load(path, weights_only=False)["state_dict"].keys()
    expected = Trained(CASE) if kind == "module" else ResumableStep()
    assert list(keys) == list(expected.state_dict())
