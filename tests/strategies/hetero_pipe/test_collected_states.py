"""Modules whose forward hooks collect the states of their layers, as in models of transformers."""

from __future__ import annotations

from collections.abc import Sequence
from contextvars import ContextVar
from functools import partial
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_dlres.core.errors import UnsupportedStepError
from lightning_dlres.pipeline.stage.module_attributes import HAS_COLLECTORS
from tests.support.rank_pool import RankContext, RankPool
from tests.support.training_cases import (
    Case,
    Classifier,
    batches,
    differences_in,
    no_differences_in,
    trainer_for,
)

# Module in which transformers defines its hooks.
LIBRARY = "transformers.utils.output_capturing"
# States of the current call; None outside of one, or in a call that collects none.
COLLECTED: ContextVar[list[Tensor] | None] = ContextVar("states", default=None)


def collect(layer: nn.Module, args: Any, output: Tensor) -> None:
    states = COLLECTED.get()
    if states is not None:
        states.extend([output] if states else [args[0], output])


class Encoder(nn.Module):
    """Encoder that adds its hooks in the first call, as models of transformers do.

    Args:
        is_library: True for hooks as those of transformers; False for those of a user.
    """

    def __init__(self, is_library: bool = True) -> None:
        super().__init__()
        self.stem = nn.Linear(16, 12)
        self.layers = nn.ModuleList([nn.Sequential(nn.Linear(12, 12), nn.Tanh()) for _ in range(4)])
        self.head = nn.Linear(12, 5)
        self.is_library = is_library
        if not is_library:
            self.add_hooks()

    def add_hooks(self) -> None:
        for layer in self.layers:
            hook = partial(collect)
            if self.is_library:
                hook.__module__ = LIBRARY
            layer.register_forward_hook(hook)

    def forward(self, x: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
        if self.is_library and not hasattr(self, HAS_COLLECTORS):
            self.add_hooks()
            setattr(self, HAS_COLLECTORS, True)
        states: list[Tensor] = []
        token = COLLECTED.set(states)
        try:
            hidden = self.stem(x)
            for layer in self.layers:
                hidden = layer(hidden)
            output: Tensor = self.head(hidden)
        finally:
            COLLECTED.reset(token)
        return output, tuple(states)


class Collecting(Classifier):
    """Classifier whose loss uses some of the states.

    Args:
        used: Positions of the states.
        is_library: As in `Encoder`.
    """

    def __init__(self, used: Sequence[int], is_library: bool = True) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.net, self.used = Encoder(is_library), used

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        output, states = self.net(batch[0])
        loss = F.cross_entropy(output, batch[1])
        self.log("cross entropy", loss)
        for position in self.used:
            loss = loss + states[position].square().mean()
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        _, states = self.net(batch[0])
        self.log("states", torch.stack([state.square().mean() for state in states]).sum())

    def val_dataloader(self) -> Any:
        return batches()


def case(used: Sequence[int], schedule: str = "auto", **options: Any) -> Case:
    return Case(partial(Collecting, used), schedule, options={"plan": None, **options})


@pytest.mark.parametrize("ranks", [2, 3])
def test_states_that_hooks_of_a_library_collect_may_be_used(pool: RankPool, ranks: int) -> None:
    cases = {
        "gpipe": case((0, 2, -1), "gpipe", module="net", stages=ranks),
        "1f1b": case((1, 3), "1f1b", module="net", stages=ranks),
        "chosen": case((0, 2, -1), stages=ranks),
        "unused": case((), module="net", stages=ranks),
    }
    assert pool.run(differences_in, ranks, cases) == no_differences_in(cases, ranks)


class WithoutValidation(Collecting):
    def __init__(self) -> None:
        super().__init__(())

    validation_step = LightningModule.validation_step
    val_dataloader = LightningModule.val_dataloader


# The layers run apart from the code around them, which collects no states. The loss uses none.
LIST = {"list": Case(WithoutValidation, options={"plan": None, "module": "net.layers"})}


def test_a_list_of_layers_with_such_hooks_trains(pool: RankPool) -> None:
    assert pool.run(differences_in, 2, LIST) == no_differences_in(LIST)


def fit_with_hooks_of_a_user(context: RankContext) -> str:
    with pytest.raises(UnsupportedStepError) as error:
        trainer_for(context, plan=None).fit(Collecting((2,), is_library=False), batches())
    return str(error.value)


def test_hooks_of_a_user_are_called_with_their_layer_only(pool: RankPool) -> None:
    for message in pool.run(fit_with_hooks_of_a_user, 2):
        assert message.startswith("training_step uses a tensor that layer 'net.layers.")
