"""Checkpoints have the keys and indices of single-device training, and resume in mid-epoch on any
number of stages."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, Trainer, seed_everything
from lightning.pytorch.callbacks import ModelCheckpoint
from torchdata.stateful_dataloader import StatefulDataLoader

from lightning_dlres import HeteroPipeStrategy, PipelinePlan
from lightning_dlres.pipeline.plan.plan import consecutive_replicas
from tests.support.models import QUIET, Samples, Task
from tests.support.parity import SPLITS, relative
from tests.support.rank_pool import RankContext, RankPool

STEPS, SAVED = 12, 5


class Losses(Callback):
    """Callback that records the loss of every step."""

    def __init__(self) -> None:
        self.values: dict[int, float] = {}

    def on_train_batch_end(self, trainer: Trainer, *args: Any) -> None:
        self.values[trainer.global_step] = float(trainer.callback_metrics["train_loss_step"])


def fit(
    context: RankContext | None,
    stages: int,
    directory: str,
    resume: str | None = None,
    dropout: float = 0.0,
    final_path: str | None = None,
) -> dict[int, float]:
    """Train for one epoch and save a checkpoint in its middle, or resume from one; return the
    losses by step.

    Args:
        context: This rank of the pipeline; None trains plainly.
        stages: Number of stages.
        directory: Folder of the checkpoint from the middle.
        resume: Path of the checkpoint to resume from.
        dropout: Dropout of the model.
        final_path: Path of a checkpoint that is saved after the run.
    """
    # A resumed run starts with another seed: its values must come from the checkpoint.
    seed_everything(11 if resume is None else 12, verbose=False)
    task = Task("gpt", "adamw", tied=True, metrics=False, dropout=dropout)
    if resume is not None:
        for parameter in task.parameters():
            parameter.data.zero_()
    loader = StatefulDataLoader(Samples(True, STEPS * 6), batch_size=6, shuffle=True, num_workers=0)
    losses = Losses()
    saver = ModelCheckpoint(directory, "{step}", every_n_train_steps=SAVED, save_top_k=-1)
    plan = PipelinePlan(
        replicas=consecutive_replicas(stages, stages), split=SPLITS.get(("gpt", stages), (5,))
    )
    if context is not None:
        # The pipeline derives each step's dropout from the global seed, also in a resumed run.
        seed_everything(11, verbose=False)
    trainer = Trainer(
        strategy=HeteroPipeStrategy(plan=plan, microbatches=3) if context else "auto",
        accelerator="cpu",
        devices=stages,
        plugins=[context.environment] if context else [],
        max_epochs=1,
        callbacks=[losses, *([saver] if resume is None else [])],
        **{**QUIET, "enable_checkpointing": resume is None},
    )
    trainer.fit(task, loader, ckpt_path=resume)
    if final_path is not None:
        trainer.save_checkpoint(final_path)
    return losses.values


def fit_plainly(
    context: RankContext, directory: str, resume: str | None = None
) -> dict[int, float]:
    return fit(None, 1, directory, resume)


def fit_without_interruption(
    pool: RankPool, directory: Path, stages: int = 3, **options: Any
) -> tuple[dict[int, float], str]:
    """Train a pipeline; return the losses, and the path of a checkpoint from the middle."""
    losses_by_rank = pool.run(fit, stages, stages, str(directory), **options)
    assert all(losses == losses_by_rank[0] for losses in losses_by_rank)
    return losses_by_rank[0], str(directory / f"step={SAVED}.ckpt")


def assert_resumes(resumed: dict[int, float], whole: dict[int, float]) -> None:
    assert sorted(resumed) == list(range(SAVED + 1, STEPS + 1))
    for step, loss in resumed.items():
        assert loss == pytest.approx(whole[step], rel=1e-5), step


def test_three_stages_resume_at_one_two_and_plainly_in_mid_epoch(
    pool: RankPool, tmp_path: Path
) -> None:
    whole, path = fit_without_interruption(pool, tmp_path)
    for stages in (1, 2):
        for resumed in pool.run(fit, stages, stages, str(tmp_path), path):
            assert_resumes(resumed, whole)
    (resumed,) = pool.run(fit_plainly, 1, str(tmp_path), path)
    assert_resumes(resumed, whole)


def test_a_plain_checkpoint_resumes_at_three_stages(pool: RankPool, tmp_path: Path) -> None:
    (whole,) = pool.run(fit_plainly, 1, str(tmp_path))
    for resumed in pool.run(fit, 3, 3, str(tmp_path), str(tmp_path / f"step={SAVED}.ckpt")):
        assert_resumes(resumed, whole)


def test_dropout_resumes_as_if_uninterrupted(pool: RankPool, tmp_path: Path) -> None:
    whole, path = fit_without_interruption(pool, tmp_path, dropout=0.3)
    for resumed in pool.run(fit, 2, 2, str(tmp_path), path, 0.3):
        assert_resumes(resumed, whole)


def test_a_checkpoint_file_equals_that_of_a_single_device(pool: RankPool, tmp_path: Path) -> None:
    _, path = fit_without_interruption(pool, tmp_path / "pipeline")
    pool.run(fit_plainly, 1, str(tmp_path / "plain"))
    actual = torch.load(path, weights_only=False)
    expected = torch.load(tmp_path / "plain" / f"step={SAVED}.ckpt", weights_only=False)
    assert actual.keys() == expected.keys()
    assert list(actual["state_dict"]) == list(expected["state_dict"])
    for name, value in expected["state_dict"].items():
        assert relative(actual["state_dict"][name], value) <= 1e-5
    ours, theirs = actual["optimizer_states"][0], expected["optimizer_states"][0]
    assert ours["param_groups"] == theirs["param_groups"]
    assert ours["state"].keys() == theirs["state"].keys()
    for index, state in theirs["state"].items():
        for name, value in state.items():
            assert not ours["state"][index][name].is_meta
            assert relative(ours["state"][index][name], value) <= 1e-4, (index, name)
    assert actual["loops"].keys() == expected["loops"].keys()
    assert actual["lr_schedulers"] == expected["lr_schedulers"]


def test_a_checkpoint_can_be_saved_after_the_run(pool: RankPool, tmp_path: Path) -> None:
    path = tmp_path / "final.ckpt"
    pool.run(fit, 2, 2, str(tmp_path / "a"), final_path=str(path))
    checkpoint = torch.load(path, weights_only=False)
    states = checkpoint["optimizer_states"][0]["state"]
    assert len(states) == len(checkpoint["optimizer_states"][0]["param_groups"][0]["params"])
    assert not any(value.is_meta for value in checkpoint["state_dict"].values())


PLAIN_SCRIPT = """
import sys
from pathlib import Path

import torch
from lightning.pytorch import Trainer
from torchdata.stateful_dataloader import StatefulDataLoader

sys.path.insert(0, sys.argv[2])
from tests.support.models import Samples, Task

task = Task("gpt", "adamw", tied=True, metrics=False)
loader = StatefulDataLoader(Samples(True, 72), batch_size=6, shuffle=True)
trainer = Trainer(accelerator="cpu", max_epochs=1, logger=False, enable_checkpointing=False)
trainer.fit(task, loader, ckpt_path=sys.argv[1])
assert not any(name.startswith("lightning_dlres") for name in sys.modules)
print("steps", trainer.global_step)
"""


def test_a_process_without_this_package_resumes_a_checkpoint(
    pool: RankPool, tmp_path: Path, run_script: Any
) -> None:
    _, path = fit_without_interruption(pool, tmp_path)
    root = str(Path(__file__).parents[3])
    result = run_script(PLAIN_SCRIPT, path, root, cwd=tmp_path)
    assert result.returncode == 0, result.output
    assert f"steps {STEPS}" in result.output
