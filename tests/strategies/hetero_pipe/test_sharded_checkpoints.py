"""Checkpoints that the ranks write in parts: resumed by any number of stages, and consolidated."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn

from lightning_dlres import HeteroPipeStrategy, PipelinePlan, consolidate_checkpoint
from tests.support.models import QUIET
from tests.support.parity import relative
from tests.support.rank_pool import RankContext, RankPool
from tests.support.training_cases import Classifier, batches, trainer_for

SAVED = {"save_distributed_checkpoint": True, "plan": None, "microbatches": 1}


class Counting(nn.Linear):
    """Layer with state that is no tensor."""

    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += self.training
        return super().forward(x)

    def get_extra_state(self) -> Any:
        return {"calls": self.calls}

    def set_extra_state(self, state: Any) -> None:
        self.calls = state["calls"]


class Scale(nn.Module):
    """Layer that converts values of its first version, which were logarithms."""

    _version = 2

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.full((16,), 2.0))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale

    def _load_from_state_dict(
        self, state_dict: Any, prefix: str, local_metadata: Any, *args: Any
    ) -> None:
        if local_metadata.get("version") != 2:
            state_dict[f"{prefix}scale"] = state_dict[f"{prefix}scale"].exp()
        super()._load_from_state_dict(state_dict, prefix, local_metadata, *args)


class Versioned(Classifier):
    """Classifier with a layer that converts old checkpoints on each stage."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.Linear(16, 16), Scale(), nn.Tanh(), nn.Linear(16, 16), Scale(), nn.Linear(16, 5)
        )

    @property
    def scales(self) -> list[float]:
        """First element of each scale that this rank holds."""
        layers = [layer for layer in self.net.modules() if isinstance(layer, Scale)]
        return [x.scale[0].item() for x in layers if not x.scale.is_meta]


class Adaptive(Classifier):
    """Classifier with BatchNorm, a layer with a state of its own, tied weights, and Adam.

    Attributes:
        losses: Loss of each step.
    """

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        first, last = nn.Linear(16, 16), nn.Linear(16, 16)
        last.weight = first.weight
        norm, head = nn.BatchNorm1d(16), nn.Linear(16, 5)
        self.net = nn.Sequential(first, norm, nn.Tanh(), Counting(16, 16), last, head)
        self.losses: list[float] = []

    def on_train_batch_end(self, outputs: Any, *_: Any) -> None:
        self.losses.append(float(outputs["loss"]))

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.log("accuracy", (self.net(batch[0]).argmax(1) == batch[1]).float().mean())

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.01)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)]


def train(
    context: RankContext | None, path: str, epochs: int, resumed: str | None = None
) -> list[float]:
    """Train, save a checkpoint at `path`, and return the losses."""
    seed_everything(3, verbose=False)
    model = Adaptive()
    options = {**SAVED, "stages": context.world_size} if context is not None else {}
    trainer = trainer_for(context, **options, max_epochs=epochs)
    trainer.fit(model, batches(), ckpt_path=resumed, weights_only=False)
    trainer.save_checkpoint(path)
    return model.losses


def train_plainly(context: RankContext, *args: Any) -> list[float]:
    return train(None, *args)


@pytest.mark.parametrize("stages", [1, pytest.param(2, marks=pytest.mark.exhaustive), 4])
def test_any_number_of_stages_resumes_it(pool: RankPool, tmp_path: Path, stages: int) -> None:
    path, whole = str(tmp_path / "shards"), str(tmp_path / "whole.ckpt")
    pool.run(train_plainly, 1, whole, 2)
    (expected,) = pool.run(train_plainly, 1, str(tmp_path / "end.ckpt"), 4, whole)
    pool.run(train, 3, path, 2)
    assert (tmp_path / "shards" / ".metadata").is_file()
    assert {file.name for file in (tmp_path / "shards").iterdir()} >= {"0", "1", "2"}
    for losses in pool.run(train, stages, str(tmp_path / "again"), 4, path):
        assert losses == pytest.approx(expected, rel=1e-4)


def test_a_plain_trainer_resumes_what_is_made_of_it(pool: RankPool, tmp_path: Path) -> None:
    path, whole = str(tmp_path / "shards"), str(tmp_path / "whole.ckpt")
    pool.run(train, 2, path, 2)
    pool.run(train_plainly, 1, whole, 2)
    consolidate_checkpoint(path, tmp_path / "made.ckpt")
    made, expected = (
        torch.load(file, weights_only=False) for file in (tmp_path / "made.ckpt", whole)
    )
    assert made["state_dict"].keys() == expected["state_dict"].keys()
    assert made["state_dict"]["net.3._extra_state"] == expected["state_dict"]["net.3._extra_state"]
    for name, value in expected["state_dict"].items():
        if isinstance(value, Tensor):
            assert relative(made["state_dict"][name], value) <= 1e-4, name
    ours, theirs = made["optimizer_states"][0], expected["optimizer_states"][0]
    assert ours["param_groups"] == theirs["param_groups"]
    assert ours["state"].keys() == theirs["state"].keys()
    (a,) = pool.run(train_plainly, 1, str(tmp_path / "a"), 4, str(tmp_path / "made.ckpt"))
    (b,) = pool.run(train_plainly, 1, str(tmp_path / "b"), 4, whole)
    assert a == pytest.approx(b, rel=1e-4)


class ScalesAtStart(Callback):
    scales: list[float]

    def on_train_start(self, trainer: Trainer, module: LightningModule) -> None:
        self.scales = module.scales  # type: ignore[assignment]


def save_and_resume(context: RankContext, path: str, is_sharded: bool) -> list[float]:
    """Save a checkpoint amid training, and return this rank's scales after a resume from it."""
    options: dict[str, Any] = {
        "plan": PipelinePlan(replicas=((0, 1),), split=(3, 3)),
        "save_distributed_checkpoint": is_sharded,
    }
    keep = ModelCheckpoint(path, "last", enable_version_counter=False)
    trainer_for(context, **options, max_epochs=1, callbacks=[keep], enable_checkpointing=True).fit(
        Versioned(), batches()
    )
    watch = ScalesAtStart()
    trainer = trainer_for(context, **options, max_epochs=2, callbacks=[watch])
    trainer.fit(Versioned(), batches(), ckpt_path=f"{path}/last.ckpt", weights_only=False)
    return watch.scales


@pytest.mark.parametrize("is_sharded", [False, True])
def test_layers_know_the_version_that_wrote_it(
    pool: RankPool, tmp_path: Path, is_sharded: bool
) -> None:
    for scales in pool.run(save_and_resume, 2, str(tmp_path), is_sharded):
        assert scales == pytest.approx([2.0], abs=0.1)
    path = tmp_path / "last.ckpt"
    if is_sharded:
        consolidate_checkpoint(path, tmp_path / "whole.ckpt")
        path = tmp_path / "whole.ckpt"
    state = torch.load(path, weights_only=True)["state_dict"]
    model = Versioned()
    model.load_state_dict(state)
    assert model.scales == pytest.approx([2.0, 2.0], abs=0.1)


def keep_best(context: RankContext, directory: str) -> tuple[list[str], float]:
    """Let ModelCheckpoint save each epoch and keep one; test the best one."""
    seed_everything(3, verbose=False)
    model = Adaptive()
    keeper = ModelCheckpoint(directory, monitor="loss_epoch", save_top_k=1, save_last=True)
    trainer = trainer_for(
        context,
        **SAVED,
        stages=context.world_size,
        max_epochs=3,
        callbacks=[keeper],
        enable_checkpointing=True,
    )
    trainer.fit(model, batches())
    trainer.test(model, batches(), ckpt_path="best", weights_only=False)
    names = sorted(file.name for file in Path(directory).iterdir())
    return names, float(trainer.callback_metrics["accuracy"])


def test_callbacks_keep_and_load_it(pool: RankPool, tmp_path: Path) -> None:
    results = pool.run(keep_best, 2, str(tmp_path))
    assert results[0] == results[1]
    names, _ = results[0]
    assert [name for name in names if not name.startswith(".")] == names
    assert len(names) == 2
    assert "last.ckpt" in names


def load_into_another(context: RankContext, path: str) -> None:
    model = Adaptive()
    model.net[5] = nn.Linear(16, 7)  # type: ignore[index]
    model.net[3] = nn.Linear(16, 16)  # type: ignore[index]
    trainer = trainer_for(context, **SAVED, stages=context.world_size)
    trainer.fit(model, batches(), ckpt_path=path, weights_only=False)


def test_a_checkpoint_of_another_model_is_refused(pool: RankPool, tmp_path: Path) -> None:
    pool.run(train, 2, str(tmp_path / "shards"), 1)
    for outcome in pool.run_expecting_errors(load_into_another, 2, str(tmp_path / "shards")):
        assert "net.3._extra_state" in outcome.error_message
        assert "net.5.weight" in outcome.error_message


def save_remotely(context: RankContext) -> None:
    trainer = trainer_for(context, **SAVED, stages=context.world_size, max_epochs=1)
    trainer.fit(Adaptive(), batches())
    trainer.save_checkpoint("s3://bucket/shards")


def test_a_remote_path_is_refused(pool: RankPool) -> None:
    for outcome in pool.run_expecting_errors(save_remotely, 2):
        assert "must be a path on storage that all ranks share" in outcome.error_message


def save_on_one_device(context: RankContext, path: str) -> None:
    trainer = Trainer(
        strategy=HeteroPipeStrategy(save_distributed_checkpoint=True),
        accelerator="cpu",
        devices=1,
        max_epochs=1,
        **QUIET,
    )
    trainer.fit(Adaptive(), batches())
    trainer.save_checkpoint(path)


def test_one_device_writes_an_ordinary_checkpoint(pool: RankPool, tmp_path: Path) -> None:
    pool.run(save_on_one_device, 1, str(tmp_path / "file.ckpt"))
    assert (tmp_path / "file.ckpt").is_file()
