"""Tensors of layers that reach the loss other than as the module's output.

Forward hooks take them, or layers keep them as attributes. They are refused before the first step,
under every plan, with an error that names the layer.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from lightning_dlres import PipelinePlan, UnsupportedStepError
from lightning_dlres.core.errors import DlresError
from tests.support.rank_pool import RankContext, RankPool
from tests.support.training_cases import (
    Case,
    Classifier,
    differences_in,
    no_differences_in,
    trainer_for,
)


class KeepsAuxiliaryLoss(nn.Linear):
    """A layer that keeps an auxiliary loss as an attribute."""

    aux: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        out = super().forward(x)
        self.aux = out.square().mean()
        return out


class Checkpointed(nn.Linear):
    """A layer whose output comes from a custom autograd function."""

    def forward(self, x: Tensor) -> Tensor:
        out = checkpoint(super().forward, x, use_reentrant=True)
        assert isinstance(out, Tensor)
        return out


class UsesLayerOutput(Classifier):
    """Takes a layer's output in a forward hook, or its auxiliary loss, and uses it in the step.

    Args:
        use: "hook", "detached", "list" and "checkpoint" add the output to the loss; "attribute"
            adds the auxiliary loss; "container" adds the output of the whole network; "logged" only
            logs a norm; "unused" takes the output only; "later" adds it from the third step on.
        layer: Index of the layer.
    """

    def __init__(self, use: str, layer: int) -> None:
        super().__init__()
        torch.manual_seed(1)
        kind = {"attribute": KeepsAuxiliaryLoss, "checkpoint": Checkpointed}.get(use, nn.Linear)
        self.net = nn.Sequential(*[kind(16, 16) for _ in range(4)], nn.Linear(16, 5))
        self.use, self.layer = use, layer
        self._taken: dict[str, Any] = {"list": []}
        if use == "container":
            self.net.register_forward_hook(self._take)
        elif use != "attribute":
            self.net[layer].register_forward_hook(self._take)

    def _take(self, module: nn.Module, inputs: Any, output: Tensor) -> None:
        self._taken["last"] = output.detach() if self.use == "detached" else output
        self._taken["list"].append(output)
        if self.use == "number":
            self.observed_norm = float(output.detach().norm())

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self._taken["list"].clear()
        loss = F.cross_entropy(self.net(batch[0]), batch[1])
        taken = self._taken.get("last")
        if self.use == "attribute":
            taken = self.net[self.layer].aux
        if self.use == "unused" or (self.use == "later" and self.global_step <= 1):
            return loss
        if self.use == "list":
            return loss + torch.stack(self._taken["list"]).mean()
        if self.use == "logged":
            assert taken is not None
            self.log("norm", taken.data.norm())
            return loss
        # Code that also runs without hooks looks like this.
        return loss if taken is None else loss + 0.1 * taken.square().mean()


REFUSED = [
    ("hook", 0),
    ("hook", 3),
    ("detached", 1),
    ("list", 2),
    ("logged", 0),
    ("checkpoint", 1),
    ("attribute", 0),
    ("attribute", 3),
]
PLANS: dict[int, list[dict[str, Any]]] = {
    2: [
        {"schedule": "gpipe"},
        {"schedule": "1f1b", "plan": PipelinePlan(replicas=((0, 1),), split=(4, 1))},
        {"plan": PipelinePlan(replicas=((0,), (1,)), split=(5,))},
        {"plan": None},
    ],
    3: [{"plan": PipelinePlan(replicas=((0, 1, 2),), split=(1, 2, 2))}],
}


def fit_refused_cases(context: RankContext) -> list[str]:
    """Return the error of each case: all cases with the first plan, a few with the others."""
    messages = []
    for index, options in enumerate(PLANS[context.world_size]):
        for use, layer in REFUSED if index == 0 else REFUSED[:1] + REFUSED[-2:]:
            model, trainer = UsesLayerOutput(use, layer), trainer_for(context, **options)
            with pytest.raises(UnsupportedStepError) as error:
                trainer.fit(model, _data())
            assert trainer.global_step == 0
            assert f"'net.{layer}'" in str(error.value), (use, layer, str(error.value))
            messages.append(str(error.value))
    return messages


def _data() -> Any:
    return Case(Classifier).data()


@pytest.mark.parametrize("ranks", sorted(PLANS))
def test_tensor_of_a_layer_in_the_loss_is_refused_before_the_first_step(
    pool: RankPool, ranks: int
) -> None:
    first, *others = pool.run(fit_refused_cases, ranks)
    assert all(other == first for other in others)
    assert all("training_step uses a tensor that layer" in message for message in first)


# A hook on the whole module gets the module's output, which the step may use.
EXACT = {use: Case(lambda u=use: UsesLayerOutput(u, 1), "gpipe") for use in ("unused", "container")}


def run_unused_and_later_use(context: RankContext) -> tuple[dict[str, list[str]], str]:
    exact = differences_in(context, EXACT)
    trainer = trainer_for(context, plan=None)
    with pytest.raises(DlresError) as error:
        trainer.fit(UsesLayerOutput("later", 0), _data())
    return exact, str(error.value)


def test_unused_layer_tensor_changes_nothing_and_a_later_use_is_refused(pool: RankPool) -> None:
    results = pool.run(run_unused_and_later_use, 2)
    assert [exact for exact, _ in results] == no_differences_in(EXACT)
    assert "layer 'net.0' made" in results[1][1]
