"""Kinds of pipelined modules: other than plain chains, made on the meta device, and called outside
of steps."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from lightning.pytorch import seed_everything
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_dlres import ConfigError
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


class Residual(nn.Sequential):
    """Sequential with a forward of its own, which is no plain chain of its children."""

    def forward(self, x: Tensor) -> Tensor:
        for layer in self:
            out = layer(x)
            x = x + out if out.shape == x.shape else out
        return x


class Named(nn.Sequential):
    """Subclass that is still a plain chain."""


class SelfCalling(nn.ModuleList):
    """Module list with a forward that applies its members."""

    def forward(self, x: Tensor) -> Tensor:
        for layer in self:
            x = layer(x)
        return x


def layers() -> list[nn.Module]:
    return [nn.Linear(16, 12), nn.Tanh(), nn.Linear(12, 12), nn.Tanh(), nn.Linear(12, 5)]


class Kind(Classifier):
    """Classifier over a given container of layers."""

    def __init__(self, kind: type[nn.Module]) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.net = kind(layers()) if issubclass(kind, nn.ModuleList) else kind(*layers())


class WithOwnForward(Classifier):
    """Classifier over an nn.Sequential whose instance has another forward."""

    def __init__(self) -> None:
        super().__init__()
        chain = self.net
        chain.forward = lambda x: 2.0 * nn.Sequential(*chain)(x)


class Twice(nn.Module):
    """Module that calls its only submodule twice."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(self.layer(x).tanh())


class WithTwice(Classifier):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.net = Twice()


class Recurrent(nn.Module):
    """GRU over the features of a sample; its second matrix has weight normalisation."""

    def __init__(self) -> None:
        super().__init__()
        self.gru = nn.GRU(4, 4, batch_first=True)
        nn.utils.parametrizations.weight_norm(self.gru, "weight_hh_l0")

    def forward(self, x: Tensor) -> Tensor:
        return self.gru(x.unflatten(1, (-1, 4)))[0].flatten(1)


class WithRecurrent(Classifier):
    """Classifier with recurrent layers on both stages."""

    def __init__(self) -> None:
        super().__init__()
        lstm = nn.Sequential(nn.Unflatten(1, (4, 4)), nn.LSTM(4, 5, batch_first=True), LastState())
        self.net = nn.Sequential(nn.Linear(16, 16), Recurrent(), Recurrent(), nn.Tanh(), lstm)


class WithOldNorms(Classifier):
    """Classifier with weights that hooks compute anew in each forward, as no parameters."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        norm = nn.utils.weight_norm
        self.net = nn.Sequential(
            norm(nn.Linear(16, 12)),  # type: ignore[no-untyped-call]
            nn.Tanh(),
            nn.Linear(12, 12),
            nn.Tanh(),
            norm(nn.Linear(12, 5)),  # type: ignore[no-untyped-call]
        )


class LastState(nn.Module):
    """Layer that takes the last state from the output of an LSTM."""

    def forward(self, result: tuple[Tensor, Any]) -> Tensor:
        return result[0][:, -1]


class Complex(nn.Module):
    """Layer that takes real or complex numbers, and returns complex ones."""

    def __init__(self, features: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(0.2 * torch.randn(features, features, dtype=torch.cfloat))

    def forward(self, x: Tensor) -> Tensor:
        return x.to(torch.cfloat) @ self.weight


class WithComplex(Classifier):
    """Classifier with complex parameters on both stages, and complex activations between them."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.Linear(16, 5), Complex(5), Complex(5), nn.Identity(), Complex(5)
        )

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = F.cross_entropy(self.net(batch[0]).abs(), batch[1])
        self.log("loss", loss, on_step=True, on_epoch=True)
        return loss


KINDS = {
    "complex": Case(WithComplex, trainer={"gradient_clip_val": 0.05}),
    "recurrent": Case(WithRecurrent),
    "old weight norms": Case(WithOldNorms, options={"plan": None}),
    "subclass": Case(lambda: Kind(Named)),
    "list": Case(lambda: Kind(SelfCalling)),
}
OWN_FORWARD = {
    "residual": lambda: Kind(Residual),
    "own forward": WithOwnForward,
}
# Modules with a forward of their own are cut where they call their submodules.
CUT = {name: Case(make, options={"plan": None}) for name, make in OWN_FORWARD.items()}
# A module that cannot be cut can be trained by several replicas of one stage.
WHOLE: dict[str, Case] = {
    name: Case(make, options={"stages": 1, "plan": None})
    for name, make in {**OWN_FORWARD, "twice": lambda: WithTwice()}.items()
}


def compare(context: RankContext) -> tuple[dict[str, list[str]], dict[str, list[str]], str]:
    kinds, whole = differences_in(context, {**KINDS, **CUT}), differences_in(context, WHOLE)
    with pytest.raises(ConfigError) as error:
        fit(context, Case(WithTwice, options={"plan": None}))
    return kinds, whole, str(error.value)


def test_chains_and_own_forwards_are_cut_but_not_a_module_that_calls_one_layer_twice(
    pool: RankPool,
) -> None:
    for kinds, whole, message in pool.run(compare, 2):
        assert kinds == no_differences_in({**KINDS, **CUT})[0]
        assert whole == no_differences_in(WHOLE)[0]
        assert "(Twice) must have at least one layer for each of the 2 stages, got 1" in message


class CallsOutside(Classifier):
    """Model that calls the module in hooks between steps and at the end of an epoch, also with a
    batch of another size. It has an example input for summaries."""

    def __init__(self) -> None:
        super().__init__()
        self.example_input_array = torch.ones(3, 16)

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x).softmax(-1)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.observed.append(float(self(batch[0])[:, 0].sum()))

    def on_train_epoch_end(self) -> None:
        with torch.no_grad():
            self.observed.append(float(self(torch.ones(1, 16))[0, 0]))


CALLS = {
    "calls, gpipe": Case(CallsOutside, "gpipe", trainer={"enable_model_summary": True}),
    "calls": Case(CallsOutside, expected_schedule="1f1b"),
}


def compare_calls(context: RankContext) -> dict[str, list[str]]:
    return differences_in(context, CALLS)


def test_calls_outside_of_steps_go_through_the_pipeline(pool: RankPool) -> None:
    assert pool.run(compare_calls, 2) == no_differences_in(CALLS)


class Ascending(nn.Linear):
    """Linear layer whose initial weights ascend, so that they need no random numbers."""

    def reset_parameters(self) -> None:
        with torch.no_grad():
            self.weight.copy_(torch.linspace(-0.5, 0.5, self.weight.numel()).view_as(self.weight))
            self.bias.zero_()


class OnMeta(Classifier):
    """Model that makes its network in `configure_model`, on the meta device for a pipeline."""

    def __init__(self, meta: bool) -> None:
        super().__init__()
        del self.net
        self.meta = meta

    def configure_model(self) -> None:
        if not hasattr(self, "net"):
            with torch.device("meta" if self.meta else "cpu"):
                self.net = nn.Sequential(
                    Ascending(16, 12), nn.Tanh(), Ascending(12, 12), nn.Tanh(), Ascending(12, 5)
                )

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", F.cross_entropy(self.net(batch[0]), batch[1]))

    test_step = validation_step


def evaluate_and_fit(context: RankContext | None, same_trainer: bool) -> list[float]:
    """Validate, fit, validate and test one model; return the losses."""
    seed_everything(3, verbose=False)
    model = OnMeta(meta=context is not None)
    trainers = [trainer_for(context) for _ in range(1 if same_trainer else 4)]
    first, second, third, fourth = trainers * (4 if same_trainer else 1)
    losses = [first.validate(model, batches(), verbose=False)[0]["val_loss"]]
    second.fit(model, batches())
    losses.append(float(second.callback_metrics["loss_epoch"]))
    losses.append(third.validate(model, batches(), verbose=False)[0]["val_loss"])
    losses.append(fourth.test(model, batches(), verbose=False)[0]["val_loss"])
    return losses


def evaluate_and_fit_everywhere(context: RankContext) -> list[list[float]]:
    places = ((None, True), (context, True), (context, False))
    return [evaluate_and_fit(place, same) for place, same in places]


def test_a_model_made_on_meta_is_validated_before_it_is_trained(pool: RankPool) -> None:
    for plain, same_trainer, other_trainers in pool.run(evaluate_and_fit_everywhere, 2):
        assert plain[0] > plain[1] > plain[2] == plain[3]
        assert same_trainer == pytest.approx(plain, rel=1e-5)
        assert other_trainers == pytest.approx(plain, rel=1e-5)
