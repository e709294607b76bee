"""Signals and errors on one rank: a signal ends all ranks together, with Lightning's checkpoint. An
error ends the other ranks, even if callbacks save a checkpoint then."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins.environments import SLURMEnvironment
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

from lightning_dlres import PeerLostError
from tests.support.models import Samples
from tests.support.rank_environment import PoolEnvironment
from tests.support.rank_pool import RankContext, RankPool
from tests.support.training_cases import Case, Classifier, batches, fit, trainer_for

# Signal by which SLURM asks for the last checkpoint. The pool needs SIGUSR1 for itself.
REQUEUE = signal.SIGUSR2
# Stand-in for SLURM's scontrol; the real one also ends the job.
SCONTROL = """#!/bin/sh
echo "$@" >> "{log}"
kill -TERM $PPID
"""


class SlurmPool(PoolEnvironment, SLURMEnvironment):
    """Environment of the pool's ranks as a SLURM job that is requeued after a preemption."""

    def __init__(self, world_size: int, rank: int, port: int) -> None:
        SLURMEnvironment.__init__(self, auto_requeue=True, requeue_signal=REQUEUE)
        PoolEnvironment.__init__(self, world_size, rank, port)


class Signalled(Classifier):
    """Model that sends a signal to its own process after the second batch, on one rank."""

    def __init__(self, rank: int, number: int) -> None:
        super().__init__()
        self._rank, self._number = rank, number

    def on_train_batch_end(self, *args: Any) -> None:
        if self.trainer.global_step == 2 and self.global_rank == self._rank:
            os.kill(os.getpid(), self._number)

    def on_validation_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 2 and self.global_rank == self._rank:
            os.kill(os.getpid(), self._number)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.net(batch[0])


class Endless(IterableDataset[Any]):
    """Dataset without an end."""

    def __iter__(self) -> Any:
        while True:
            yield from (Samples(False, 8)[index] for index in range(8))


def preempted(context: RankContext, directory: Path) -> dict[str, Any]:
    """Train until the signal ends the run, and resume its checkpoint on a single device."""
    job = {"PATH": f"{directory}:{os.environ['PATH']}", "SLURM_JOB_ID": "7"}
    os.environ.update(job)
    environment = SlurmPool(context.world_size, context.rank, context.environment.main_port)
    trainer = trainer_for(context, plugins=[environment], default_root_dir=directory, max_epochs=-1)
    # All batches are equal, so that the position of the loader does not matter.
    same = DataLoader(Endless(), batch_size=8)
    model = Signalled(1, REQUEUE)
    try:
        trainer.fit(model, same)
    except SystemExit as error:
        ended = type(error).__name__
    saved = directory / "hpc_ckpt_1.ckpt"
    state = torch.load(saved, weights_only=False)
    steps = trainer.global_step
    same_steps = {"max_epochs": -1, "max_steps": steps}
    plain = Case(Classifier, data=lambda: same, trainer=same_steps)
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    resumed = Classifier()
    trainer_for(None, **same_steps).fit(resumed, same, ckpt_path=saved)
    return {
        "ended": ended,
        "saved_steps": state["global_step"],
        "steps": steps,
        "handler_is_restored": signal.getsignal(signal.SIGTERM) is signal.SIG_DFL,
        "distance_to_plain": _distance(weights, fit(None, plain).state),
        "distance_of_resumed": _distance(dict(resumed.state_dict()), weights),
    }


def _distance(a: dict[str, Tensor], b: dict[str, Tensor]) -> float:
    return max(float((a[name] - b[name]).abs().max()) for name in b)


def test_a_preempted_slurm_job_is_saved_and_requeued(pool: RankPool, tmp_path: Path) -> None:
    log = tmp_path / "log"
    (tmp_path / "scontrol").write_text(SCONTROL.format(log=log))
    (tmp_path / "scontrol").chmod(0o755)
    first, second = pool.run(preempted, 2, tmp_path)
    assert log.read_text().splitlines() == ["requeue 7"]
    assert first == second
    assert first["ended"] == "SIGTERMException"
    assert 2 <= first["saved_steps"] <= first["steps"]
    assert first["handler_is_restored"]
    assert first["distance_to_plain"] < 1e-5
    assert first["distance_of_resumed"] < 1e-5


def terminated(context: RankContext, entry_point: str) -> str:
    trainer = trainer_for(context, max_epochs=100_000, limit_train_batches=1.0)
    data = DataLoader(Endless(), batch_size=8)
    try:
        getattr(trainer, entry_point)(Signalled(1, signal.SIGTERM), data)
    except SystemExit as error:
        return type(error).__name__
    return "went on"


@pytest.mark.parametrize("entry_point", ["fit", "validate"])
def test_sigterm_to_one_rank_ends_all(pool: RankPool, entry_point: str) -> None:
    assert pool.run(terminated, 2, entry_point) == ["SIGTERMException"] * 2


class Raises(Classifier):
    """Model that raises in a hook, on the given ranks."""

    def __init__(self, ranks: tuple[int, ...]) -> None:
        super().__init__()
        self._ranks = ranks

    def on_train_batch_end(self, *args: Any) -> None:
        if self.trainer.global_step == 2 and self.global_rank in self._ranks:
            raise KeyError("a fault of the user's")


def saving_on_exception(context: RankContext, ranks: tuple[int, ...], directory: Path) -> None:
    saver = ModelCheckpoint(dirpath=directory, save_on_exception=True, filename="{step}")
    trainer = trainer_for(
        context, enable_checkpointing=True, callbacks=[saver], timeout=300, max_epochs=1
    )
    trainer.fit(Raises(ranks), batches())


def test_a_checkpoint_on_exception_is_saved_if_all_ranks_raise(
    pool: RankPool, tmp_path: Path
) -> None:
    outcomes = pool.run_expecting_errors(saving_on_exception, 2, (0, 1), tmp_path)
    assert [outcome.error_type for outcome in outcomes] == ["KeyError"] * 2
    assert torch.load(tmp_path / "step=2.ckpt", weights_only=False)["global_step"] == 2


def test_an_exception_on_one_rank_does_not_wait_for_a_checkpoint(
    pool: RankPool, tmp_path: Path
) -> None:
    # The strategy's timeout is longer than that of the job, so a long wait would fail the test.
    ours, others = pool.run_expecting_errors(saving_on_exception, 2, (0,), tmp_path, timeout=90)
    assert ours.error_type == "KeyError"
    assert "no checkpoint was saved after this" in ours.traceback
    assert others.error_type in (PeerLostError.__name__, "RankDied")
    assert "gave up: KeyError" in others.output
