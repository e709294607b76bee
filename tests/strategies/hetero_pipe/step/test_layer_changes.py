"""Changes of layers that other ranks would not see: around the call, or of the list of layers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from tests.support.rank_pool import RankContext, RankPool
from tests.support.training_cases import (
    Case,
    Classifier,
    differences_in,
    expect_refusal,
    no_differences_in,
)

OPTIONS: dict[str, Any] = {"plan": None}


class ChangesLayers(Classifier):
    """Changes the layers for a call and puts them back, or at the start of the second epoch.

    Args:
        kind: What changes.
    """

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.net = nn.Sequential(
            nn.Linear(16, 12), nn.Dropout(0.5), nn.Linear(12, 12), nn.Linear(12, 5)
        )

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        assert isinstance(self.net, nn.Sequential)
        if self.kind == "mode":
            self.net.eval()
        elif self.kind == "hook":
            handle = self.net[2].register_forward_hook(lambda module, args, output: 2 * output)
        elif self.kind == "forward":
            self.net[2].forward = torch.relu  # type: ignore[method-assign]
        try:
            output = self.net(batch[0])
        finally:
            if self.kind == "mode":
                self.net.train()
            elif self.kind == "hook":
                handle.remove()
            elif self.kind == "forward":
                del self.net[2].forward
        return F.cross_entropy(output, batch[1])

    def on_train_epoch_start(self) -> None:
        assert isinstance(self.net, nn.Sequential)
        if self.current_epoch == 1 and self.kind == "append":
            self.net.append(nn.Tanh())
        if self.current_epoch == 1 and self.kind == "replace":
            self.net[2] = nn.Linear(12, 12)


REFUSED = {
    "mode": "must not change the mode",
    "hook": "must not change the hooks of the layer 'net.2'",
    "forward": "must not change the forward of a layer",
    "append": "The layers of 'net' must stay those of the start of the run",
    "replace": "The layers of 'net' must stay those of the start of the run",
}


def fit_refused(context: RankContext, kind: str) -> None:
    expect_refusal(context, Case(lambda: ChangesLayers(kind), options=OPTIONS), REFUSED[kind])


@pytest.mark.parametrize("kind", REFUSED)
def test_changes_that_other_ranks_do_not_see_are_refused(pool: RankPool, kind: str) -> None:
    pool.run(fit_refused, 2, kind)


class HasHooks(Classifier):
    """Its layers have hooks, and get more of them, and another mode, at the start of each epoch."""

    def __init__(self) -> None:
        super().__init__()
        assert isinstance(self.net, nn.Sequential)
        self.net[2].register_forward_hook(lambda module, args, output: 2 * output)

    def on_train_epoch_start(self) -> None:
        assert isinstance(self.net, nn.Sequential)
        self.net[0].register_forward_hook(lambda module, args, output: 0.5 * output)
        self.net[1].eval()


RIGHT = {"hooks": Case(HasHooks, options=OPTIONS)}


def compare(context: RankContext) -> dict[str, list[str]]:
    return differences_in(context, RIGHT)


def test_changes_in_hooks_of_the_trainer_count(pool: RankPool) -> None:
    assert pool.run(compare, 2) == no_differences_in(RIGHT)
