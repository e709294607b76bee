"""Models whose list of layers cannot be the pipeline, while the model around it can."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.support.rank_pool import RankContext, RankPool
from tests.support.training_cases import (
    Case,
    Classifier,
    batches,
    differences_in,
    no_differences_in,
    trainer_for,
)


class Cache:
    """Object that layers fill, as models of transformers give it to theirs."""

    def __init__(self) -> None:
        self.states: list[Tensor] = []


class CachingLayer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(12, 12)

    def forward(self, x: Tensor, cache: Cache | None) -> Tensor:
        if cache is not None:
            cache.states.append(x)
        return torch.tanh(self.linear(x))


class Decoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(16, 12)
        self.layers = nn.ModuleList([CachingLayer() for _ in range(4)])

    def forward(self, x: Tensor) -> tuple[Tensor, Cache]:
        cache, hidden = Cache(), self.stem(x)
        for layer in self.layers:
            hidden = layer(hidden, cache)
        return hidden, cache


class WithHead(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.decoder, self.head = Decoder(), nn.Linear(12, 5)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.decoder(x)[0])
        return out


class Caching(Classifier):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.net = WithHead()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("validated", F.cross_entropy(self.net(batch[0]), batch[1]))

    def val_dataloader(self) -> Any:
        return batches()


CASES = {
    "gpipe": Case(Caching, "gpipe", options={"plan": None}),
    "1f1b": Case(Caching, "1f1b", options={"plan": None}),
}


def test_the_model_around_layers_that_take_an_object_is_cut(pool: RankPool) -> None:
    assert pool.run(differences_in, 2, CASES) == no_differences_in(CASES)


def evaluate_after_training(context: RankContext | None) -> tuple[float, str]:
    """Train, validate and train on; return the last metric, and the first and last layers."""
    model, names = Caching(), ""
    trainer = trainer_for(context, **({} if context is None else {"plan": None}))
    trainer.fit(model, batches())
    (metrics,) = trainer.validate(model, verbose=False)
    trainer.fit_loop.max_epochs = 4
    trainer.fit(model, batches())
    if context is not None:
        layers = trainer.strategy.plan.layers  # type: ignore[attr-defined]
        names = f"{layers[0].name} .. {layers[-1].name}"
    return metrics["validated"] + float(trainer.callback_metrics["validated"]), names


def test_the_model_stays_cut_in_later_runs(pool: RankPool) -> None:
    (plain,) = pool.run(evaluate_after_training_plainly, 1)
    for value, names in pool.run(evaluate_after_training, 2):
        assert names == "net.decoder.stem .. net.decoder.layers.3"
        assert abs(value - plain) < 1e-5


def evaluate_after_training_plainly(context: RankContext) -> float:
    return evaluate_after_training(None)[0]


class EmbeddedFirst(Caching):
    """Classifier that uses a layer of the model before it calls the model."""

    def __init__(self) -> None:
        super().__init__()
        self.net = WithHead()
        self.net.decoder.stem = nn.Identity()
        self.net.embed = nn.Linear(16, 12)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return F.cross_entropy(self.net(self.net.embed(batch[0])), batch[1])

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("validated", F.cross_entropy(self.net(self.net.embed(batch[0])), batch[1]))


class ReadyLayer(nn.Module):
    """Layer that sets itself up by the first samples that it sees."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.is_ready = nn.Linear(12, 12), False
        self.shift = nn.Parameter(torch.zeros(12))

    def forward(self, x: Tensor, cache: Cache | None) -> Tensor:
        x = self.linear(x)
        if not self.is_ready:
            with torch.no_grad():
                self.shift.copy_(-x.mean(0))
            self.is_ready = True
        return torch.tanh(x + self.shift)


class SetUpByData(Caching):
    def __init__(self) -> None:
        super().__init__()
        self.net.decoder.layers = nn.ModuleList([ReadyLayer() for _ in range(4)])


class Frozen(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(5, 1)
        self.register_buffer("scale", torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.linear(x) * self.scale
        return out


class BesideScript(Classifier):
    """Classifier with a frozen module of TorchScript."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen = torch.jit.script(Frozen().requires_grad_(False))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        out = self.net(batch[0])
        loss: Tensor = F.cross_entropy(out, batch[1]) + self.frozen(out.detach()).mean()
        return loss


MORE_CASES = {
    # The attempt to cut the model fails on the rank that reads the samples; the step is cut.
    "used before the call": Case(EmbeddedFirst, options={"plan": None}),
    "set up by data": Case(SetUpByData, options={"plan": None, "microbatches": 1}),
    "beside TorchScript": Case(BesideScript, options={"plan": None}),
}


def test_all_ranks_make_the_same_attempts_and_leave_no_trace(pool: RankPool) -> None:
    assert pool.run(differences_in, 2, MORE_CASES) == no_differences_in(MORE_CASES)


class OrdinaryLayer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(12, 12)

    def forward(self, x: Tensor, cache: Cache | None) -> Tensor:
        return torch.tanh(self.linear(x))


def evaluate_other_layers(context: RankContext | None) -> list[float]:
    """Train; replace a layer, validate; add a layer, validate; return the metrics."""
    model, metrics = Caching(), []
    trainer = trainer_for(context, **({} if context is None else {"plan": None}))
    trainer.fit(model, batches())
    torch.manual_seed(5)
    for change in (lambda layers: layers.__setitem__(1, OrdinaryLayer()), add_layer):
        change(model.net.decoder.layers)
        (result,) = trainer.validate(model, verbose=False)
        metrics.append(result["validated"])
    return metrics


def add_layer(layers: nn.ModuleList) -> None:
    layers.append(OrdinaryLayer())


def evaluate_other_layers_plainly(context: RankContext) -> list[float]:
    return evaluate_other_layers(None)


def test_layers_may_be_replaced_between_runs(pool: RankPool) -> None:
    (plain,) = pool.run(evaluate_other_layers_plainly, 1)
    for metrics in pool.run(evaluate_other_layers, 2):
        assert torch.allclose(torch.tensor(metrics), torch.tensor(plain), atol=1e-5)
