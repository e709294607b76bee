"""Counters, running values and lists that a training step keeps on the module equal those of plain
training, on every rank."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer, seed_everything
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

from lightning_dlres import HeteroPipeStrategy, UnsupportedStepError
from lightning_dlres.strategies.hetero_pipe.replay.attributes import UserState
from tests.support.models import QUIET, Samples
from tests.support.rank_pool import RankContext, RankPool
from tests.support.training_cases import QUICK


class CountsSteps(LightningModule):
    """A model that counts its steps before and after the module's call. With `keeps_outputs` it
    also keeps the losses in a list."""

    def __init__(self, keeps_outputs: bool) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.net = nn.Sequential(nn.Linear(16, 8), nn.Tanh(), nn.Linear(8, 5))
        self.keeps_outputs = keeps_outputs
        self.before, self.after, self.smooth = 0, 0.0, torch.zeros(())
        self.outputs: list[Tensor] = []
        self.epochs: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.before += 1
        loss = F.cross_entropy(self.net(batch[0] / self.before), batch[1])
        self.after += 0.5
        self.smooth = 0.9 * self.smooth + 0.1
        if self.keeps_outputs:
            self.outputs.append(loss.detach())
        return loss * self.after

    def on_train_epoch_end(self) -> None:
        if self.keeps_outputs:
            self.epochs.append(float(torch.stack(self.outputs).mean()))
            self.outputs.clear()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def fit(context: RankContext | None, keeps_outputs: bool, schedule: str = "gpipe") -> Any:
    seed_everything(3, verbose=False)
    model = CountsSteps(keeps_outputs)
    options: dict[str, Any] = {"strategy": "auto", "devices": 1}
    if context is not None:
        strategy = HeteroPipeStrategy(microbatches=3, schedule=schedule, profile=QUICK)  # type: ignore[arg-type]
        options = {
            "strategy": strategy,
            "devices": context.world_size,
            "plugins": [context.environment],
        }
    trainer = Trainer(
        **options,
        accelerator="cpu",
        max_epochs=2,
        **QUIET,
    )
    trainer.fit(model, DataLoader(Samples(False, 32), batch_size=8))
    return model.before, model.after, float(model.smooth), model.epochs


def fit_plainly(context: RankContext, keeps_outputs: bool) -> Any:
    return fit(None, keeps_outputs)


@pytest.mark.parametrize(
    ("keeps_outputs", "schedule"),
    [(True, "gpipe"), (False, "gpipe"), (False, "1f1b"), (True, "auto")],
)
@pytest.mark.parametrize("ranks", [1, 3])
def test_state_equals_plain_training_on_every_rank(
    pool: RankPool, ranks: int, keeps_outputs: bool, schedule: str
) -> None:
    ((before, after, smooth, epochs),) = pool.run(fit_plainly, 1, keeps_outputs)
    for outcome in pool.run(fit, ranks, keeps_outputs, schedule):
        assert outcome[:2] == (before, after)
        assert outcome[2] == pytest.approx(smooth)
        assert outcome[3] == pytest.approx(epochs, rel=1e-5)


def test_1f1b_refuses_a_growing_list(pool: RankPool) -> None:
    for outcome in pool.run_expecting_errors(fit, 2, True, "1f1b", keep=True):
        assert outcome.error_type == UnsupportedStepError.__name__
        assert "self.outputs" in outcome.error_message


def state_of(module: LightningModule) -> UserState:
    return UserState(lambda: [("", module)])


def test_lists_stay_the_same_objects() -> None:
    module = CountsSteps(True)
    state, alias = state_of(module), module.outputs
    isolated = state.isolate()
    module.outputs.append(torch.ones(()))
    changes = isolated.diff()
    assert list(changes) == ["outputs"]
    isolated.restore()
    assert alias == []
    state.apply(changes, isolated.unsendable)
    assert alias is module.outputs
    assert len(alias) == 1


def test_attributes_that_a_run_deletes_or_adds_are_restored() -> None:
    module: Any = CountsSteps(True)
    module.best, module.last = None, 3
    for _ in range(2):
        isolated = state_of(module).isolate()
        del module.best, module.last
        module.added = 1
        isolated.restore()
        assert (module.best, module.last) == (None, 3)
        assert not hasattr(module, "added")
