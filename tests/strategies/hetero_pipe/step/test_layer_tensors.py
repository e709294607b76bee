"""Tensors that reach the loss past the module's output, by forward hooks or attributes of layers:
refused by the layer's name before the first step, under every plan."""

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
from tests.support.training_cases import Case, Classifier, differences_in, none_in, trainer_for


class Keeps(nn.Linear):
    """A layer with an auxiliary loss as an attribute."""

    aux: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        out = super().forward(x)
        self.aux = out.square().mean()
        return out


class Checkpointed(nn.Linear):
    """A layer whose output is made by a custom autograd function."""

    def forward(self, x: Tensor) -> Tensor:
        out = checkpoint(super().forward, x, use_reentrant=True)
        assert isinstance(out, Tensor)
        return out


class Hooked(Classifier):
    """Takes the output of a layer, and uses it in a way."""

    def __init__(self, use: str, layer: int) -> None:
        super().__init__()
        torch.manual_seed(1)
        kind = {"attribute": Keeps, "checkpoint": Checkpointed}.get(use, nn.Linear)
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
        if self.use in ("unused", "later") and not (self.use == "later" and self.global_step > 1):
            return loss
        if self.use == "list":
            return loss + torch.stack(self._taken["list"]).mean()
        if self.use == "logged":
            assert taken is not None
            self.log("norm", taken.data.norm())
            return loss
        # As code does that runs without hooks, too.
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


def fit_refused(context: RankContext) -> list[str]:
    """Return what each case is refused with; the first plan with all cases, others with a few."""
    messages = []
    for index, options in enumerate(PLANS[context.world_size]):
        for use, layer in REFUSED if index == 0 else REFUSED[:1] + REFUSED[-2:]:
            model, trainer = Hooked(use, layer), trainer_for(context, **options)
            with pytest.raises(UnsupportedStepError) as error:
                trainer.fit(model, _data())
            assert trainer.global_step == 0
            assert f"'net.{layer}'" in str(error.value), (use, layer, str(error.value))
            messages.append(str(error.value))
    return messages


def _data() -> Any:
    return Case(Classifier).data()


@pytest.mark.parametrize("ranks", sorted(PLANS))
def test_a_layers_tensor_in_the_loss_is_refused_before_the_first_step(
    pool: RankPool, ranks: int
) -> None:
    first, *others = pool.run(fit_refused, ranks)
    assert all(other == first for other in others)
    assert all("training_step uses a tensor that layer" in message for message in first)


# The output of the whole module is the step's own.
EXACT = {use: Case(lambda u=use: Hooked(u, 1), "gpipe") for use in ("unused", "container")}


def compare(context: RankContext) -> tuple[dict[str, list[str]], str]:
    exact = differences_in(context, EXACT)
    trainer = trainer_for(context, plan=None)
    with pytest.raises(DlresError) as error:
        trainer.fit(Hooked("later", 0), _data())
    return exact, str(error.value)


def test_what_is_taken_and_not_used_changes_nothing_and_is_never_used_stale(pool: RankPool) -> None:
    results = pool.run(compare, 2)
    assert [exact for exact, _ in results] == none_in(EXACT)
    assert "layer 'net.0' made" in results[1][1]
