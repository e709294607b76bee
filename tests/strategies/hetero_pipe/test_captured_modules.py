"""Modules of any class are cut into stages, and train as on one device."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader

from benchmarks.support.capture_models import CaptureCase, family_cases
from benchmarks.support.capture_models.case import call, wave_loss
from lightning_dlres import PipelinePlan
from lightning_dlres.core.wire.tree import tensors_of
from lightning_dlres.pipeline.capture.tracing.capturing import capture
from lightning_dlres.pipeline.plan.plan import consecutive_replicas
from lightning_dlres.pipeline.stage.microbatch import microbatch_sizes
from lightning_dlres.strategies.hetero_pipe import run_planner
from tests.support.rank_pool import RankContext, RankPool
from tests.support.training_cases import Case, Classifier, differences_in, fit, no_differences_in

SAMPLES, STEPS, VOCABULARY, LENGTH = 4, 4, 11, 6
MEASURED = {"plan": None, "microbatches": 2, "module": "net"}
# Modules that are refused.
UNCUT = ("running_statistics",)
NAMES = (
    "unet",
    "lstm_classifier",
    "encoder_decoder",
    "tied_language_model",
    "shared_depth",
    "siamese",
    # Its outputs of micro-batches are not alike.
    "packed_gru_classifier",
)


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


def layers_of(case: CaptureCase) -> int:
    """Return the number of layers of a case's model."""
    batch = case.batch(SAMPLES, 0)
    inputs = ((), batch) if isinstance(batch, dict) else (batch, {})
    return len(capture(case.make(), inputs).blocks)


class LastState(nn.Module):
    """Classifier by the last state of an LSTM, whose first dimension is not the samples.

    Its embedding runs in an activation checkpoint.
    """

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.recurrent = nn.Embedding(VOCABULARY, 8), nn.LSTM(8, 8, batch_first=True)

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        embedded = checkpoint(self.embed, tokens, use_reentrant=False)
        state: Tensor = self.recurrent(embedded)[1][0][-1]
        return state


class HidesPadding(nn.Module):
    """Module with another operation if there is padding, whose results its output has.

    A table of places crosses, too: its first dimension is 1 for any number of samples.
    """

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.places = nn.Embedding(VOCABULARY, 8), nn.Embedding(LENGTH, 8)
        self.first, self.second, self.head = (nn.Linear(8, 8) for _ in range(3))

    def forward(self, tokens: Tensor, labels: Tensor) -> dict[str, Tensor]:
        places = self.places(torch.arange(LENGTH))[None]
        x, mask = self.embed(tokens), (tokens != 0)[..., None]
        if not bool(mask.all()):
            x = x * mask
        hidden = (x + places).tanh()
        output = self.head(self.second(self.first(hidden) * places) + places * 2)
        return {"loss": (output - hidden).square().mean(), "out": hidden}


class KnowsOneSample(nn.Module):
    """Module that runs another operation for a single sample, as masks of transformers do."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, 8)
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, VOCABULARY)

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        x = self.embed(tokens)
        if tokens.shape[0] == 1:
            x = x * (tokens.diff(dim=1).abs().sum() >= 0)
        logits: Tensor = self.second(self.first(x).tanh())
        return logits


class MayFill(nn.Module):
    """Module that uses a parameter of its own between its submodules if it gets a mask."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.filler = nn.Embedding(VOCABULARY, 8), nn.Parameter(torch.randn(8))
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, VOCABULARY)

    def forward(self, tokens: Tensor, labels: Tensor, mask: Tensor | None = None) -> Tensor:
        x = self.first(self.embed(tokens)).tanh()
        if mask is not None:
            x = torch.where(mask[..., None], self.filler, x)
        logits: Tensor = self.second(x)
        return logits


class Unfreezing(Trained):
    """Trains the module's own parameter from the third step on."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        assert isinstance(self.net, MayFill)
        self.net.filler.requires_grad_(batch_idx > 1)


def padded_batch(samples: int, seed: int) -> dict[str, Tensor]:
    """Return tokens that are padded in the last samples of every other batch."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(1, VOCABULARY, (samples, LENGTH), generator=generator)
    if seed % 2 == 0:
        tokens[samples // 2 :, LENGTH // 2 :] = 0
    return {"tokens": tokens, "labels": tokens.clone()}


def batch_with_mask(samples: int, seed: int) -> dict[str, Tensor]:
    batch = padded_batch(samples, seed)
    return {**batch, "mask": batch["tokens"] > 5}


def batch_with_mask_at_times(samples: int, seed: int) -> dict[str, Tensor]:
    return (batch_with_mask if seed % 2 else padded_batch)(samples, seed)


LAST_STATE = CaptureCase("last state", "by hand", LastState, padded_batch, wave_loss)
HIDES_PADDING = CaptureCase(
    "hides padding", "by hand", HidesPadding, padded_batch, lambda output: output["loss"]
)
ONE_SAMPLE = CaptureCase("one sample", "by hand", KnowsOneSample, padded_batch, wave_loss)
MASKED = CaptureCase("mask", "by hand", MayFill, batch_with_mask, wave_loss)
MASKED_AT_TIMES = replace(MASKED, batch=batch_with_mask_at_times)
OWN_LOSS = CaptureCase("own loss", "by hand", OwnLoss, padded_batch, lambda output: output["loss"])


def cases() -> dict[str, Case]:
    hand_made = family_cases("by hand")
    return {
        **{name: cut_case(hand_made[name], 2) for name in NAMES},
        "own loss": Case(lambda: Trained(OWN_LOSS), expected_schedule="gpipe", options=MEASURED),
        # Micro-batches of 2, 1 and 1 samples, with and without padding.
        **{
            f"hides padding, {schedule}": Case(
                lambda: Trained(HIDES_PADDING),
                schedule,
                expected,
                options={**MEASURED, "microbatches": 3},
            )
            for schedule, expected in (("gpipe", "gpipe"), ("auto", "1f1b"))
        },
        "one sample": Case(
            lambda: Trained(ONE_SAMPLE),
            expected_schedule="1f1b",
            options={**MEASURED, "microbatches": SAMPLES},
        ),
        # With one sample in each micro-batch, the state has as many layers as samples.
        **{
            f"last state, {schedule}": Case(
                lambda: Trained(LAST_STATE),
                schedule,
                expected,
                options={**MEASURED, "microbatches": SAMPLES},
            )
            for schedule, expected in (("gpipe", "gpipe"), ("auto", "1f1b"))
        },
        "mask in some steps": Case(
            lambda: Trained(MASKED_AT_TIMES), expected_schedule="1f1b", options=MEASURED
        ),
        "unfreezing": Case(lambda: Unfreezing(MASKED), expected_schedule="1f1b", options=MEASURED),
        "not named": Case(
            lambda: Trained(hand_made["class_token"]), options={**MEASURED, "module": None}
        ),
    }


def cut_case(case: CaptureCase, stages: int, schedule: str = "auto", microbatches: int = 2) -> Case:
    """Return a case whose layers are cut evenly, without a measurement."""
    plan = PipelinePlan(
        replicas=consecutive_replicas(stages, stages),
        split=tuple(microbatch_sizes(layers_of(case), stages)),
    )
    options = {"plan": plan, "stages": stages, "microbatches": microbatches, "module": "net"}
    return Case(lambda: Trained(case), schedule, options=options)


def compare(context: RankContext) -> dict[str, list[str]]:
    return differences_in(context, {name: _with_loader(case) for name, case in cases().items()})


def _with_loader(case: Case) -> Case:
    """Return a case whose loaders are those of the model."""
    return Case(case.make, case.schedule, case.expected_schedule, lambda: None, case.options)


def test_modules_of_any_class_train_as_on_one_device(pool: RankPool) -> None:
    assert pool.run(compare, 2) == no_differences_in(cases())


@pytest.mark.exhaustive
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
@pytest.mark.parametrize("stages", [2, 3, 4])
def test_captured_modules_train_at_any_number_of_stages(
    pool: RankPool, stages: int, schedule: str
) -> None:
    hand_made = family_cases("by hand")
    # Without a loss of the whole batch, 1F1B is refused.
    apart = {"packed_gru_classifier"} if schedule == "1f1b" else set()
    names = [
        name
        for name, case in hand_made.items()
        if name not in apart
        and case.is_per_sample
        and name not in UNCUT
        and layers_of(case) >= stages
    ]
    expected = [{name: [] for name in names}] * stages
    assert pool.run(compare_hand_made, stages, names, stages, schedule) == expected


def compare_hand_made(
    context: RankContext, names: list[str], stages: int, schedule: str
) -> dict[str, list[str]]:
    hand_made = family_cases("by hand")
    return differences_in(
        context, {n: _with_loader(cut_case(hand_made[n], stages, schedule)) for n in names}
    )


def counted_hooks(context: RankContext, is_plain: bool, microbatches: int) -> dict[str, int]:
    """Return how often the hooks of each module have fired in training, on this rank."""
    case = _with_loader(cut_case(family_cases("by hand")["unet"], 2, "gpipe", microbatches))
    model, counts = case.make(), Counter[str]()

    class Counting(type(model)):  # type: ignore[misc]
        def on_train_start(self) -> None:
            # Hooks also fire in the runs at the start.
            self.counts.clear()

        def on_train_epoch_start(self) -> None:
            counts.clear()

        def on_validation_start(self) -> None:
            self.counts.update(counts)
            counts.clear()

    model.__class__, model.counts = Counting, Counter[str]()
    for name, module in model.net.named_modules():
        # The others, which have no parameters of their own, may run on several stages.
        if not list(module.parameters(recurse=False)):
            continue
        for kind in ("forward_pre", "forward", "full_backward_pre", "full_backward"):
            register = getattr(module, f"register_{kind}_hook")
            register(lambda *_, n=f"{name} {kind}": counts.update([n]))
    fit(None if is_plain else context, replace(case, make=lambda: model))
    return dict(model.counts)


def test_hooks_of_blocks_fire_as_often_as_in_plain_training(pool: RankPool) -> None:
    (plain,) = pool.run(counted_hooks, 1, True, 1)
    assert set(plain.values()) == {2 * STEPS}
    for microbatches in (1, 2):
        first, last = pool.run(counted_hooks, 2, False, microbatches)
        ours = Counter(first) + Counter(last)
        assert ours == {name: microbatches * count for name, count in plain.items()}


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


def said_at_start(context: RankContext, name: str, stages: int) -> list[str]:
    """Return the lines at the start of a run that are about what is not cut."""
    case = family_cases("by hand").get(name, OWN_LOSS)
    lines: list[str] = []
    patch = pytest.MonkeyPatch()
    patch.setattr(run_planner, "rank_zero_info", lines.append)
    options = {"plan": None, "module": "net", "stages": stages, "microbatches": 2}
    fit(context, _with_loader(Case(lambda: Trained(case), options=options)))
    patch.undo()
    return [line for line in lines if "hold" in line or "uncut" in line]


def test_what_all_ranks_hold_is_said_at_the_start(pool: RankPool) -> None:
    (line,) = pool.run(said_at_start, 2, "own loss", 2)[0]
    assert line == (
        "dlres: all ranks hold 544 B of parameters outside of the layers of 'net': net.embed 352 "
        "B, net 192 B."
    )
    (uncut,) = pool.run(said_at_start, 2, "running_statistics", 1)[0]
    assert uncut.startswith("dlres: 'net' is one layer of 1.395 KiB, uncut. The forward of Running")


class TwoStreams(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = nn.Linear(12, 12), nn.Linear(12, 12)

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        return torch.tanh(self.one(x) + y), torch.tanh(self.other(y) + x)


class StreamsNet(nn.Module):
    """A module whose list of layers passes on two tensors, so that it is no chain."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(16, 12)
        self.layers = nn.ModuleList([TwoStreams() for _ in range(3)])
        self.head = nn.Linear(12, 5)

    def forward(self, x: Tensor) -> Tensor:
        streams = (self.stem(x), self.stem(-x))
        for layer in self.layers:
            streams = layer(*streams)
        out: Tensor = self.head(streams[0] * streams[1])
        return out


class Streams(Classifier):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.net = StreamsNet()


STREAMS = {"streams": Case(Streams, options={"plan": None})}


def test_the_owner_of_a_list_is_cut_if_neither_the_list_nor_the_step_can_be(
    pool: RankPool,
) -> None:
    assert pool.run(differences_in, 2, STREAMS) == no_differences_in(STREAMS)
