"""Modules of any class are cut into stages, and train as on one device."""

from __future__ import annotations

from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

from benchmarks.support.capture_models import CaptureCase, family_cases
from benchmarks.support.capture_models.case import call
from lightning_dlres.core.wire.tree import tensors_of
from tests.support.rank_pool import RankContext, RankPool
from tests.support.training_cases import Case, differences_in, fit, no_differences_in

SAMPLES, STEPS, VOCABULARY, LENGTH = 4, 4, 11, 6
# Layers are measured.
OPTIONS = {"plan": None, "microbatches": 2, "module": "net"}
NAMES = ("unet", "lstm_classifier", "encoder_decoder", "tied_language_model", "shared_depth")


class Trained(LightningModule):
    """LightningModule around a model of the list, without dropout, which depends on micro-batches.

    Attributes:
        observed: Means of the outputs in validation.
    """

    def __init__(self, case: CaptureCase) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.net, self.case, self.observed = case.make(), case, list[float]()
        for module in self.net.modules():
            if isinstance(module, (nn.Dropout, nn.MultiheadAttention, nn.RNNBase)):
                setattr(module, "p" if isinstance(module, nn.Dropout) else "dropout", 0.0)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.case.loss(call(self.net, batch))
        self.log("loss", loss, on_step=True, on_epoch=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        outputs = tensors_of(call(self.net, batch))
        self.observed.append(float(sum(output.abs().mean() for output in outputs)))

    def train_dataloader(self) -> DataLoader[Any]:
        data = [self.case.batch(SAMPLES, step) for step in range(STEPS)]
        return DataLoader(data, batch_size=None)

    val_dataloader = train_dataloader

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)


class OwnLoss(nn.Module):
    """Language model with a loss of its own, a mean over tokens that are not padding.

    It makes a mask only if there is padding, and uses its embedding for the logits, too.
    """

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, 8)
        self.position = nn.Parameter(torch.randn(LENGTH, 8))
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True) for _ in range(3)
        )
        self.others = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))

    def forward(self, tokens: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
        padding = tokens == 0
        mask = padding if padding.any() else None
        x = self.embed(tokens) + self.position
        for layer in self.layers:
            x = layer(x, src_key_padding_mask=mask)
        for other in self.others:
            x = x + other(x)
        logits = x @ self.embed.weight.T
        if labels is None:
            return {"logits": logits}
        loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=0)
        return {"loss": loss, "logits": logits}


def padded_batch(samples: int, seed: int) -> dict[str, Tensor]:
    """Return tokens that are padded in the last samples of every other batch."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(1, VOCABULARY, (samples, LENGTH), generator=generator)
    if seed % 2 == 0:
        tokens[samples // 2 :, LENGTH // 2 :] = 0
    return {"tokens": tokens, "labels": tokens.clone()}


OWN_LOSS = CaptureCase("own loss", "by hand", OwnLoss, padded_batch, lambda output: output["loss"])


def cases() -> dict[str, Case]:
    hand_made = family_cases("by hand")
    return {
        **{name: Case(lambda n=name: Trained(hand_made[n]), options=OPTIONS) for name in NAMES},
        "own loss": Case(lambda: Trained(OWN_LOSS), expected_schedule="gpipe", options=OPTIONS),
        "not named": Case(
            lambda: Trained(hand_made["class_token"]), options={**OPTIONS, "module": None}
        ),
    }


def compare(context: RankContext) -> dict[str, list[str]]:
    return differences_in(context, {name: _with_loader(case) for name, case in cases().items()})


def _with_loader(case: Case) -> Case:
    """Return a case whose loaders are those of the model."""
    return Case(case.make, case.schedule, case.expected_schedule, lambda: None, case.options)


def test_modules_of_any_class_train_as_on_one_device(pool: RankPool) -> None:
    assert pool.run(compare, 2) == no_differences_in(cases())


def held_parameters(context: RankContext) -> list[str]:
    case = _with_loader(cases()["unet"])
    model, names = case.make(), list[str]()

    class Watching(type(model)):  # type: ignore[misc]
        def on_train_batch_end(self, *args: Any) -> None:
            names[:] = [n for n, p in self.named_parameters() if not p.is_meta]

    model.__class__ = Watching
    fit(context, Case(lambda: model, data=lambda: None, options=case.options))
    return names


def test_each_rank_holds_its_own_layers_only(pool: RankPool) -> None:
    first, last = pool.run(held_parameters, 2)
    whole = [name for name, _ in cases()["unet"].make().named_parameters()]
    assert first
    assert last
    assert sorted(first + last) == sorted(whole)
