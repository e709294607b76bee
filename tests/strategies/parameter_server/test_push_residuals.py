"""Codecs of pushes keep their states across checkpoints: residuals, momentum, warm-up, seeds."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint

from lightning_dlres.strategies.parameter_server.residuals import CHECKPOINT_KEY
from tests.strategies.parameter_server.test_training import BATCHES, distance, fit
from tests.support.rank_pool import RankPool

ARGUMENTS: dict[str, Any] = {"model": {"optimizer": "sgd"}, "ranks": 2}
# Small keys: the largest weight is cut into two.
OPTIONS: dict[str, Any] = {"embedded_servers": 2, "key_bytes": "64KiB"}
DGC: dict[str, Any] = {"ratio": 0.01, "momentum": 0.5, "warmup_steps": 3 * BATCHES // 2}
CODECS: dict[str, dict[str, Any]] = {
    "tbq": {"codec": "tbq"},
    "random numbers": {"codec": "terngrad"},
    "momentum and warm-up": {"codec": "dgc", "codec_options": DGC},
}


@pytest.mark.parametrize("case", CODECS)
def test_a_resumed_run_equals_an_uninterrupted_one(
    pool: RankPool, case: str, tmp_path: Path
) -> None:
    options, path = OPTIONS | CODECS[case], str(tmp_path / "after_fit.ckpt")
    straight = pool.run(fit, 2, options, max_epochs=2, **ARGUMENTS)
    # One checkpoint is saved within `fit`, and one after it.
    saving = partial(ModelCheckpoint, dirpath=tmp_path, filename="in_fit")
    pool.run(
        fit, 2, options, save=path, callbacks=(saving,), enable_checkpointing=True, **ARGUMENTS
    )
    for name in ("in_fit", "after_fit"):
        resumed = pool.run(
            fit, 2, options, max_epochs=2, resume=str(tmp_path / f"{name}.ckpt"), **ARGUMENTS
        )
        assert all(distance(one["weights"], straight[0]["weights"]) == 0 for one in resumed)


def test_a_checkpoint_without_further_steps_passes_residuals_on(
    pool: RankPool, tmp_path: Path
) -> None:
    first, second = str(tmp_path / "first.ckpt"), str(tmp_path / "second.ckpt")
    options = OPTIONS | CODECS["tbq"]
    pool.run(fit, 2, options, save=first, **ARGUMENTS)
    # The epoch is over.
    pool.run(fit, 2, options, resume=first, save=second, **ARGUMENTS)
    saved = [torch.load(path, weights_only=True)[CHECKPOINT_KEY] for path in (first, second)]
    assert len(saved[0]) == len(saved[1]) == 2
    for ours, theirs in zip(*saved, strict=True):
        assert [one["pushes"] for one in theirs] == [BATCHES] * len(ours)
        for one, other in zip(ours, theirs, strict=True):
            assert one["tensors"]["residual"].abs().max() > 0
            assert torch.equal(one["tensors"]["residual"], other["tensors"]["residual"])


class SaveAtStart(Callback):
    """Callback that saves a checkpoint before the first step."""

    def __init__(self, path: str) -> None:
        self._path = path

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        trainer.save_checkpoint(self._path)


def test_a_run_without_codec_keeps_residuals_until_its_first_push(
    pool: RankPool, tmp_path: Path
) -> None:
    first, second, last = (str(tmp_path / f"{name}.ckpt") for name in ("first", "second", "last"))
    pool.run(fit, 2, OPTIONS | CODECS["tbq"], save=first, **ARGUMENTS)
    saving = partial(SaveAtStart, second)
    pool.run(
        fit, 2, OPTIONS, resume=first, save=last, callbacks=(saving,), max_epochs=2, **ARGUMENTS
    )
    saved = [torch.load(path, weights_only=True) for path in (first, second, last)]
    for ours, theirs in zip(*(one[CHECKPOINT_KEY] for one in saved[:2]), strict=True):
        for one, other in zip(ours, theirs, strict=True):
            assert torch.equal(one["tensors"]["residual"], other["tensors"]["residual"])
    assert CHECKPOINT_KEY not in saved[2]
