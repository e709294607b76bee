"""Calls of the pipelined module where autograd records nothing: its layers must not be trained."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from tests.support.rank_pool import RankContext, RankPool
from tests.support.training_cases import (
    Case,
    Classifier,
    differences_in,
    expect_refusal,
    no_differences_in,
)

OPTIONS: dict[str, Any] = {"plan": None}


class LinearProbe(Classifier):
    """Trains a head on the features of a network that it calls without gradients.

    Args:
        from_epoch: Epoch from which on it records gradients there.
    """

    def __init__(self, from_epoch: int = 99) -> None:
        super().__init__()
        self.head = nn.Linear(5, 5)
        self.from_epoch = from_epoch

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        with torch.set_grad_enabled(self.current_epoch >= self.from_epoch):
            features = self.net(batch[0])
        return F.cross_entropy(self.head(features), batch[1])


class Blocks(Classifier):
    """Calls the members of a list in a loop.

    Args:
        kind: "frozen" calls the first two without gradients, "reentrant" and "non-reentrant" call
            all within an activation checkpoint.
    """

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.net = nn.ModuleList(nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(4))
        self.kind = kind

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x = batch[0].clone().requires_grad_()
        assert isinstance(self.net, nn.ModuleList)
        for index, block in enumerate(self.net):
            x = self._called(index, block, x)
        return F.cross_entropy(x[:, :5], batch[1])

    def _called(self, index: int, block: nn.Module, x: Tensor) -> Any:
        if self.kind == "frozen":
            with torch.no_grad() if index < 2 else nullcontext():
                return block(x)
        return checkpoint(block, x, use_reentrant=self.kind == "reentrant")


REFUSED = {
    "probe": (
        lambda: LinearProbe(),
        {"module": "net"},
        "call 'net' where gradients are recorded.*no_grad",
    ),
    "epoch": (lambda: LinearProbe(1), {"module": "net"}, "call 'net' where gradients are recorded"),
    "frozen": (lambda: Blocks("frozen"), {"module": "net"}, "got 'net.2' with and 'net.0' without"),
    "reentrant": (lambda: Blocks("reentrant"), {}, "Set use_reentrant=False"),
}


def fit_refused(context: RankContext, name: str) -> None:
    make, options, words = REFUSED[name]
    expect_refusal(context, Case(make, options={**OPTIONS, **options}), words)


@pytest.mark.parametrize("name", REFUSED)
def test_layers_called_without_gradients_are_refused(pool: RankPool, name: str) -> None:
    pool.run(fit_refused, 2, name)


STEP = {**OPTIONS, "module": "training_step"}
RIGHT = {
    "probe": Case(LinearProbe, options=STEP),
    "epoch": Case(lambda: LinearProbe(1), options=STEP, trainer={"max_epochs": 2}),
    "frozen": Case(lambda: Blocks("frozen"), options=STEP),
    "non-reentrant": Case(lambda: Blocks("non-reentrant"), options=OPTIONS),
}


def compare(context: RankContext) -> dict[str, list[str]]:
    return differences_in(context, RIGHT)


def test_a_cut_step_may_call_them_so(pool: RankPool) -> None:
    assert pool.run(compare, 2) == no_differences_in(RIGHT)
