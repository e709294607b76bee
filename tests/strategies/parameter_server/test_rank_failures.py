"""A rank fails while another waits for its pushes: the other one ends with an exception of its own,
and can still save a checkpoint."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import OnExceptionCheckpoint

from tests.strategies.parameter_server.test_training import distance, fit
from tests.support.rank_pool import RankContext, RankPool

FAILING_STEP = 3


class FailOnRank1(Callback):
    """Callback that fails on rank 1 before its backward, whose gradients rank 0 waits for."""

    def __init__(self, context: RankContext, directory: Path) -> None:
        self._context, self._directory = context, directory

    def on_before_backward(self, trainer: Any, pl_module: Any, loss: Any) -> None:
        if trainer.global_step == FAILING_STEP and self._context.rank == 1:
            raise ValueError("no such sample")

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        name = type(exception).__name__
        (self._directory / f"rank{self._context.rank}.txt").write_text(f"{name}: {exception}")


def fit_and_fail(context: RankContext, directory: str) -> None:
    path = Path(directory)
    fit(
        context,
        {"consistency": "bsp"},
        model={"optimizer": "sgd"},
        ranks=2,
        callbacks=lambda: [FailOnRank1(context, path), OnExceptionCheckpoint(path)],
        enable_checkpointing=True,
        default_root_dir=directory,
    )


def fit_without_a_server(context: RankContext, address: str) -> None:
    options = {"servers": [address], "timeout": 3.0}
    fit(context, options, model={"optimizer": "sgd"}, ranks=2)


def test_all_ranks_name_a_server_that_does_not_answer(pool: RankPool) -> None:
    with socket.socket() as bound:
        # No other process gets its port, and nothing answers there.
        bound.bind(("127.0.0.1", 0))
        address = f"tcp://127.0.0.1:{bound.getsockname()[1]}"
        for outcome in pool.run_expecting_errors(fit_without_a_server, 2, address):
            assert f"server 0 ({address})" in outcome.error_message


def test_the_other_rank_gets_an_exception_and_saves_a_checkpoint(
    pool: RankPool, tmp_path: Path
) -> None:
    outcomes = pool.run_expecting_errors(fit_and_fail, 2, str(tmp_path))
    assert "PeerLostError" in (tmp_path / "rank0.txt").read_text()
    assert "rank 1 gave up: ValueError: no such sample" in outcomes[0].error_message
    model = {"optimizer": "sgd"}
    (plain,) = pool.run(fit, 1, None, model=model, ranks=2, max_steps=FAILING_STEP)
    checkpoint = torch.load(tmp_path / "on_exception.ckpt", weights_only=True)
    assert checkpoint["global_step"] == FAILING_STEP
    # Rank 0 has used no step without rank 1.
    assert distance(checkpoint["state_dict"], plain["weights"]) < 2e-5
    momenta = [
        one["momentum_buffer"] for one in checkpoint["optimizer_states"][0]["state"].values()
    ]
    assert momenta
    assert all(bool(one.isfinite().all()) for one in momenta)
