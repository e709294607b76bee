"""Checkpoints while ranks do not wait for each other, and those after a run that has failed."""

from __future__ import annotations

import threading
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.utils.data import DataLoader, TensorDataset

from lightning_dlres import ParameterServerStrategy
from lightning_dlres.strategies.connection import Connection
from tests.strategies.parameter_server.test_training import (
    BATCHES,
    OPTIONS,
    Regression,
    distance,
    fit,
)
from tests.support.models import QUIET
from tests.support.rank_pool import RankContext, RankPool
from tests.support.waiting import wait_until


class LateRank(Callback):
    """Rank 1 pushes its last gradients of an epoch when rank 0 has ended its own last step.

    Args:
        directory: Directory for the sign of rank 0.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def _sign(self, trainer: Any) -> Path:
        return self._directory / f"{trainer.current_epoch}.ended"

    def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
        if trainer.global_rank == 0 and trainer.is_last_batch:
            self._sign(trainer).touch()

    def on_before_backward(self, trainer: Any, *args: Any) -> None:
        if trainer.global_rank == 1 and trainer.is_last_batch:
            wait_until(self._sign(trainer).exists, "rank 0 has ended its last step", 60.0)


@pytest.mark.parametrize("consistency", ["asp", "ssp"])
def test_a_checkpoint_has_the_pushes_of_all_ranks(
    pool: RankPool, consistency: str, tmp_path: Path
) -> None:
    saving = partial(
        ModelCheckpoint, dirpath=tmp_path, filename="last_epoch", save_weights_only=False
    )
    ours = pool.run(
        fit,
        2,
        {"consistency": consistency, "staleness": 5, "embedded_servers": 2},
        ranks=2,
        model={"optimizer": "adamw"},
        max_epochs=2,
        callbacks=(partial(LateRank, tmp_path), saving),
        enable_checkpointing=True,
    )
    saved = torch.load(tmp_path / "last_epoch.ckpt", weights_only=True)
    assert distance(saved["state_dict"], ours[0]["weights"]) == 0
    steps = {float(state["step"]) for state in saved["optimizer_states"][0]["state"].values()}
    assert steps == {2 * 2 * BATCHES}


class NoteClipping(Callback):
    """Note of the bounds that the servers get for a push."""

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *args: Any) -> None:
        bounds = trainer.strategy._clipping.of(trainer.optimizers[0])
        pl_module.frozen.weight.data.fill_(bounds.max_norm or bounds.max_value or 0.0)


@pytest.mark.parametrize("algorithm", ["norm", "value"])
@pytest.mark.parametrize("consistency", ["bsp", "asp"])
def test_servers_clip_only_what_ranks_do_not(
    pool: RankPool, consistency: str, algorithm: str
) -> None:
    ours = pool.run(
        fit,
        2,
        {"consistency": consistency},
        ranks=2,
        model={"optimizer": "sgd"},
        callbacks=(NoteClipping,),
        gradient_clip_val=0.25,
        gradient_clip_algorithm=algorithm,
    )
    expected = 0.25 if consistency == "bsp" else 0.0
    assert all(rank["weights"]["frozen.weight"].eq(expected).all() for rank in ours)


class ChangeFrozen(Callback):
    """Other code changes a frozen layer, which the optimizer has."""

    def on_train_batch_start(self, trainer: Any, pl_module: Any, *args: Any) -> None:
        pl_module.frozen.weight.data.fill_(trainer.global_step)


def test_a_frozen_layer_keeps_the_changes_of_other_code(pool: RankPool, tmp_path: Path) -> None:
    saving = partial(ModelCheckpoint, dirpath=tmp_path, filename="frozen")
    ours = pool.run(
        fit,
        2,
        {"consistency": "asp"},
        ranks=2,
        model={"optimizer": "sgd"},
        callbacks=(ChangeFrozen, saving),
        enable_checkpointing=True,
    )
    saved = torch.load(tmp_path / "frozen.ckpt", weights_only=True)["state_dict"]
    expected = torch.full((4, 4), float(BATCHES - 1))
    for weights in (saved, ours[0]["weights"], ours[1]["weights"]):
        assert torch.equal(weights["frozen.weight"], expected)


def fit_amid_errors(context: RankContext, path: str) -> dict[str, Any]:
    """Fail in a fit, save, train to its end, save, and return the sizes of states and warnings."""

    class Failing(Regression):
        def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
            if batch_idx == 2 and self.fails:
                raise ValueError("a bad batch")

        fails = True

    torch.set_num_threads(1)
    module = Failing("sgd")
    data = TensorDataset(torch.randn(16, 64), torch.randn(16, 4))
    loader = DataLoader(data, batch_size=4)
    strategy = ParameterServerStrategy(**OPTIONS)
    trainer = Trainer(
        accelerator="cpu",
        strategy=strategy,
        plugins=[context.environment],
        max_epochs=1,
        **QUIET,
    )
    with pytest.raises(ValueError, match="a bad batch"):
        trainer.fit(module, loader)
    result: dict[str, Any] = {}
    for name in ("failed", "trained"):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            trainer.save_checkpoint(path)
        result[name] = [str(one.message) for one in caught]
        state = torch.load(path, weights_only=True)["optimizer_states"][0]["state"]
        result[f"{name} states"] = len(state)
        module.fails = False
        trainer.fit(module, loader)
    return result


def test_a_checkpoint_after_a_failure_says_what_it_lacks(pool: RankPool, tmp_path: Path) -> None:
    (result,) = pool.run(fit_amid_errors, 1, str(tmp_path / "some.ckpt"))
    assert any("has no state of the optimizer" in text for text in result["failed"])
    assert not any("state of the optimizer" in text for text in result["trained"])
    assert result["failed states"] == 0
    assert result["trained states"] > 0


def fit_after_a_finished_checkpoint(context: RankContext, path: str) -> tuple[int, float]:
    """Resume from a checkpoint whose training is over, and train another model with that Trainer;
    return the number of first pushes and the difference to a new Trainer."""
    torch.set_num_threads(1)
    data = TensorDataset(torch.ones(16, 64), torch.ones(16, 4))
    loader = DataLoader(data, batch_size=4)

    def trainer_of() -> Trainer:
        return Trainer(
            accelerator="cpu",
            strategy=ParameterServerStrategy(**OPTIONS, codec="tbq"),
            plugins=[context.environment],
            max_epochs=1,
            **QUIET,
        )

    first = trainer_of()
    first.fit(Regression("sgd"), loader)
    first.save_checkpoint(path)
    second, third = trainer_of(), trainer_of()
    second.fit(Regression("sgd"), loader, ckpt_path=path)
    models = [Regression("sgd") for _ in range(2)]
    second.fit_loop.epoch_progress.reset()
    for trainer, model in zip((second, third), models, strict=True):
        trainer.fit_loop.max_epochs = 1
        trainer.fit(model, loader)
    return second.global_step, distance(models[0].state_dict(), models[1].state_dict())


def test_residuals_of_a_finished_checkpoint_are_not_those_of_the_next_fit(
    pool: RankPool, tmp_path: Path
) -> None:
    ((steps, difference),) = pool.run(
        fit_after_a_finished_checkpoint, 1, str(tmp_path / "finished.ckpt")
    )
    assert steps > 4
    assert difference == 0


def lose_a_rank_at_the_end(context: RankContext) -> bool:
    """Let the last exchange with the other ranks fail; return True if the server still runs."""
    strategy = ParameterServerStrategy(**OPTIONS)

    class Note(Callback):
        def on_train_end(self, trainer: Any, pl_module: Any) -> None:
            any_rank = Connection.any_rank

            def failing(self: Connection, flag: bool, *args: Any) -> bool:
                # This rank has left the servers, and waits until the others have.
                if strategy.session is None:
                    raise ConnectionError("rank 1 was lost")
                return any_rank(self, flag, *args)

            Connection.any_rank = failing  # type: ignore[method-assign]
            restore.append(lambda: setattr(Connection, "any_rank", any_rank))

    restore: list[Any] = []
    trainer = Trainer(
        accelerator="cpu",
        strategy=strategy,
        plugins=[context.environment],
        callbacks=[Note()],
        max_epochs=1,
        **QUIET,
    )
    data = TensorDataset(torch.randn(8, 64), torch.randn(8, 4))
    try:
        with pytest.raises(ConnectionError):
            trainer.fit(Regression("sgd"), DataLoader(data, batch_size=4))
    finally:
        restore[0]()
    return any(thread.name == "dlres-ps" for thread in threading.enumerate())


def test_servers_end_although_a_rank_is_lost_at_the_end(pool: RankPool) -> None:
    assert pool.run(lose_a_rank_at_the_end, 1) == [False]
