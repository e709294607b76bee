"""Errors of all ranks after one rank, or every rank, has raised in the user's code."""

from __future__ import annotations

import gc
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_dlres import OneBitAdam
from lightning_dlres.strategies import CompressedDDPStrategy
from tests.support.models import QUIET
from tests.support.rank_pool import RankContext, RankPool

FIXED = {"topology": "ps", "coordinator": "none", "min_bytes": 0, "timeout": 20.0}
# Where a rank waits for rank 1, which raises.
PLACES = ("log", "barrier", "gather", "decision", "validation", "collective", "backward")


class Failing(LightningModule):
    """Layer whose training raises on some ranks at a place where the other ranks wait for them.

    It raises in the third training step, or in the first validation step.

    Args:
        ranks: Ranks that raise.
        place: One of `PLACES`.
        has_onebit: True trains with OneBitAdam.
    """

    def __init__(self, ranks: tuple[int, ...], place: str, *, has_onebit: bool = False) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.layer = nn.Linear(4, 16)
        self._ranks, self._place, self._has_onebit = ranks, place, has_onebit

    def _raise_or_wait(self) -> None:
        if self.global_rank in self._ranks:
            raise ValueError("the user's own error")
        if self._place == "barrier":
            self.trainer.strategy.barrier()
        elif self._place == "gather":
            self.all_gather(torch.ones(2))
        elif self._place == "decision":
            self.trainer.strategy.reduce_boolean_decision(True)
        elif self._place == "collective":
            torch.distributed.all_reduce(torch.ones(2))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.layer(batch[0]).square().mean()
        if batch_idx == 2 and self._place != "validation":
            self._raise_or_wait()
        self.log("loss", loss, sync_dist=self._place == "log")
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        if self._place == "validation":
            self._raise_or_wait()
        self.log("error", self.layer(batch[0]).mean(), sync_dist=True)

    def configure_optimizers(self) -> Any:
        if self._has_onebit:
            return OneBitAdam(self.parameters(), freeze_step=1)
        return torch.optim.SGD(self.parameters(), lr=0.1)


def fail(
    context: RankContext,
    algorithm: str,
    ranks: tuple[int, ...],
    place: str = "backward",
    has_onebit: bool = False,
    checkpoints: str | None = None,
) -> tuple[str, list[str]]:
    """Return the error of this rank, and the threads of the strategy that still run.

    Args:
        context: This rank.
        algorithm: Argument of the strategy.
        ranks: Ranks that raise.
        place: One of `PLACES`.
        has_onebit: True trains with OneBitAdam.
        checkpoints: Folder in which a checkpoint is saved after an exception; None saves none.
    """
    # Earlier jobs of this process may have abandoned threads.
    before = set(threading.enumerate())
    data = DataLoader(TensorDataset(torch.ones(32, 4)), batch_size=4)
    options: dict[str, Any] = dict(QUIET)
    if checkpoints is not None:
        options["enable_checkpointing"] = True
        options["callbacks"] = [ModelCheckpoint(checkpoints, save_on_exception=True)]
    trainer = Trainer(
        strategy=CompressedDDPStrategy(algorithm=algorithm, **FIXED),  # type: ignore[arg-type]
        accelerator="cpu",
        devices=context.world_size,
        plugins=[context.environment],
        max_epochs=2,
        num_sanity_val_steps=0,
        **options,
    )
    error = ""
    try:
        trainer.fit(Failing(ranks, place, has_onebit=has_onebit), data, data)
    except Exception as raised:
        error = f"{type(raised).__name__}: {raised}"
    names = ("dlres", "send-", "receive-")
    threads = [
        one.name for one in set(threading.enumerate()) - before if one.name.startswith(names)
    ]
    if algorithm == "none" and error.startswith("ValueError"):
        # Close the connections, as the end of a script would. The waiting rank notices only that.
        del trainer
        gc.collect()
        torch.distributed.destroy_process_group()
    return error, threads


@pytest.mark.parametrize("place", PLACES)
def test_ranks_that_wait_anywhere_name_the_rank_that_raised(pool: RankPool, place: str) -> None:
    (error, _), (own, _) = pool.run(fail, 2, "none", (1,), place)
    assert own == "ValueError: the user's own error"
    assert error.startswith("PeerLostError: rank 1")
    assert "the user's own error" in error


@pytest.mark.parametrize("failing", [0, 1])
def test_a_rank_that_saves_a_checkpoint_after_an_exception_first_tells_the_others(
    pool: RankPool, failing: int, tmp_path: Path
) -> None:
    ranks = pool.run(fail, 2, "int8", (failing,), checkpoints=str(tmp_path))
    assert ranks[failing][0] == "ValueError: the user's own error"
    error, _ = ranks[1 - failing]
    assert error.startswith(f"PeerLostError: rank {failing}")
    assert "the user's own error" in error
    saved = torch.load(next(tmp_path.iterdir()), weights_only=True)
    assert saved["global_step"] == 2


@pytest.mark.parametrize("has_onebit", [False, True])
def test_no_thread_outlives_a_run_that_failed(pool: RankPool, has_onebit: bool) -> None:
    """Threads inside torch would abort a process at its exit, though the error was handled."""
    for error, threads in pool.run(fail, 2, "int8", (0, 1), has_onebit=has_onebit):
        assert error == "ValueError: the user's own error"
        assert not threads
