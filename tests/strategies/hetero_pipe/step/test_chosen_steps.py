"""Steps that are cut in the place of the module that would be chosen."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from lightning.pytorch import Trainer, seed_everything
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_dlres import ConfigError, PeerLostError, UnsupportedStepError
from tests.support.rank_pool import RankContext, RankPool
from tests.support.training_cases import (
    Case,
    Classifier,
    batches,
    differences_in,
    fit,
    no_differences_in,
    trainer_for,
)

# The module is chosen, and layers are measured.
OPTIONS: dict[str, Any] = {"plan": None}


class TwoViews(Classifier):
    """Calls its only module on two views of a batch."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        first, second = self.net(batch[0]), self.net(0.9 * batch[0])
        return F.cross_entropy(first, batch[1]) + F.mse_loss(first, second)

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.log("test_loss", F.cross_entropy(self.net(batch[0]), batch[1]))


class KeepsOutputs(Classifier):
    """Uses what each member of a list returns, in two ways.

    Args:
        kind: "sum" of the members and their inputs, or "all" outputs in one tensor.
    """

    def __init__(self, kind: str) -> None:
        super().__init__()
        del self.net
        self.kind = kind
        self.blocks = nn.ModuleList(nn.Linear(16, 16) for _ in range(4))
        self.head = nn.Linear(16, 5)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, outputs = batch[0], []
        for block in self.blocks:
            x = x + block(x).tanh() if self.kind == "sum" else block(x)
            outputs.append(x)
        x = x if self.kind == "sum" else torch.stack(outputs).mean(0)
        return F.cross_entropy(self.head(x), batch[1])


class WithoutGradients(Classifier):
    """Calls the only sequence of modules within no_grad, and trains what follows."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(5, 5)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        with torch.no_grad():
            features = self.net(batch[0])
        return F.cross_entropy(self.head(features), batch[1])


CASES = {
    "two views": Case(TwoViews, options=OPTIONS),
    "sum": Case(lambda: KeepsOutputs("sum"), options=OPTIONS),
    "all": Case(lambda: KeepsOutputs("all"), options=OPTIONS),
    "no_grad": Case(WithoutGradients, options=OPTIONS),
}


def compare(context: RankContext) -> dict[str, list[str]]:
    return differences_in(context, CASES)


def test_a_step_is_cut_where_the_module_alone_cannot_be(pool: RankPool) -> None:
    assert pool.run(compare, 2) == no_differences_in(CASES)


def refusals(context: RankContext) -> list[str]:
    """Return the errors of runs in which the user has named the module, or the plan."""
    messages = []
    for options in ({"plan": None, "module": "net"}, {}):
        with pytest.raises((UnsupportedStepError, PeerLostError)) as error:
            fit(context, Case(TwoViews, options=options))
        messages.append(str(error.value))
    return messages


def test_a_module_that_the_user_names_is_refused_with_the_way_out(pool: RankPool) -> None:
    for messages in pool.run(refusals, 2):
        for message in messages:
            assert "got a second call." in message
            assert "cut the step with HeteroPipeStrategy(module='training_step')" in message


class DecidesBetween(KeepsOutputs):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x = batch[0]
        for block in self.blocks:
            x = x + block(x) if x.sum() > 0 else block(x)
        return F.cross_entropy(self.head(x), batch[1])


def fit_neither(context: RankContext) -> None:
    words = "training_step must not read the values .* Nor can one module be cut alone: The output"
    with pytest.raises((ConfigError, PeerLostError), match=words):
        fit(context, Case(lambda: DecidesBetween("sum"), options=OPTIONS))


def test_the_error_says_why_neither_can_be_cut(pool: RankPool) -> None:
    pool.run(fit_neither, 2)


def later_runs(context: RankContext | None) -> dict[str, float]:
    """Return what a test after training logs, and the first weight's sum after a second run."""
    seed_everything(3, verbose=False)
    model = TwoViews()
    trainer: Trainer = trainer_for(context, **OPTIONS)
    trainer.fit(model, batches())
    trainer.test(model, batches(), verbose=False)
    logged = {name: float(value) for name, value in trainer.callback_metrics.items()}
    trainer.fit_loop.max_epochs = 4
    trainer.fit(model, batches())
    return {**logged, "weights": float(model.state_dict()["net.0.weight"].sum())}


def compare_later_runs(context: RankContext) -> dict[str, tuple[float, float]]:
    expected = later_runs(None) if context.rank == 0 else {}
    actual = later_runs(context)
    return {name: (value, actual[name]) for name, value in expected.items()}


def test_later_runs_of_the_same_trainer_keep_the_cut(pool: RankPool) -> None:
    pairs, _ = pool.run(compare_later_runs, 2)
    assert pairs.keys() == {"test_loss", "weights"}
    for expected, actual in pairs.values():
        assert actual == pytest.approx(expected, rel=1e-5)
