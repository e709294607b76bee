"""Warnings on rank 0: layers whose result depends on the cut into micro-batches, and code that
reads the gradients of one stage."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback
from torch import Tensor, nn
from torch.nn.utils.parametrizations import spectral_norm

from lightning_dlres import PipelinePlan
from tests.support.rank_pool import RankContext, RankPool
from tests.support.training_cases import Case, Classifier, fit


class MeanOfBatch(nn.Module):
    """A layer whose output for a sample depends on all samples."""

    def forward(self, x: Tensor) -> Tensor:
        return x + x.std(0, keepdim=True)


class Averaged(nn.Module):
    """A layer that keeps an average in a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(12))

    def forward(self, x: Tensor) -> Tensor:
        self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(0)
        return x


class Codebook(nn.Module):
    """A layer that changes a frozen parameter in forward."""

    def __init__(self) -> None:
        super().__init__()
        self.codes = nn.Parameter(torch.zeros(12), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.codes.lerp_(x.mean(0), 0.1)
        return x


class Counter(nn.Module):
    """A layer that counts its calls in an attribute."""

    def __init__(self) -> None:
        super().__init__()
        self._calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self._calls += 1
        return x


class Cached(nn.Module):
    """A layer that makes a table once and draws random numbers, but treats each sample by
    itself."""

    table: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.table is None:
            self.table = torch.ones(12)
        return nn.functional.dropout(x * self.table, 0.5, self.training)


KINDS: dict[str, tuple[Any, str]] = {
    "batch norm": (lambda: nn.BatchNorm1d(12), "changes its buffer 'running_mean'"),
    "batch std": (MeanOfBatch, "its output for a sample depends on other samples"),
    "average": (Averaged, "changes its buffer 'mean'"),
    "codebook": (Codebook, "changes its parameter 'codes'"),
    "counter": (Counter, "sets its attribute '_calls'"),
    "spectral norm": (
        lambda: spectral_norm(nn.Linear(12, 12)),
        "changes its buffer 'parametrizations.weight.0._u'",
    ),
}


class Recurrent(nn.Module):
    """A layer with an LSTM, which holds its weights once more in attributes."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(4, 12, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.lstm(x.view(len(x), 3, 4))[0][:, -1]  # type: ignore[no-any-return]


HARMLESS = {
    "cached": Cached,
    "norm": lambda: nn.LayerNorm(12),
    "dropout": lambda: nn.Dropout(0.5),
    "recurrent": Recurrent,
}


class WithLayers(Classifier):
    """A classifier with the given layers between others."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.net = nn.Sequential(nn.Linear(16, 12), *layers, nn.Linear(12, 5))


class ComparesState(Callback):
    """A callback that compares the state before the first step with the state before the fit."""

    def __init__(self, model: nn.Module) -> None:
        self.before = {name: value.clone() for name, value in model.state_dict().items()}
        self.is_same = False

    def on_train_start(self, trainer: Any, module: Any) -> None:
        present = {n: value for n, value in module.state_dict().items() if not value.is_meta}
        self.is_same = all(torch.equal(value, self.before[n]) for n, value in present.items())
        self.is_same &= all(not m._calls for m in module.modules() if isinstance(m, Counter))


def fit_kinds(context: RankContext, split: tuple[int, ...]) -> list[bool]:
    """Fit a model with all kinds of layers, and one with harmless layers.

    Returns:
        For each model, whether its state before the first step is that of before the fit.
    """
    plan = PipelinePlan(replicas=(tuple(range(len(split))),), split=split)
    torch.manual_seed(1)
    same = []
    for layers in ([make() for make, _ in KINDS.values()], [make() for make in HARMLESS.values()]):
        layers += [nn.Identity() for _ in range(sum(split) - 2 - len(layers))]
        model = WithLayers(*layers)
        comparison = ComparesState(model)
        trainer = {"callbacks": [comparison], "max_epochs": 1}
        fit(context, Case(lambda m=model: m, trainer=trainer, options={"plan": plan}))
        same.append(comparison.is_same)
    return same


@pytest.mark.parametrize("split", [(1, 7), (6, 2), (3, 3, 2)])
def test_warning_names_layers_that_depend_on_micro_batches_under_every_plan(
    pool: RankPool, split: tuple[int, ...]
) -> None:
    outcomes = pool.run_expecting_errors(fit_kinds, len(split), split)
    assert [outcome.error_type for outcome in outcomes] == [None] * len(split)
    lines = [
        line for line in outcomes[0].output.splitlines() if "see one micro-batch at a time" in line
    ]
    assert len(lines) == 1
    for index, (_, how) in enumerate(KINDS.values()):
        assert f"net.{index + 1} (" in lines[0]
        assert how in lines[0]
    assert all(outcome.value == [True, True] for outcome in outcomes)


class ReadsGradients(Callback):
    """A callback that reads gradients in a hook, in the way that `way` names."""

    def __init__(self, way: str) -> None:
        self.way = way

    def on_before_optimizer_step(self, trainer: Any, module: Any, optimizer: Any) -> None:
        if self.way == "clips":
            torch.nn.utils.clip_grad_norm_(module.parameters(), 1.0)
        if self.way == "norms":
            squares = [p.grad.square().sum() for p in module.parameters() if p.grad is not None]
            module.log("norm", math.sqrt(float(torch.stack(squares).sum())))


def fit_that_reads_gradients(context: RankContext, way: str) -> None:
    case = Case(Classifier, trainer={"callbacks": [ReadsGradients(way)], "gradient_clip_val": 0.5})
    fit(context, case)


@pytest.mark.parametrize("way", ["clips", "norms", "nothing"])
def test_warning_names_the_place_that_reads_other_stages_gradients(
    pool: RankPool, way: str
) -> None:
    outcomes = pool.run_expecting_errors(fit_that_reads_gradients, 2, way)
    assert [outcome.error_type for outcome in outcomes] == [None, None]
    num_warnings = outcomes[0].output.count("reads gradients of parameters that other stages hold")
    assert num_warnings == (0 if way == "nothing" else 1)
    assert way == "nothing" or "test_batch_dependent_layers.py:" in outcomes[0].output
