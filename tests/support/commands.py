"""Commands `dlres plan` and `dlres fit` with the example config, run by ranks of the pool."""

from __future__ import annotations

import os
from pathlib import Path

import torch

from lightning_dlres.cli.main import main
from tests.support.rank_environment import set_torchrun_variables
from tests.support.rank_pool import RankContext, RankOutcome

ROOT = Path(__file__).resolve().parents[2]
CONFIG = ROOT / "examples" / "configs" / "hetero_pipe.yaml"
# Options of a model and of data that train in seconds.
TINY = (
    "--trainer.limit_train_batches=3",
    "--trainer.max_epochs=1",
    "--trainer.limit_val_batches=1",
    "--trainer.log_every_n_steps=1",
    "--model.init_args.width=16",
    "--model.init_args.depth=2",
    "--data.init_args.batch_size=8",
    "--data.init_args.max_bytes=600kB",
)


def run_command_in(context: RankContext, directory: str, *options: str) -> int:
    """Run `dlres` in a directory, as a rank of torchrun."""
    os.chdir(directory)
    set_torchrun_variables(context)
    return main(options)


def assert_trained(outcomes: list[RankOutcome], directory: Path) -> None:
    """Assert that `fit` printed its plan and wrote its files."""
    assert [outcome.value for outcome in outcomes] == [0] * len(outcomes), outcomes
    assert "Pipeline plan" in outcomes[0].output, outcomes
    assert "Predicted step" in outcomes[0].output
    assert "Predicted step" not in outcomes[1].output
    (checkpoint,) = directory.glob("lightning_logs/version_0/checkpoints/last.ckpt")
    state = torch.load(checkpoint, weights_only=True)["state_dict"]
    assert {name.split(".")[1] for name in state} == {"0", "1", "2", "3"}
    metrics = (directory / "lightning_logs/version_0/metrics.csv").read_text()
    assert "val_bits_per_byte" in metrics.splitlines()[0]
