"""Evaluation that stages cannot do, for which each rank holds the whole model for some time."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, IterableDataset

from lightning_dlres import PipelinePlan
from lightning_dlres.core.comm import mailbox
from lightning_dlres.core.errors import ConfigError, PeerLostError, UnsupportedStepError
from tests.support.rank_pool import RankContext, RankPool
from tests.support.training_cases import (
    Case,
    Classifier,
    batches,
    differences_in,
    expect_refusal,
    no_differences_in,
    trainer_for,
)


class Cache:
    """Object that layers fill, and that cannot be sent to another rank."""

    def __init__(self) -> None:
        self.states: dict[int, Tensor] = {}


class Block(nn.Module):
    def __init__(self, number: int) -> None:
        super().__init__()
        self.linear, self.number = nn.Linear(12, 12), number
        self.register_buffer("scale", torch.tensor(1.0 + number))

    def forward(self, x: Tensor, cache: Cache | None = None) -> Tensor:
        if cache is not None:
            before = cache.states.get(self.number)
            cache.states[self.number] = x if before is None else x + 0.5 * before
            x = cache.states[self.number]
        return x + torch.tanh(self.linear(x)) / self.scale


class Decoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(16, 12)
        self.layers = nn.ModuleList([Block(number) for number in range(4)])
        self.head = nn.Linear(12, 5)

    def forward(self, x: Tensor, cache: Cache | None = None) -> Tensor:
        hidden = self.stem(x)
        for layer in self.layers:
            hidden = layer(hidden, cache)
        out: Tensor = self.head(hidden)
        return out

    def generate(self, x: Tensor) -> Tensor:
        """Return the sum of three calls, each of which goes on from the states of the last."""
        cache, total = Cache(), torch.zeros(())
        for _ in range(3):
            out = self(x, cache)
            total = total + out.square().mean()
            x = x * (1 + out.mean())
        return total


def weight_of_layer(decoder: Decoder, x: Tensor) -> Tensor:
    return sum((layer.linear.weight.norm() for layer in decoder.layers), torch.zeros(()))


def buffers_of_layers(decoder: Decoder, x: Tensor) -> Tensor:
    # The first operation is on a buffer, and one on several of them follows.
    copies = [layer.scale.detach().clone() for layer in decoder.layers]
    return torch.stack([*copies, decoder.layers[1].scale]).sum()


def layers_alone(decoder: Decoder, x: Tensor) -> Tensor:
    out: Tensor = decoder.layers[3](decoder.layers[0](decoder.stem(x))).square().mean()
    return out


def generated(decoder: Decoder, x: Tensor) -> Tensor:
    return decoder.generate(x)


class Generating(Classifier):
    """Classifier that validates by what stages cannot do.

    Args:
        use: What the validation logs, given the decoder and the inputs.
    """

    def __init__(self, use: Callable[[Decoder, Tensor], Tensor]) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.net: Decoder = Decoder()
        self.use = use

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("before", F.cross_entropy(self.net(batch[0]), batch[1]))
        self.log("used", self.use(self.net, batch[0]))
        self.log("after", F.cross_entropy(self.net(batch[0]), batch[1]))

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.use(self.net, batch[0])

    def val_dataloader(self) -> Any:
        return batches()


class AtTheEnd(Generating):
    """Classifier that generates at the end of validation, and after some training steps."""

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("before", F.cross_entropy(self.net(batch[0]), batch[1]))

    def on_validation_epoch_end(self) -> None:
        x = torch.linspace(-1, 1, 32).reshape(2, 16)
        self.observed.append(float(self.use(self.net, x)))

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 1:
            with torch.no_grad():
                self.observed.append(float(self.use(self.net, batch[0])))


class Averaged(Callback):
    """Callback that validates with other weights, and sets the trained ones back."""

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        with torch.no_grad():
            self.before = [p.detach().clone() for p in pl_module.parameters()]
            for parameter in pl_module.parameters():
                parameter.mul_(0.5)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        with torch.no_grad():
            for parameter, before in zip(pl_module.parameters(), self.before, strict=True):
                parameter.copy_(before)


def averaged() -> list[Callback]:
    return [Averaged()]


class Padded(Classifier):
    """Classifier with torch's encoder, which leaves padding out in evaluation only."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        self.net = nn.TransformerEncoder(layer, 4)
        self.head = nn.Linear(8, 5)

    def logits(self, x: Tensor) -> Tensor:
        tokens = x.reshape(-1, 2, 8)
        padding = torch.zeros(tokens.shape[:2], dtype=torch.bool)
        padding[:, 1] = x[:, 0] > 0
        out: Tensor = self.head(self.net(tokens, src_key_padding_mask=padding).mean(1))
        return out

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return F.cross_entropy(self.logits(batch[0]), batch[1])

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("validated", F.cross_entropy(self.logits(batch[0]), batch[1]))

    def val_dataloader(self) -> Any:
        return batches()


class PaddedInHook(Padded):
    """Classifier that calls torch's encoder with padding in a hook."""

    def on_validation_epoch_end(self) -> None:
        self.logits(torch.linspace(-1, 1, 32).reshape(2, 16))


class WithoutLength(IterableDataset[Any]):
    def __iter__(self) -> Any:
        return (batches().dataset[i] for i in range(16))


class KeptLosses(Generating):
    """Classifier that keeps losses with graphs until the end of a validation of unknown length."""

    def __init__(self) -> None:
        super().__init__(generated)
        self.losses: list[Tensor] = []

    def validation_step(self, batch: Any) -> None:
        with torch.enable_grad():
            self.losses.append(F.cross_entropy(self.net(batch[0]), batch[1]))

    def on_validation_epoch_end(self) -> None:
        self.observed.append(float(torch.stack(self.losses).mean()))
        self.losses.clear()

    def val_dataloader(self) -> Any:
        return DataLoader(WithoutLength(), batch_size=8)


class AveragedWithoutLength(Generating):
    def __init__(self) -> None:
        super().__init__(generated)

    def val_dataloader(self) -> Any:
        return DataLoader(WithoutLength(), batch_size=8)


def case(make: Callable[[], LightningModule], **options: Any) -> Case:
    callbacks = options.pop("callbacks", None)
    return Case(make, options={"plan": None, **options}, callbacks=callbacks)


def test_training_goes_on_after_an_evaluation_on_the_whole_model(pool: RankPool) -> None:
    cases = {
        "generated": case(partial(Generating, generated)),
        "generated, module": case(partial(Generating, generated), module="net"),
        "generated, step": case(partial(Generating, generated), module="training_step"),
        "weight": case(partial(Generating, weight_of_layer)),
        "buffers": case(partial(Generating, buffers_of_layers)),
        "some layers": case(partial(Generating, layers_alone), module="net"),
        "at the end": case(partial(AtTheEnd, generated)),
        "asked for": case(partial(AtTheEnd, generated), evaluation="whole"),
        "averaged": case(partial(Generating, generated), callbacks=averaged),
        "averaged, no length": case(AveragedWithoutLength, callbacks=averaged),
        "kept losses": case(KeptLosses, evaluation="whole"),
        "padded": case(Padded),
    }
    assert pool.run(differences_in, 2, cases) == no_differences_in(cases)


def test_padding_in_a_hook_is_refused(pool: RankPool) -> None:
    pool.run(expect_refusal, 2, case(PaddedInHook), "must not be called with padding outside of")


def warns_of_padding(context: RankContext) -> None:
    words = "sets padded positions to 0 in evaluation. This evaluation over stages does not"
    trainer = trainer_for(context, plan=None, evaluation="stages")
    if context.rank == 0:
        with pytest.warns(UserWarning, match=words):
            trainer.fit(Padded(), batches())
    else:
        trainer.fit(Padded(), batches())


def test_evaluation_over_stages_warns_of_padding(pool: RankPool) -> None:
    pool.run(warns_of_padding, 2)


def test_three_stages_hold_the_whole_model(pool: RankPool) -> None:
    cases = {
        "generated": case(partial(Generating, generated), stages=3),
        "padded, module": case(Padded, stages=3, module="net"),
    }
    assert pool.run(differences_in, 3, cases) == no_differences_in(cases, 3)


def test_two_replicas_hold_the_whole_model(pool: RankPool) -> None:
    cases = {"generated": case(partial(Generating, generated), stages=2)}
    assert pool.run(differences_in, 4, cases) == no_differences_in(cases, 4)


class Keeping(nn.Module):
    """Layer that keeps a flag of its first call, a moving scale, a list and a tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.is_ready, self.scale = nn.Linear(16, 16), False, 1.0
        self.norms: list[float] = []
        self.shift, self.pair = torch.zeros(16), (torch.ones(1), "tuple")
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.linear(x)
        if not self.is_ready:
            self.is_ready, self.shift = True, -hidden.detach().mean(0)
        if self.training:
            self.scale = 0.9 * self.scale + 0.1 * float(hidden.detach().abs().max())
            self.norms.append(self.scale)
            self.pair[0].mul_(1.01)
        # Another tensor takes the place of the buffer.
        self.calls = self.calls + 1.0
        return self.pair[0].clone() * torch.tanh(
            (hidden + self.shift) / (self.scale + 0.1 * len(self.norms))
        )


class KeepingLayers(Classifier):
    """Classifier whose layers keep values in attributes, and whose validation may use a buffer."""

    def __init__(self, uses_buffer: bool) -> None:
        super().__init__()
        torch.manual_seed(1)
        layers = [Keeping() for _ in range(4)]
        self.net, self.uses_buffer = nn.Sequential(*layers, nn.Linear(16, 5)), uses_buffer

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return F.cross_entropy(self.net(batch[0]), batch[1])

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("before", F.cross_entropy(self.net(batch[0]), batch[1]))
        if self.uses_buffer:
            self.log("used", sum(layer.calls * 2 for layer in list(self.net)[:4]))  # type: ignore[misc]
        self.log("after", F.cross_entropy(self.net(batch[0]), batch[1]))

    def val_dataloader(self) -> Any:
        return batches()


def test_evaluation_sees_what_layers_keep_in_attributes(pool: RankPool) -> None:
    cases = {
        "stages": case(partial(KeepingLayers, False), microbatches=1, evaluation="stages"),
        "whole": case(partial(KeepingLayers, False), microbatches=1, evaluation="whole"),
        "buffer": case(partial(KeepingLayers, True), microbatches=1),
    }
    assert pool.run(differences_in, 2, cases) == no_differences_in(cases)


def kept_by_layers(context: RankContext) -> list[tuple[bool, float, int, float]]:
    model = KeepingLayers(True)
    trainer_for(context, plan=None, microbatches=1).fit(model, batches())
    layers: list[Any] = list(model.net)[:4]  # type: ignore[call-overload]
    return [
        (layer.is_ready, layer.scale, len(layer.norms), float(layer.shift.sum()))
        for layer in layers
    ]


def test_all_ranks_have_the_attributes_of_layers_after_training(pool: RankPool) -> None:
    first, second = pool.run(kept_by_layers, 2)
    assert first == second
    assert all(is_ready and scale != 1.0 and norms for is_ready, scale, norms, _ in first)


class Aliasing(nn.Module):
    """Layer that writes to its buffer by a second name, and reads it by a view."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)
        self.register_buffer("mean", torch.zeros(16))
        self.aliases, self.view = [self.mean], self.mean[:4]

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.aliases[0].add_(0.1)
        return torch.tanh(self.linear(x)) + self.mean.clone() + self.view.sum()


class AliasingLayers(KeepingLayers):
    def __init__(self) -> None:
        super().__init__(uses_buffer=False)
        self.net = nn.Sequential(*(Aliasing() for _ in range(4)), nn.Linear(16, 5))


def trained_twice(context: RankContext | None) -> list[float]:
    model: Any = AliasingLayers()
    options = {"plan": PipelinePlan(replicas=((0, 1),), split=(2, 3)), "microbatches": 1}
    for _ in range(2):
        trainer_for(context, **options).fit(model, batches())
    return [float(tensor.sum()) for tensor in model.state_dict().values()]


def test_a_second_run_keeps_other_names_of_buffers(pool: RankPool) -> None:
    expected = trained_twice(None)
    for sums in pool.run(trained_twice, 2):
        assert sums == pytest.approx(expected, rel=1e-5, abs=1e-5)


class Logit:
    """Object that cannot be sent."""


class Unsendable(Keeping):
    def forward(self, x: Tensor) -> Tensor:
        self.last = Logit()
        return super().forward(x)


class UnsendableLayers(KeepingLayers):
    def __init__(self) -> None:
        super().__init__(uses_buffer=True)
        self.net = nn.Sequential(*(Unsendable() for _ in range(4)), nn.Linear(16, 5))


def validate_with_unsendable(context: RankContext) -> None:
    trainer = trainer_for(context, plan=None)
    if context.rank == 0:
        with pytest.warns(UserWarning, match=r"net\.\d\.last \(Logit\).*cannot be sent"):
            trainer.fit(UnsendableLayers(), batches())
    else:
        trainer.fit(UnsendableLayers(), batches())


def test_a_warning_names_attributes_that_cannot_be_sent(pool: RankPool) -> None:
    pool.run(validate_with_unsendable, 2)


class SetsItselfUp(Keeping):
    """Layer whose flag announces a function, which cannot be sent."""

    def forward(self, x: Tensor) -> Tensor:
        if not self.is_ready:
            self.scaled = lambda value: value * 2.0
        return super().forward(self.scaled(x))


class SetUpLayers(KeepingLayers):
    def __init__(self) -> None:
        super().__init__(uses_buffer=False)
        self.net = nn.Sequential(*(SetsItselfUp() for _ in range(4)), nn.Linear(16, 5))


def runs_after_training(context: RankContext) -> list[bool]:
    model: Any = SetUpLayers()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer_for(context, plan=None, microbatches=1).fit(model, batches())
    flags = [layer.is_ready for layer in list(model.net)[:4]]
    model.net(torch.ones(2, 16))
    return flags


def test_a_flag_is_not_sent_without_what_it_announces(pool: RankPool) -> None:
    first, second = pool.run(runs_after_training, 2)
    assert any(first)
    assert any(second)


class UsedAlone(Classifier):
    """Classifier that uses a layer's weight on one rank."""

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.net(batch[0])
        if self.global_rank == 0:
            self.observed.append(float(self.net[0].weight.norm()))  # type: ignore[index]

    def val_dataloader(self) -> Any:
        return batches()


def use_alone(context: RankContext) -> None:
    mailbox._EXPLAIN_SECONDS = 0.1
    trainer_for(context, plan=None, timeout=8).fit(UsedAlone(), batches())


def test_a_weight_that_one_rank_uses_alone_is_named(pool: RankPool) -> None:
    outcome = pool.run_expecting_errors(use_alone, 2, timeout=120)[0]
    place = "at the use of a layer's weight in evaluation, where all ranks must be, or none"
    assert place in outcome.error_message + outcome.output


class Bytes(Callback):
    """Callback that keeps the bytes of parameters that the rank holds in each training step."""

    def __init__(self) -> None:
        self.held: set[int] = set()

    def on_train_batch_start(self, trainer: Trainer, *_: Any) -> None:
        self.held.add(trainer.strategy.resident_parameter_bytes)  # type: ignore[attr-defined]

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        self.held.add(trainer.strategy.resident_parameter_bytes)  # type: ignore[attr-defined]


def bytes_in_training(context: RankContext) -> tuple[set[int], list[float]]:
    held, model = Bytes(), Generating(generated)
    trainer = trainer_for(context, plan=None, callbacks=[held])
    trainer.fit(model, batches())
    predicted = trainer.predict(model, batches())
    assert predicted is not None
    return held.held, [float(value) for value in predicted]  # type: ignore[arg-type]


def test_each_rank_trains_with_its_own_part(pool: RankPool) -> None:
    whole = sum(p.numel() * p.element_size() for p in Generating(generated).parameters())
    results = pool.run(bytes_in_training, 2)
    for held, _ in results:
        assert len(held) == 1
        assert max(held) < whole
    assert results[0][1] == results[1][1]


def evaluation_error(context: RankContext, options: dict[str, Any], words: str) -> None:
    trainer = trainer_for(context, **{"plan": None, **options})
    with pytest.raises((ConfigError, UnsupportedStepError, PeerLostError), match=words):
        trainer.fit(Generating(generated), batches())


# A limit that is enough for a stage, and too little for the whole model. With a given plan, no
# memory is planned.
SMALL = {
    "memory_limit": 2500,
    "module": "net.layers",
    "plan": PipelinePlan(replicas=((0, 1),), split=(2, 2)),
}


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"evaluation": "stages"}, "cannot be sent to another rank"),
        ({**SMALL, "evaluation": "whole"}, "evaluation must be 'stages'"),
        (SMALL, "cannot be sent to another rank"),
    ],
    ids=["stages", "whole, too little memory", "auto, too little memory"],
)
def test_an_evaluation_that_stages_cannot_do_is_an_error_where_no_rank_may_hold_the_model(
    pool: RankPool, options: dict[str, Any], words: str
) -> None:
    pool.run(evaluation_error, 2, options, words)


class OwnLoss(nn.Module):
    """Module that returns its own loss if it gets targets."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.head = nn.Linear(16, 12), nn.Linear(12, 12), nn.Linear(12, 5)

    def forward(self, x: Tensor, targets: Tensor | None = None) -> Tensor:
        out = self.head(torch.tanh(self.second(torch.tanh(self.first(x)))))
        return out if targets is None else F.cross_entropy(out, targets, reduction="none")


class Counting(Classifier):
    """Classifier that predicts by a call with other arguments, and keeps the bytes of then."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.net = OwnLoss()
        self.held: set[int] = set()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss: Tensor = self.net(batch[0], batch[1]).mean()
        return loss

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        out: Tensor = self.net(batch[0])
        self.held.add(self.trainer.strategy.resident_parameter_bytes)  # type: ignore[attr-defined]
        return out


def bytes_in_prediction(context: RankContext) -> tuple[set[int], float]:
    model = Counting()
    trainer = trainer_for(context, plan=None, module="net")
    trainer.fit(model, batches())
    outputs = trainer.predict(model, batches())
    assert outputs is not None
    return model.held, float(torch.cat(outputs).abs().sum())  # type: ignore[arg-type]


def test_a_call_with_other_arguments_runs_over_the_stages(pool: RankPool) -> None:
    whole = sum(p.numel() * p.element_size() for p in Counting().parameters())
    results = pool.run(bytes_in_prediction, 2)
    assert results[0][1] == results[1][1]
    for held, _ in results:
        assert max(held) < whole
