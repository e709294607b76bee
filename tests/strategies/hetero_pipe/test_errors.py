"""Tests of error messages: they name the argument, the rule, the value and a fix."""

from __future__ import annotations

import sys
import threading
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
from lightning_dlres.strategies.hetero_pipe.calls.needs_cut import NeedsCutStepError
from lightning_dlres.strategies.hetero_pipe.step.parameter_guard import PipelinedWeightGuard
from tests.support.models import QUIET, Samples, mlp
from tests.support.rank_pool import RankContext, RankOutcome, RankPool
from tests.support.training_cases import QUICK


class Faultless(LightningModule):
    """Module without a fault. Each subclass has one fault."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.net = mlp(0.0)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return F.cross_entropy(self.net(batch[0]), batch[1])

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class CallsNetTwice(Faultless):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return F.cross_entropy(self.net(batch[0]) + self.net(-batch[0]), batch[1])


class PenalisesInputGradient(Faultless):
    """Module with a penalty on the gradient of its input, if it has such a gradient."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x = batch[0].clone().requires_grad_()
        out = self.net(x)
        (gradient,) = torch.autograd.grad(out.sum(), x, create_graph=True, allow_unused=True)
        return out.mean() if gradient is None else out.mean() + gradient.square().mean()


class NeverCallsNet(Faultless):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return batch[0].sum() * self.net[0].weight.sum()


class ReturnsNoLoss(Faultless):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return {"output": self.net(batch[0])}


class ManualOptimization(Faultless):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False


class TwoOptimizers(Faultless):
    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD(self.net[i].parameters(), lr=0.1) for i in (0, 2)]


class NeedsAllParameters(Faultless):
    def configure_optimizers(self) -> Any:
        return torch.optim.LBFGS(self.parameters())


class RankDependentBatch(Faultless):
    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return [batch[0] + self.global_rank, batch[1]]


class ReadsIteratorInTraining(Faultless):
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


class RaisesInStep(Faultless):
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


class WithSingleSamples(Faultless):
    """Module whose second step has three samples: micro-batches of two and of one."""

    def __init__(self) -> None:
        super().__init__()
        self.net[1] = NeedsTwoSamples()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        samples = 3 if batch_idx == 1 else None
        return F.cross_entropy(self.net(batch[0][:samples]), batch[1][:samples])


class ReadsOtherRows(nn.Module):
    """Layer whose rows are nodes of a graph: it reads those of the whole batch."""

    def forward(self, input: Tensor) -> Tensor:
        is_whole = len(input) == 8
        if torch.is_grad_enabled() == self.fails_in_training and not is_whole:
            raise IndexError("no row 7")
        return input

    fails_in_training = True


class TrainsOnGraphs(Faultless):
    def __init__(self) -> None:
        super().__init__()
        self.net[1] = ReadsOtherRows()


class ValidatesOnGraphs(TrainsOnGraphs):
    def __init__(self) -> None:
        super().__init__()
        self.net[1].fails_in_training = False

    def val_dataloader(self) -> Any:
        return DataLoader(Samples(False, 8), batch_size=8)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.net(batch[0])


class CutSingleSamples(Faultless):
    """Module with a forward of its own, of which one layer fails on a single sample."""

    def __init__(self) -> None:
        super().__init__()
        self.net = OwnForward(NeedsTwoSamples(), *self.net)


class OwnForward(nn.Sequential):
    def forward(self, input: Tensor) -> Tensor:
        for layer in self:
            input = layer(input)
        return input


class CompilesItsList(Faultless):
    def __init__(self) -> None:
        super().__init__()
        self.net.compile(backend="eager")


class WrapsItsList(Faultless):
    def __init__(self) -> None:
        super().__init__()
        self.net = torch.compile(self.net, backend="eager")  # type: ignore[assignment]


class CompilesALayer(Faultless):
    def __init__(self) -> None:
        super().__init__()
        self.net = OwnForward(*self.net)
        self.net[2].compile(backend="eager")


class ScriptsALayer(Faultless):
    def __init__(self) -> None:
        super().__init__()
        self.net[2] = torch.jit.script(self.net[2])


class HangingLayer(nn.Module):
    """Layer that blocks in its seventh call, longer than the timeout of the test."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        if self.calls == 7:
            threading.Event().wait(20)
        return x


class WithHangingLayer(Faultless):
    def __init__(self) -> None:
        super().__init__()
        self.net.append(HangingLayer())


def fit(
    context: RankContext,
    model: type[LightningModule],
    data: type[Samples] = Samples,
    peer_timeout: float = 30,
    **options: Any,
) -> None:
    """Train a model that has a fault.

    `peer_timeout` is the strategy's `timeout`: `RankPool.run` has an argument of that name.
    """
    seed_everything(3, verbose=False)
    trainer = Trainer(
        strategy=HeteroPipeStrategy(
            **{
                "microbatches": 2,
                "timeout": peer_timeout,
                "schedule": "gpipe",
                "profile": QUICK,
                **options,
            }
        ),
        accelerator="cpu",
        devices=context.world_size,
        plugins=[context.environment],
        max_epochs=1,
        **QUIET,
    )
    collate = (lambda samples: samples[0]) if data is UnsendableSamples else None
    trainer.fit(
        model(),
        None
        if model is BoringModel
        else DataLoader(data(False, 32), batch_size=8, collate_fn=collate),
    )


# Faults that are found before the first step: module, options of the strategy, part of the message.
SETUP_ERRORS: list[tuple[type[LightningModule], dict[str, Any], str]] = [
    (
        BoringModel,
        {},
        "must be one that can be cut into 2 stages, got one that cannot be cut: Linear",
    ),
    (
        CutSingleSamples,
        {"module": "net", "microbatches": 8},
        "got one that cannot be cut: A layer fails on a micro-batch of one sample (IndexError: one",
    ),
    (CutSingleSamples, {"module": "net", "microbatches": 8}, f"It is at {__file__}:"),
    (
        CompilesItsList,
        {},
        "'net' must be a list of layers, got one that torch.compile has compiled",
    ),
    (WrapsItsList, {}, "'net' must be a list of layers, got one that torch.compile has compiled"),
    (CompilesALayer, {"module": "net"}, "CompilesALayer.net.2 must not be compiled where the code"),
    (CompilesALayer, {"module": "training_step"}, "CompilesALayer.net.2 must not be compiled"),
    (ScriptsALayer, {}, "'net.2' must be a Python module, got one of TorchScript"),
    (ManualOptimization, {}, "automatic_optimization must be True"),
    (TwoOptimizers, {}, "configure_optimizers must return one optimizer"),
    (NeedsAllParameters, {}, "LBFGS needs a closure"),
    (
        ReadsIteratorInTraining,
        {},
        "must be a batch, got dataloader_iter in ReadsIteratorInTraining",
    ),
    (
        Faultless,
        {"module": "nett"},
        "must be the name of a module in Faultless, got 'nett'. Use one of ['net']",
    ),
    (Faultless, {"stages": 3}, "stages must divide the number of ranks (2), got 3"),
    (
        Faultless,
        {"device_map": [[0, 0]]},
        "must be lists of equal length with each rank, from 0 on, once",
    ),
    (Faultless, {"emulate_speed": [1.0]}, "emulate_speed must have one entry per rank (2), got 1"),
    (Faultless, {"plan": PipelinePlan(replicas=((0, 1),), split=(1, 1))}, "8 layers of 'net'"),
    (
        Faultless,
        {"plan": PipelinePlan(replicas=((0, 1, 2),), split=(2, 3, 3))},
        "each of the 2 ranks",
    ),
]


def setup_error_messages(context: RankContext) -> list[str]:
    """Return the message of each error that is raised before the first step."""
    messages = []
    for model, options, _ in SETUP_ERRORS:
        with pytest.raises(ConfigError) as error:
            fit(context, model, **options)
        messages.append(str(error.value))
    return messages


class ReadsIteratorInEvaluation(Faultless):
    """Module whose evaluation steps take `dataloader_iter`."""

    def validation_step(self, dataloader_iter: Any) -> None:
        next(dataloader_iter)

    def test_step(self, dataloader_iter: Any) -> None:
        next(dataloader_iter)

    def predict_step(self, dataloader_iter: Any) -> None:  # type: ignore[override]
        next(dataloader_iter)


def evaluate_with_iterators(context: RankContext) -> list[str]:
    """Return the error messages of validate, test, predict and fit, raised before any batch."""
    trainer = Trainer(
        strategy=HeteroPipeStrategy(timeout=30),
        accelerator="cpu",
        devices=context.world_size,
        plugins=[context.environment],
        **QUIET,
    )
    messages = []
    loader = DataLoader(Samples(False, 8), batch_size=8)
    for loop in (trainer.validate, trainer.test, trainer.predict):
        with pytest.raises(ConfigError) as error:
            loop(ReadsIteratorInEvaluation(), loader)
        messages.append(str(error.value))
    with pytest.raises(ConfigError) as error:
        trainer.fit(ReadsIteratorInEvaluation(), loader, loader)
    return [*messages, str(error.value)]


def test_the_error_names_the_evaluation_step_that_takes_an_iterator(pool: RankPool) -> None:
    steps = ("validation_step", "test_step", "predict_step", "validation_step")
    for messages in pool.run(evaluate_with_iterators, 2):
        for message, step in zip(messages, steps, strict=True):
            assert f"The first argument of {step} must be a batch, got dataloader_iter" in message
            assert f"Write {step}(self, batch, batch_idx)" in message


def test_setup_errors_name_the_fault(pool: RankPool) -> None:
    for messages in pool.run(setup_error_messages, 2):
        for message, (_, _, expected) in zip(messages, SETUP_ERRORS, strict=True):
            assert expected in message


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"schedule": "zigzag"}, ", got 'zigzag'"),
        ({"stages": 0}, ", got 0"),
        (
            {"stages": 2, "device_map": [[0, 1, 2, 3]]},
            "stages must be 4, the number of stages of device_map, got 2",
        ),
        (
            {"stages": 1, "plan": PipelinePlan(replicas=((0, 1),), split=(2, 3))},
            "stages must be 2, the number of stages of plan, got 1",
        ),
        (
            {"device_map": [[1, 0]], "plan": PipelinePlan(replicas=((0, 1),), split=(2, 3))},
            "device_map must be [[0, 1]], the replicas of plan, got [[1, 0]]",
        ),
        ({"microbatches": "many"}, ", got 'many'"),
        ({"microbatches": True}, ", got True"),
        ({"emulate_speed": [1.0, 0.0]}, ", got [1.0, 0.0]"),
        ({"timeout": "soon"}, "timeout"),
        ({"plan": "nowhere.json"}, "must be the path of a plan.json, got 'nowhere.json'"),
    ],
)
def test_the_constructor_refuses_invalid_arguments(options: dict[str, Any], expected: str) -> None:
    with pytest.raises(ConfigError) as error:
        HeteroPipeStrategy(**options)
    assert expected in str(error.value)


def failed_outcomes(
    pool: RankPool, *args: Any, ranks: int = 2, **options: Any
) -> list[RankOutcome]:
    """Run `fit` on ranks that must all fail; return their outcomes."""
    outcomes = pool.run_expecting_errors(fit, ranks, *args, keep=True, **options)
    assert all(outcome.error_type for outcome in outcomes), "every rank must end with an error"
    return outcomes


def assert_raised_on_all_ranks(
    outcomes: list[RankOutcome], error: type[Exception], expected: str
) -> None:
    """Check that a rank raises the error, and the other ranks raise it or report it."""
    assert any(outcome.error_type == error.__name__ for outcome in outcomes)
    for outcome in outcomes:
        assert expected in outcome.error_message
        assert outcome.error_type in (error.__name__, PeerLostError.__name__)


@pytest.mark.parametrize(
    ("model", "data", "error", "expected"),
    [
        (
            CallsNetTwice,
            Samples,
            NeedsCutStepError,
            "exactly once in every step, got a second call",
        ),
        (
            PenalisesInputGradient,
            Samples,
            UnsupportedStepError,
            "a gradient through the pipelined module",
        ),
        (
            NeverCallsNet,
            Samples,
            NeedsCutStepError,
            "exactly once in every step, got a step that returned without a call",
        ),
        (
            ReturnsNoLoss,
            Samples,
            UnsupportedStepError,
            "under 'loss', got dict",
        ),
        (
            RankDependentBatch,
            Samples,
            BatchMismatchError,
            "sees another batch than stage 0 (rank 0)",
        ),
        (Faultless, FailingSamples, OSError, "the disk is gone"),
        (
            Faultless,
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
    assert_raised_on_all_ranks(failed_outcomes(pool, model, data, plan=plan), error, expected)


@pytest.mark.skipif(sys.version_info < (3, 11), reason="errors take notes since Python 3.11")
@pytest.mark.parametrize("model", [TrainsOnGraphs, ValidatesOnGraphs])
def test_an_error_of_a_layer_says_that_it_got_a_part_of_the_batch(
    pool: RankPool, model: type[LightningModule]
) -> None:
    plan = PipelinePlan(replicas=((0, 1),), split=(3, 5))
    outcomes = failed_outcomes(pool, model, Samples, plan=plan)
    assert_raised_on_all_ranks(outcomes, IndexError, "no row 7")
    assert "4 of 8 rows of the batch. If rows are no samples" in outcomes[0].traceback


def test_the_timeout_error_names_the_stage_and_the_micro_batch(pool: RankPool) -> None:
    plan = PipelinePlan(replicas=((0, 1),), split=(3, 6))
    outcomes = failed_outcomes(pool, WithHangingLayer, plan=plan, peer_timeout=3)
    assert outcomes[0].error_type == PeerTimeoutError.__name__
    expected = (
        "stage 0 (rank 0) waited 3 s for the gradients of micro-batch 0 from stage 1 (rank 1)"
    )
    assert expected in outcomes[0].error_message


def test_autograd_grad_outside_of_the_pipelined_module_is_allowed() -> None:
    inputs, output, weight = (torch.ones(3, requires_grad=True) for _ in range(3))
    guard = PipelinedWeightGuard()
    guard.record_call([inputs * 2], [output])
    loss = (output * weight).square().sum()
    with guard:
        assert torch.autograd.grad(loss, [output, weight], retain_graph=True)[0] is not None
        assert torch.autograd.grad(weight.square().sum() + inputs.sum(), inputs)[0] is not None
        with pytest.raises(UnsupportedStepError, match="through the pipelined module"):
            torch.autograd.grad(loss + inputs.sum(), inputs)
