"""Launch of an ordinary script, directly and by torchrun."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

SCRIPT = """
import torch
from lightning.pytorch import Trainer
from lightning.pytorch.demos.boring_classes import BoringModel

import lightning_dlres


class Model(BoringModel):
    def __init__(self):
        super().__init__()
        layers = [torch.nn.Linear(32, 32), torch.nn.ReLU(), torch.nn.Linear(32, 32)]
        self.layer = torch.nn.Sequential(*layers, torch.nn.Linear(32, 2))


if __name__ == "__main__":
    model = Model()
    limits = dict(limit_train_batches=8, limit_val_batches=4, limit_test_batches=4)
    options = dict(max_epochs=1, **limits, limit_predict_batches=6, logger=False)
    trainer = Trainer(strategy="dlres_hetero_pipe", accelerator="cpu", devices=2, **options)
    trainer.fit(model)
    validated, tested = trainer.validate(model), trainer.test(model)
    predicted = trainer.predict(model)
    trainer.save_checkpoint("late.ckpt")
    output = model(torch.randn(3, 32))
    if trainer.is_global_zero:
        print("steps", trainer.global_step, "predicted", len(predicted), tuple(output.shape))
        best = trainer.checkpoint_callback.best_model_path
        print("loaded", type(Model.load_from_checkpoint(best)).__name__)
"""


# The README's first script also starts its ranks itself.
LAUNCHERS = [
    pytest.param((), marks=pytest.mark.exhaustive, id="itself"),
    pytest.param(("-m", "torch.distributed.run", "--nproc-per-node=2"), id="torchrun"),
]


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_an_ordinary_script_trains(
    run_script: Any, tmp_path: Path, launcher: tuple[str, ...]
) -> None:
    result = run_script(SCRIPT, launcher=launcher, cwd=tmp_path)
    assert result.returncode == 0, result.output
    assert "steps 8 predicted 6 (3, 2)" in result.output
    assert "loaded Model" in result.output
    assert (tmp_path / "late.ckpt").is_file()
