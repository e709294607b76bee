"""Training steps that call several modules are cut into stages, and train as on one device."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

from lightning_dlres import ConfigError
from lightning_dlres.core.errors import PeerLostError, UnsupportedStepError
from lightning_dlres.strategies.hetero_pipe.step.module_search import find_pipelined_module
from tests.support.rank_pool import RankContext, RankPool
from tests.support.training_cases import Case, differences_in, fit, no_differences_in

FEATURES, CLASSES, WORDS = 12, 4, 11
# The stages are chosen by a profile.
MEASURED = {"plan": None, "microbatches": 3}


class Autoencoder(LightningModule):
    """The autoencoder of Lightning's introduction.

    Attributes:
        observed: Losses of validation.
    """

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.encoder = nn.Sequential(nn.Linear(FEATURES, 16), nn.ReLU(), nn.Linear(16, 3))
        self.decoder = nn.Sequential(nn.Linear(3, 16), nn.ReLU(), nn.Linear(16, FEATURES))
        self.observed: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x = self.prepared(batch[0])
        loss = F.mse_loss(self.decoder(self.encoder(x)), x)
        self.log("loss", loss, on_step=True, on_epoch=True)
        return loss

    def prepared(self, x: Tensor) -> Tensor:
        return x

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        # Evaluation may call the modules in any order and number.
        codes = self.encoder(batch[0]), self.encoder(2 * batch[0])
        self.observed += [float(self.decoder(code).square().mean()) for code in codes]

    def train_dataloader(self) -> DataLoader[Any]:
        generator = torch.Generator().manual_seed(2)
        x = torch.randn(22, FEATURES, generator=generator)
        y = torch.randint(CLASSES, (22,), generator=generator)
        # The last batch has fewer samples.
        return DataLoader([*zip(x, y, strict=True)], batch_size=8)

    val_dataloader = train_dataloader

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)


class OwnForward(Autoencoder):
    """Classifier whose layers are the LightningModule's own, called by its `forward`."""

    def __init__(self) -> None:
        super().__init__()
        del self.encoder, self.decoder
        self.first, self.second = nn.Linear(FEATURES, 16), nn.Linear(16, 16)
        self.head = nn.Linear(16, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.second(torch.relu(self.first(x))))
        return torch.log_softmax(self.head(x), 1)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return F.nll_loss(self(batch[0]), batch[1])

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.observed.append(float(F.nll_loss(self(batch[0]), batch[1])))


class Variational(Autoencoder):
    """Step with a term of the loss, and a log of it, between the modules."""

    def __init__(self) -> None:
        super().__init__()
        self.spread = nn.Linear(3, 3)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        mean = self.encoder(batch[0])
        log_variance = self.spread(mean)
        divergence = -0.5 * torch.mean(1 + log_variance - mean**2 - log_variance.exp())
        self.log("divergence", divergence)
        restored = self.decoder(mean + (0.5 * log_variance).exp())
        return {"loss": F.mse_loss(restored, batch[0]) + divergence, "code": mean.detach()}


class Prepared(Autoencoder):
    """Step that mixes the samples of a batch, counts, and decides by values, before its modules."""

    def __init__(self) -> None:
        super().__init__()
        self.count = torch.zeros(())

    def prepared(self, x: Tensor) -> Tensor:
        self.count.data += 1
        self.observed.append(float(self.count))
        share = float(torch.rand(()))
        x = share * x + (1 - share) * x[torch.randperm(x.shape[0])]
        x = x - x.mean(0)
        return 2 * x if x[0, 0] > 0 else x + torch.randn(FEATURES)


class OtherOpenings(Autoencoder):
    """Step whose code before its modules depends on the epoch and the number of the batch."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x = batch[0]
        if batch_idx == 1 and x.mean() > -1:
            return None
        if self.current_epoch >= 1:
            x = x.flip(1) * self.current_epoch
        if batch_idx % 2 == 0 and x[0, 0] > 0:
            x = x + 0.5
        return F.mse_loss(self.decoder(self.encoder(x)), batch[0])


class Translator(Autoencoder):
    """Encoder and decoder with states whose first dimension is not the samples."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, 8)
        self.encoder = nn.LSTM(8, 8, batch_first=True)  # type: ignore[assignment]
        self.decoder = nn.LSTM(8, 8, batch_first=True)  # type: ignore[assignment]
        self.head = nn.Linear(8, WORDS)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        words = (batch[0].abs() * 3).long().clamp(max=WORDS - 1)
        source, target = words[:, :6], words[:, 6:]
        _, state = self.encoder(self.embed(source))
        logits = self.head(self.decoder(self.embed(target[:, :-1]), state)[0])
        return F.cross_entropy(logits.flatten(0, 1), target[:, 1:].flatten())

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        # Decoded word by word.
        word, state = torch.zeros(len(batch[0]), 1, dtype=torch.long), None
        for _ in range(3):
            output, state = self.decoder(self.embed(word), state)
            word = self.head(output).argmax(-1)
            self.observed.append(float(word.sum()))


class TwoViews(Autoencoder):
    """Step that calls all its modules for each of two views of the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.predictor = nn.Linear(FEATURES, FEATURES)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        first, second = self.projected(batch[0]), self.projected(batch[0].flip(1))
        similarity = F.cosine_similarity(self.predictor(first), second.detach())
        similarity = similarity + F.cosine_similarity(self.predictor(second), first.detach())
        self.log("similarity", similarity.mean())
        # The samples of a batch are compared with each other.
        logits = first @ second.T
        return F.cross_entropy(logits, torch.arange(len(logits))) - similarity.mean()

    def projected(self, x: Tensor) -> Tensor:
        projected: Tensor = self.decoder(self.encoder(x).relu_())
        return projected


class ChangesItsInput(Autoencoder):
    """Model whose last module changes its input in place, which validation uses afterwards."""

    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Sequential(nn.ReLU(inplace=True), nn.Linear(FEATURES, FEATURES))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return F.mse_loss(self.last(self.decoder(self.encoder(batch[0]))), batch[0])

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        restored = self.decoder(self.encoder(batch[0]))
        self.observed += [float(self.last(restored).sum()), float(restored.sum())]


class ViewsInOne(Autoencoder):
    """Step with two views of the batch in one tensor, one after the other."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        views = torch.cat([batch[0], batch[0].flip(1)])
        first, second = self.decoder(self.encoder(views)).chunk(2)
        return F.cross_entropy(first @ second.T, torch.arange(len(first)))


class Later(Autoencoder):
    """Step that uses results between its modules only in later steps, and keeps some there."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(3))
        self.register_buffer("largest", torch.zeros(3))
        self.extent = torch.zeros(3)
        self.optional = nn.Linear(3, 3)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        code = self.encoder(batch[0])
        with torch.no_grad():
            self.mean.mul_(0.9).add_(code.mean(0), alpha=0.1)
            self.extent[:] = code.amax(0)
        self.largest = 0.5 * self.largest + code.detach().amax(0)
        loss = F.mse_loss(self.decoder(code), batch[0])
        if self.current_epoch >= 1:
            size = code.square().mean()
            self.log("size", size)
            loss = loss + size
        if batch_idx % 2:
            loss = loss + self.optional(code).square().mean()
        self.observed += self.extent.tolist()
        return loss


class ComparesSamples(Autoencoder):
    """Step with terms of all pairs of samples between its modules, and one that is used later."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        code = self.encoder(batch[0])
        pairs = code @ code.T
        distance = torch.cdist(code, code).mean()
        contrast = F.cross_entropy(code @ code.T, torch.arange(len(code)))
        self.log("distance", distance)
        loss = F.mse_loss(self.decoder(code), batch[0])
        return loss + 0.1 * distance + 0.1 * contrast + 0.1 * pairs.square().mean()


class Centers(nn.Module):
    """Loss with parameters: the distance to the centre of a sample's class."""

    def __init__(self) -> None:
        super().__init__()
        self.centers = nn.Parameter(torch.randn(CLASSES, 16))

    def forward(self, features: Tensor, labels: Tensor) -> Tensor:
        return (features - self.centers[labels]).square().sum(1).mean()


class TwoHeads(Autoencoder):
    """Step with two heads, a loss with parameters, a scale, a buffer and a counter of its own."""

    def __init__(self) -> None:
        super().__init__()
        del self.encoder, self.decoder
        self.trunk, self.classes = nn.Linear(FEATURES, 16), nn.Linear(16, CLASSES)
        self.values, self.centers = nn.Linear(16, FEATURES), Centers()
        self.scale, self.steps = nn.Parameter(torch.ones(16)), 0
        self.register_buffer("seen", torch.zeros(()))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.steps += 1
        if self.steps == 2:
            return None
        features = torch.tanh(self.trunk(batch[0])) * self.scale
        classes, values = self.classes(features), self.values(features)
        self.seen += 1
        loss = F.cross_entropy(classes, batch[1]) + F.mse_loss(values, batch[0])
        self.observed.append(float(self.seen))
        return loss + 0.1 * self.centers(features, batch[1])

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.observed.append(float(self.classes(self.trunk(batch[0])).sum()))


class Teacher(Autoencoder):
    """Step that calls its first module without gradients, in clauses that run code at their end."""

    def __init__(self) -> None:
        super().__init__()
        self.teacher = nn.Sequential(nn.Linear(FEATURES, 8), nn.Tanh(), nn.Linear(8, FEATURES))
        self.teacher.requires_grad_(False)
        self.calls, self.total = {"teacher": 0}, torch.zeros(())

    @contextmanager
    def counted(self) -> Iterator[None]:
        try:
            yield
        finally:
            self.calls["teacher"] += 1
            self.total += 1

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        with self.counted(), torch.no_grad():
            target = self.teacher(batch[0])
        return F.mse_loss(self.decoder(self.encoder(batch[0])), target)

    def on_train_end(self) -> None:
        self.observed += [self.calls["teacher"], float(self.total)]


def cases(stages: int) -> dict[str, Case]:
    kinds = (
        Autoencoder,
        Variational,
        Prepared,
        OtherOpenings,
        Translator,
        TwoHeads,
        TwoViews,
        ViewsInOne,
        Teacher,
        ChangesItsInput,
        Later,
        ComparesSamples,
    )
    options = {**MEASURED, "stages": stages}
    made = {kind.__name__: Case(kind, data=no_data, options=options) for kind in kinds}
    made["1F1B"] = Case(OwnForward, "1f1b", "1f1b", data=no_data, options=options)
    return made


def no_data() -> None:
    """The models have loaders."""


def compare(context: RankContext, stages: int) -> dict[str, list[str]]:
    return differences_in(context, cases(stages))


@pytest.mark.parametrize("stages", [2, pytest.param(3, marks=pytest.mark.exhaustive)])
def test_steps_that_call_several_modules_train_as_on_one_device(
    pool: RankPool, stages: int
) -> None:
    assert pool.run(compare, stages, stages) == no_differences_in(cases(stages), stages)


def held_parameters(context: RankContext) -> list[str]:
    names: list[str] = []

    class Watching(Variational):
        def on_train_batch_end(self, *args: Any) -> None:
            names[:] = [n for n, p in self.named_parameters() if not p.is_meta]

    fit(context, Case(Watching, data=no_data, options={**MEASURED, "stages": 2}))
    return names


def test_each_rank_holds_its_own_layers_of_a_step_only(pool: RankPool) -> None:
    first, last = pool.run(held_parameters, 2)
    assert first
    assert last
    assert sorted(first + last) == sorted(n for n, _ in Variational().named_parameters())


class DecidesBetween(Autoencoder):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        code = self.encoder(batch[0])
        code = code if code.sum() > 0 else -code
        return self.decoder(code).square().mean()


class CentersBetween(Autoencoder):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        code = self.encoder(batch[0])
        return self.decoder(code - code.mean(0)).square().mean()


class CountsBefore(Autoencoder):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        count = len(batch[0])
        return self.decoder(self.encoder(batch[0]) * count).square().mean()


class UsesChanged(Autoencoder):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(3))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        code = self.encoder(batch[0])
        self.mean.add_(code.detach().mean(0))
        return self.decoder(code - self.mean).square().mean()


class CallsTwice(Autoencoder):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        code = self.encoder(self.decoder(self.encoder(batch[0])))
        return self.decoder(code).square().mean()


class PairsOfSamples(Autoencoder):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        # Twice as many samples give four times as many rows.
        rows = torch.rand(len(batch[0]) ** 2, FEATURES)
        return self.decoder(self.encoder(rows)).square().mean()


REFUSED = {
    DecidesBetween: "must not read the values of tensors between its submodules",
    CentersBetween: "the input of 'decoder.0' is another one for a part of the batch",
    CountsBefore: "the input of 'decoder.0' is another one for a part of the batch",
    UsesChanged: "must not use a tensor between its submodules that it has changed there",
    CallsTwice: "it has 1 of the 2 layers that are needed",
    PairsOfSamples: "returns a tensor without a dimension for the samples",
}


def refusals(context: RankContext) -> list[str]:
    texts = []
    for kind in REFUSED:
        with pytest.raises(ConfigError) as caught:
            fit(context, Case(kind, data=no_data, options={**MEASURED, "stages": 2}))
        texts.append(str(caught.value))
    return texts


def test_steps_that_cannot_be_cut_are_refused_with_a_way_out(pool: RankPool) -> None:
    for texts in pool.run(refusals, 2):
        for text, reason in zip(texts, REFUSED.values(), strict=True):
            assert reason in text
            assert "HeteroPipeStrategy(module='encoder')" in text


class LaterInForward(Autoencoder):
    def forward(self, x: Tensor) -> Tensor:
        code = self.encoder(x)
        restored: Tensor = self.decoder(code)
        return restored * code.mean() if self.current_epoch else restored

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self(batch[0]).square().mean()


def later_error(context: RankContext) -> str:
    with pytest.raises((UnsupportedStepError, PeerLostError)) as caught:
        fit(context, Case(LaterInForward, data=no_data, options={**MEASURED, "stages": 2}))
    return str(caught.value)


def test_a_use_of_what_was_not_sent_is_an_error(pool: RankPool) -> None:
    for text in pool.run(later_error, 2):
        assert "must use after a submodule only what it has used" in text


def test_a_model_with_several_modules_is_cut_at_its_step() -> None:
    for name in (None, "training_step"):
        found = find_pipelined_module(OwnForward(), name)
        assert found.is_step
        assert found.layers.names == ("first", "second", "head")
