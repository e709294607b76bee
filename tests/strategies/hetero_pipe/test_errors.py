"""Messages about bad input: they name the argument, the rule, the value and a fix."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer, seed_everything
from lightning.pytorch.demos.boring_classes import BoringModel
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

from lightning_dlres import (
    BatchMismatchError,
    ConfigError,
    HeteroPipeStrategy,
    PeerLostError,
    PeerTimeoutError,
    PipelinePlan,
    UnsupportedStepError,
)
from lightning_dlres.strategies.hetero_pipe.step.parameter_guard import PipelinedWeightGuard
from tests.support.models import Samples, mlp
from tests.support.rank_pool import RankContext, RankOutcome, RankPool
from tests.support.training_cases import QUICK


class Simple(LightningModule):
    """Model that works; its subclasses each have one fault."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.net = mlp(0.0)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return F.cross_entropy(self.net(batch[0]), batch[1])

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class CallsTwice(Simple):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return F.cross_entropy(self.net(batch[0]) + self.net(-batch[0]), batch[1])


class Penalises(Simple):
    """Adds a penalty on the gradient for its input, if there is one."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x = batch[0].clone().requires_grad_()
        out = self.net(x)
        (gradient,) = torch.autograd.grad(out.sum(), x, create_graph=True, allow_unused=True)
        return out.mean() if gradient is None else out.mean() + gradient.square().mean()


class NeverCalls(Simple):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return batch[0].sum() * self.net[0].weight.sum()


class ReturnsNone(Simple):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.net(batch[0])


class Manual(Simple):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False


class TwoOptimizers(Simple):
    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD(self.net[i].parameters(), lr=0.1) for i in (0, 2)]


class NeedsAllParameters(Simple):
    def configure_optimizers(self) -> Any:
        return torch.optim.LBFGS(self.parameters())


class TwoNetworks(Simple):
    def __init__(self) -> None:
        super().__init__()
        self.other = mlp(0.0)


class RankDependentBatch(Simple):
    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return [batch[0] + self.global_rank, batch[1]]


class ReadsInTraining(Simple):
    def training_step(self, dataloader_iter: Any) -> Tensor:  # type: ignore[override]
        return super().training_step(*next(dataloader_iter)[:2])


class FailingSamples(Samples):
    def __getitem__(self, index: int) -> Any:
        if index == 17:
            raise OSError("the disk is gone")
        return super().__getitem__(index)


class UnsendableSamples(Samples):
    def __getitem__(self, index: int) -> Any:
        return object()


class RaisesInStep(Simple):
    """Model that fails in the second step, on the rank that computes the loss."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        if batch_idx == 1:
            raise ZeroDivisionError("a slip in user code")
        return loss


class NeedsTwoSamples(nn.Module):
    """Layer that fails on a single sample, as BatchNorm does in training."""

    def forward(self, x: Tensor) -> Tensor:
        if len(x) == 1:
            raise IndexError("one sample")
        return x


class WithSingleSamples(Simple):
    """Model whose last step has three samples, which make micro-batches of two and one."""

    def __init__(self) -> None:
        super().__init__()
        self.net[1] = NeedsTwoSamples()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        samples = 3 if batch_idx == 1 else None
        return F.cross_entropy(self.net(batch[0][:samples]), batch[1][:samples])


class HangingLayer(nn.Module):
    """Layer that never returns from its third call."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        import threading

        self.calls += 1
        if self.calls == 7:
            threading.Event().wait(20)
        return x


class WithHangingLayer(Simple):
    def __init__(self) -> None:
        super().__init__()
        self.net.append(HangingLayer())


def fit(
    context: RankContext,
    model: type[LightningModule],
    data: type[Samples] = Samples,
    patience: float = 30,
    **options: Any,
) -> None:
    """Train a model that has a fault."""
    seed_everything(3, verbose=False)
    trainer = Trainer(
        strategy=HeteroPipeStrategy(
            **{
                "microbatches": 2,
                "timeout": patience,
                "schedule": "gpipe",
                "profile": QUICK,
                **options,
            }
        ),
        accelerator="cpu",
        devices=context.world_size,
        plugins=[context.environment],
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    collate = (lambda samples: samples[0]) if data is UnsendableSamples else None
    trainer.fit(
        model(),
        None
        if model is BoringModel
        else DataLoader(data(False, 32), batch_size=8, collate_fn=collate),
    )


SETUP_ERRORS: list[tuple[type[LightningModule], dict[str, Any], str]] = [
    (BoringModel, {}, "has 1 layer, expected at least one for each of the 2 stages"),
    (Manual, {}, "automatic_optimization must be True"),
    (TwoOptimizers, {}, "configure_optimizers must return one optimizer"),
    (NeedsAllParameters, {}, "LBFGS needs a closure"),
    (ReadsInTraining, {}, "must be a batch, got dataloader_iter in ReadsInTraining"),
    (TwoNetworks, {}, "2 modules that could be the pipeline (net, other)"),
    (
        Simple,
        {"module": "nett"},
        "must be the name of a module in Simple, got 'nett'. Use one of ['net']",
    ),
    (Simple, {"stages": 3}, "stages must divide the number of ranks (2), got 3"),
    (
        Simple,
        {"device_map": [[0, 0]]},
        "must be lists of equal length with each rank, from 0 on, once",
    ),
    (Simple, {"emulate_speed": [1.0]}, "emulate_speed must have one entry per rank (2), got 1"),
    (Simple, {"plan": PipelinePlan(replicas=((0, 1),), split=(1, 1))}, "8 layers of 'net'"),
    (Simple, {"plan": PipelinePlan(replicas=((0, 1, 2),), split=(2, 3, 3))}, "each of the 2 ranks"),
]


def messages_of_early_failures(context: RankContext) -> list[str]:
    """Return the message of each error that is raised before the first step."""
    messages = []
    for model, options, _ in SETUP_ERRORS:
        with pytest.raises(ConfigError) as error:
            fit(context, model, **options)
        messages.append(str(error.value))
    return messages


class ReadsInEvaluation(Simple):
    """Model that reads its batches itself in every loop but training."""

    def validation_step(self, dataloader_iter: Any) -> None:
        next(dataloader_iter)

    def test_step(self, dataloader_iter: Any) -> None:
        next(dataloader_iter)

    def predict_step(self, dataloader_iter: Any) -> None:  # type: ignore[override]
        next(dataloader_iter)


def evaluate_with_iterators(context: RankContext) -> list[str]:
    """Return the errors of validation, test, predict and fit, all before their first batch."""
    trainer = Trainer(
        strategy=HeteroPipeStrategy(timeout=30),
        accelerator="cpu",
        devices=context.world_size,
        plugins=[context.environment],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    messages = []
    loader = DataLoader(Samples(False, 8), batch_size=8)
    for loop in (trainer.validate, trainer.test, trainer.predict):
        with pytest.raises(ConfigError) as error:
            loop(ReadsInEvaluation(), loader)
        messages.append(str(error.value))
    with pytest.raises(ConfigError) as error:
        trainer.fit(ReadsInEvaluation(), loader, loader)
    return [*messages, str(error.value)]


def test_an_iterator_in_evaluation_is_refused_by_the_step_s_name(pool: RankPool) -> None:
    steps = ("validation_step", "test_step", "predict_step", "validation_step")
    for messages in pool.run(evaluate_with_iterators, 2):
        for message, step in zip(messages, steps, strict=True):
            assert f"The first argument of {step} must be a batch, got dataloader_iter" in message
            assert f"Write {step}(self, batch, batch_idx)" in message


def test_faults_are_named_before_the_first_step(pool: RankPool) -> None:
    for messages in pool.run(messages_of_early_failures, 2):
        for message, (_, _, expected) in zip(messages, SETUP_ERRORS, strict=True):
            assert expected in message


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"schedule": "zigzag"}, ", got 'zigzag'"),
        ({"stages": 0}, ", got 0"),
        ({"microbatches": "many"}, ", got 'many'"),
        ({"microbatches": True}, ", got True"),
        ({"emulate_speed": [1.0, 0.0]}, ", got [1.0, 0.0]"),
        ({"timeout": "soon"}, "timeout"),
        ({"plan": "nowhere.json"}, "must be the path of a plan.json, got 'nowhere.json'"),
    ],
)
def test_the_constructor_rejects_bad_values(options: dict[str, Any], expected: str) -> None:
    with pytest.raises(ConfigError) as error:
        HeteroPipeStrategy(**options)
    assert expected in str(error.value)


def failures(pool: RankPool, *args: Any, ranks: int = 2, **options: Any) -> list[RankOutcome]:
    outcomes = pool.run_expecting_errors(fit, ranks, *args, keep=True, **options)
    assert all(outcome.error_type for outcome in outcomes), "every rank must end with an error"
    return outcomes


def assert_raised_on_all_ranks(
    outcomes: list[RankOutcome], error: type[Exception], expected: str
) -> None:
    """Check that one rank raises the error itself, and the others report it."""
    assert any(outcome.error_type == error.__name__ for outcome in outcomes)
    for outcome in outcomes:
        assert expected in outcome.error_message
        assert outcome.error_type in (error.__name__, PeerLostError.__name__)


@pytest.mark.parametrize(
    ("model", "data", "error", "expected"),
    [
        (CallsTwice, Samples, UnsupportedStepError, "and calls it more than once"),
        (Penalises, Samples, UnsupportedStepError, "a gradient through the pipelined module"),
        (
            NeverCalls,
            Samples,
            UnsupportedStepError,
            "once in every step, and returned without calling it",
        ),
        (
            ReturnsNone,
            Samples,
            UnsupportedStepError,
            "under 'loss', got NoneType",
        ),
        (
            RankDependentBatch,
            Samples,
            BatchMismatchError,
            "sees another batch than stage 0 (rank 0)",
        ),
        (Simple, FailingSamples, OSError, "the disk is gone"),
        (
            Simple,
            UnsendableSamples,
            ConfigError,
            "A builtins.object cannot be sent to another rank",
        ),
        (RaisesInStep, Samples, ZeroDivisionError, "a slip in user code"),
        (
            WithSingleSamples,
            Samples,
            UnsupportedStepError,
            "fails on a micro-batch of one sample (IndexError: one sample). The batch of 3 samples",
        ),
    ],
)
def test_an_error_in_a_step_is_raised_on_all_ranks(
    pool: RankPool,
    model: type[LightningModule],
    data: type[Samples],
    error: type[Exception],
    expected: str,
) -> None:
    plan = PipelinePlan(replicas=((0, 1),), split=(3, 5))
    assert_raised_on_all_ranks(failures(pool, model, data, plan=plan), error, expected)


def test_a_rank_that_hangs_is_named_with_its_stage_and_micro_batch(pool: RankPool) -> None:
    plan = PipelinePlan(replicas=((0, 1),), split=(3, 6))
    outcomes = failures(pool, WithHangingLayer, plan=plan, patience=3)
    assert outcomes[0].error_type == PeerTimeoutError.__name__
    expected = (
        "stage 0 (rank 0) waited 3 s for the gradients of micro-batch 0 from stage 1 (rank 1)"
    )
    assert expected in outcomes[0].error_message


def test_gradients_that_do_not_pass_the_module_are_allowed_in_a_step() -> None:
    inputs, output, weight = (torch.ones(3, requires_grad=True) for _ in range(3))
    guard = PipelinedWeightGuard()
    guard.record_call([inputs * 2], [output])
    loss = (output * weight).square().sum()
    with guard:
        assert torch.autograd.grad(loss, [output, weight], retain_graph=True)[0] is not None
        assert torch.autograd.grad(weight.square().sum() + inputs.sum(), inputs)[0] is not None
        with pytest.raises(UnsupportedStepError, match="through the pipelined module"):
            torch.autograd.grad(loss + inputs.sum(), inputs)
