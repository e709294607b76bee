"""Use of the strategy outside of training steps: predictions, late checkpoints, calls of the module
in hooks, gradients in validation, and unusual ways to start a script."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.fabric.plugins import TorchCheckpointIO
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import BasePredictionWriter
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_dlres import ConfigError, HeteroPipeStrategy, UnsupportedStepError
from lightning_dlres.core.comm import mailbox
from tests.support.models import Samples
from tests.support.rank_pool import RankContext, RankPool
from tests.support.training_cases import Classifier, batches, trainer_for


class Predicts(Classifier):
    def predict_step(self, batch: Any, batch_idx: int, dataloader_idx: int) -> Tensor:
        return self.net(batch[0]).argmax(1)


class Writer(BasePredictionWriter):
    """Prediction writer that records the indices of the samples."""

    def __init__(self) -> None:
        super().__init__("batch_and_epoch")
        self.batches: list[Any] = []
        self.epoch: Any = None

    def write_on_batch_end(
        self, trainer: Any, module: Any, prediction: Any, indices: Any, *rest: Any
    ) -> None:
        self.batches.append((list(indices), len(prediction)))

    def write_on_epoch_end(self, trainer: Any, module: Any, predictions: Any, indices: Any) -> None:
        self.epoch = (len(predictions), [[list(batch) for batch in part] for part in indices])


class SlowFiles(TorchCheckpointIO):
    """Checkpoint I/O that delays the write on rank 0, the only rank that writes."""

    def save_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        time.sleep(0.5)
        super().save_checkpoint(*args, **kwargs)


def predict_and_save(context: RankContext, path: Path) -> dict[str, Any]:
    loaders = [
        DataLoader(Samples(False, 10), batch_size=4, num_workers=workers) for workers in (0, 1)
    ]
    plain, ours = Writer(), Writer()
    trainer_for(None, callbacks=[plain]).predict(Predicts(), loaders)
    trainer = trainer_for(context, callbacks=[ours], plugins=[context.environment, SlowFiles()])
    # Two runs, since each must begin with the first indices.
    trainer.predict(Predicts(), loaders)
    ours.batches.clear()
    trainer.predict(Predicts(), loaders)
    trainer.save_checkpoint(path)
    return {
        "saved": path.is_file(),
        "batches": ours.batches == plain.batches,
        "epoch": ours.epoch == plain.epoch,
    }


def test_predictions_are_written_and_a_late_checkpoint_is_there(
    pool: RankPool, tmp_path: Path
) -> None:
    expected = {"saved": True, "batches": True, "epoch": True}
    assert pool.run(predict_and_save, 2, tmp_path / "late.ckpt") == [expected] * 2


class CallsAlone(Classifier):
    """Model that calls the module in a hook on one rank only."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self._rank = rank

    def on_train_batch_end(self, *args: Any) -> None:
        if self.global_rank == self._rank:
            self.net(torch.zeros(2, 16))


def call_alone(context: RankContext, rank: int) -> None:
    # Print the explanation before the timeout. The pool replaces the ranks, because they fail.
    mailbox._EXPLAIN_SECONDS = 0.1
    # A call on rank 0 alone waits for the output of rank 1 until the timeout. A call on rank 1
    # alone fails at once.
    trainer_for(context, timeout=8 if rank == 0 else 60).fit(CallsAlone(rank), batches())


@pytest.mark.parametrize("rank", [0, 1])
def test_a_call_on_one_rank_is_named(pool: RankPool, rank: int) -> None:
    outcome = pool.run_expecting_errors(call_alone, 2, rank, timeout=120)[rank]
    reason = "called on all ranks or on none. Call it without a condition on the rank."
    assert reason in outcome.error_message + outcome.output
    if rank == 1:
        assert outcome.error_type == UnsupportedStepError.__name__
        assert "outside of a step, and stage 0 (rank 0) is in a training step" in (
            outcome.error_message
        )


class Gradients(Classifier):
    """Model that calls the module under `enable_grad` in validation.

    Args:
        runs_backward: True: it also computes the gradient of the input.
    """

    def __init__(self, runs_backward: bool) -> None:
        super().__init__()
        self._runs_backward = runs_backward

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        with torch.enable_grad():
            x = batch[0].clone().requires_grad_()
            output = self.net(x)
            assert output.requires_grad
            output += 1.0
            if self._runs_backward:
                torch.autograd.grad(output.sum(), x)
        self.observed.append(float(output.sum()))


def gradients_in_validation(context: RankContext) -> tuple[bool, str]:
    observed = []
    for run_context in (None, context):
        model = Gradients(runs_backward=False)
        trainer_for(run_context, inference_mode=False).validate(model, batches(), verbose=False)
        observed.append(model.observed)
    with pytest.raises(UnsupportedStepError) as error:
        trainer_for(context, inference_mode=False).validate(
            Gradients(runs_backward=True), batches()
        )
    return torch.allclose(*map(torch.tensor, observed)), str(error.value)


def test_gradients_in_validation_are_refused(pool: RankPool) -> None:
    for same, message in pool.run(gradients_in_validation, 2):
        assert same
        assert "Gradients of the pipelined module are available in training_step only" in message


@pytest.mark.parametrize(
    ("script", "got"), [("-", "standard input"), ("-c", "python -c"), ("", "no script")]
)
def test_a_script_that_is_no_file_is_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, script: str, got: str
) -> None:
    monkeypatch.setattr(sys, "argv", [script])
    monkeypatch.setattr(sys.modules["__main__"], "__spec__", None)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=f"got {got}. Save the script as train.py"):
        Trainer(strategy=HeteroPipeStrategy(), accelerator="cpu", devices=2, logger=False)
    Trainer(strategy=HeteroPipeStrategy(), accelerator="cpu", devices=1, logger=False)
