"""Counters, running values and lists that a training step keeps on the module equal those of plain
training, on every rank."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule, seed_everything
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

from lightning_dlres import UnsupportedStepError
from lightning_dlres.strategies.hetero_pipe.replay.user_state.attributes import UserState
from tests.support.models import Samples
from tests.support.rank_pool import RankContext, RankPool
from tests.support.training_cases import trainer_for


class CountsSteps(LightningModule):
    """A model that counts its steps before and after the module's call. With `keeps_outputs` it
    also keeps the losses in a list."""

    def __init__(self, keeps_outputs: bool) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.net = nn.Sequential(nn.Linear(16, 8), nn.Tanh(), nn.Linear(8, 5))
        self.keeps_outputs = keeps_outputs
        self.before, self.after, self.smooth = 0, 0.0, torch.zeros(())
        # Autograd notices no write to the first through `.data`, nor to the second through NumPy.
        self.hidden, self.shared_with_numpy = torch.zeros(()), torch.zeros(1)
        self.outputs: list[Tensor] = []
        self.epochs: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.before += 1
        loss = F.cross_entropy(self.net(batch[0] / self.before), batch[1])
        self.after += 0.5
        self.smooth = 0.9 * self.smooth + 0.1
        self.hidden.data.add_(1.0)
        self.shared_with_numpy.numpy()[:] += 1.0
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
    trainer = trainer_for(context, schedule=schedule, plan=None, stages="auto")
    trainer.fit(model, DataLoader(Samples(False, 32), batch_size=8))
    written = float(model.hidden), float(model.shared_with_numpy)
    return (model.before, model.after, *written), float(model.smooth), model.epochs


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
    ((counts, smooth, epochs),) = pool.run(fit_plainly, 1, keeps_outputs)
    for outcome in pool.run(fit, ranks, keeps_outputs, schedule):
        assert outcome[0] == counts
        assert outcome[1] == pytest.approx(smooth)
        assert outcome[2] == pytest.approx(epochs, rel=1e-5)


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


def write(tensor: Tensor, way: str) -> None:
    """Add one to a tensor."""
    if way == "add_":
        tensor.add_(1.0)
    elif way == "data":
        tensor.data.add_(1.0)
    else:
        tensor.numpy()[:] += 1.0


@pytest.mark.parametrize("way", ["add_", "data", "numpy"])
def test_each_run_of_a_step_starts_from_the_values_before_the_step(way: str) -> None:
    module: Any = CountsSteps(True)
    module.sums = torch.zeros(2)
    state, original, last = state_of(module), module.sums, None
    # The second run writes nothing, so that its copies may serve the third.
    for writes in (True, False, True):
        last = isolated = state.isolate(last=last)
        assert module.sums is not original
        assert module.sums.tolist() == [0.0, 0.0]
        if writes:
            write(module.sums, way)
        assert bool(isolated.diff()) == writes
        isolated.restore()
        assert module.sums is original
        assert original.tolist() == [0.0, 0.0]


def test_a_later_run_sees_what_hooks_of_layers_did_since_the_run_before() -> None:
    module: Any = CountsSteps(True)
    module.seen, module.kept = torch.zeros(1), [torch.zeros(1)]
    state, kept = state_of(module), module.kept
    first = state.isolate()
    first.diff()
    first.restore()
    # The objects are the same ones, so that the first run's reading still serves.
    module.seen += 1
    second = state.isolate(last=first)
    assert module.seen.tolist() == [1.0]
    assert not second.diff()
    second.restore()
    kept.append(torch.ones(1))
    third = state.isolate(last=second)
    kept[1] += 1
    changes = third.diff()
    third.restore()
    assert kept[1].tolist() == [1.0]
    assert list(changes) == ["kept"]


def test_gradients_of_a_run_do_not_reach_the_next() -> None:
    module: Any = CountsSteps(True)
    module.scale, last = torch.ones(1, requires_grad=True), None
    for _ in range(2):
        last = isolated = state_of(module).isolate(last=last)
        assert module.scale.grad is None
        module.scale.sum().backward()
        isolated.diff()
        isolated.restore()
    assert module.scale.grad is None
