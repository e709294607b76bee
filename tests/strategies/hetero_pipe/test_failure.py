"""Death of a rank: the others end within the deadline, with one clear message first and no
orphaned processes."""

from __future__ import annotations

import os
import re
import signal
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer, seed_everything
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

from lightning_dlres import HeteroPipeStrategy, PeerLostError, PipelinePlan
from tests.support.killing_layer import KillingLayer
from tests.support.models import QUIET, Samples, mlp
from tests.support.rank_pool import RankContext, RankPool


class WithKillingLayers(LightningModule):
    """Network in which every stage has a layer that may kill its process."""

    def __init__(self, victim: int) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.net = nn.Sequential(
            *(layer for module in mlp(0.0) for layer in (module, KillingLayer(victim, 6)))
        )

    def on_train_start(self) -> None:
        for module in self.modules():
            if isinstance(module, KillingLayer):
                module.rank = self.global_rank

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return F.cross_entropy(self.net(batch[0]), batch[1])

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def fit_until_death(context: RankContext, victim: int) -> None:
    seed_everything(3, verbose=False)
    plan = PipelinePlan(replicas=((0, 1, 2),), split=(6, 6, 4))
    trainer = Trainer(
        strategy=HeteroPipeStrategy(plan=plan, microbatches=4, timeout=30),
        accelerator="cpu",
        devices=3,
        plugins=[context.environment],
        max_epochs=1,
        **QUIET,
    )
    trainer.fit(WithKillingLayers(victim), DataLoader(Samples(False, 64), batch_size=8))


@pytest.mark.parametrize("victim", [0, 1, pytest.param(2, marks=pytest.mark.exhaustive)])
def test_a_stage_killed_in_mid_step_ends_the_others(pool: RankPool, victim: int) -> None:
    outcomes = pool.run_expecting_errors(fit_until_death, 3, victim, timeout=60)
    for rank, outcome in enumerate(outcomes):
        if rank == victim:
            assert outcome.error_type == "RankDied"
        else:
            assert outcome.error_type == PeerLostError.__name__
            assert f"stage {victim} (rank {victim})" in outcome.error_message


SCRIPT = """
import sys

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.demos.boring_classes import BoringModel

import lightning_dlres


class Model(BoringModel):
    def __init__(self):
        super().__init__()
        layers = [torch.nn.Linear(32, 32) for _ in range(5)]
        self.layer = torch.nn.Sequential(*layers, torch.nn.Linear(32, 2))

    def on_train_batch_end(self, *args):
        # In one write, because ranks share the file.
        sys.stdout.write(f"rank {self.global_rank} step {self.trainer.global_step}\\n")


if __name__ == "__main__":
    quick = lightning_dlres.ProfileConfig(repeats=1, seconds=0.0)
    options = dict(device_map=[[0, 1]], profile=quick, timeout=60)
    strategy = lightning_dlres.HeteroPipeStrategy(**options)
    trainer = Trainer(strategy=strategy, accelerator="cpu", devices=2, max_epochs=-1, logger=False,
                      enable_checkpointing=False, enable_progress_bar=False)
    trainer.fit(Model())
"""


@pytest.mark.parametrize("victim", [0, pytest.param(1, marks=pytest.mark.exhaustive)])
def test_launched_ranks_leave_no_orphans(start_script: Any, victim: int) -> None:
    script = start_script(SCRIPT)
    for rank in range(2):
        script.wait_for_line(rf"rank {rank} step 3\b")
    children = sorted(script.children())
    assert children
    os.kill(script.pid if victim == 0 else children[-1], signal.SIGKILL)
    script.wait_for_no_children(timeout=40)
    assert script.wait(timeout=40) != 0
    output = script.output()
    # Lightning's launcher polls its children every few seconds, and may notice the death first.
    ours, launchers = rf"dlres: .*stage {victim} \(rank {victim}\)", rf"\[rank: {victim}\] Child"
    message = re.search(f"{ours}|{launchers}" if victim else ours, output)
    # Or a message of the step itself ended rank 0, before its watch had noticed the death.
    in_step = re.search(rf"PeerLostError: .* lost stage {victim} \(rank {victim}\)", output)
    assert message or in_step, output
    if message:
        assert "Traceback" not in output[: message.start()]
