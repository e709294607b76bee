"""Mixed precision over stages: an overflow skips one step on all stages, and bf16 trains as on a
single device."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from lightning.pytorch.plugins.precision import MixedPrecision
from torch import Tensor, nn
from torch.amp import GradScaler

from lightning_dlres import (
    HeteroPipeStrategy,
    PeerLostError,
    PipelinePlan,
    UnsupportedStepError,
)
from lightning_dlres.strategies.hetero_pipe.precision import overflow_shared
from tests.support.models import QUIET, Task, loaders
from tests.support.parity import ParityCase, assert_same_training, relative, run_case, train_on_rank
from tests.support.rank_pool import RankContext, RankPool
from tests.support.training_cases import Classifier, batches, trainer_for

CPU = torch.device("cpu")


class PlantOverflow(Callback):
    """Callback that makes a parameter's gradient infinite in one step, on the rank with it.

    In the steps `unused`, it removes the gradients of the first layer.
    """

    def __init__(self, parameter: str, step: int, unused: Sequence[int]) -> None:
        self.parameter, self.step, self.unused, self.scales = parameter, step, unused, []
        # Per step: the rank's weights after it.
        self.weights: list[dict[str, Tensor]] = []
        # Per step: True if all gradients were finite just before the optimizer's step.
        self.finite: list[bool] = []

    def on_after_backward(self, trainer: Trainer, module: LightningModule) -> None:
        gradient = dict(module.named_parameters())[self.parameter].grad
        if trainer.fit_loop.total_batch_idx == self.step and gradient is not None:
            gradient.view(-1)[0] = float("inf")
        if trainer.fit_loop.total_batch_idx in self.unused:
            for name, unused in module.named_parameters():
                if name.startswith("net.0.") and not unused.is_meta:
                    unused.grad = None

    def on_before_optimizer_step(self, trainer: Trainer, module: LightningModule, *_: Any) -> None:
        gradients = [p.grad for p in module.parameters() if p.grad is not None]
        self.finite.append(all(bool(gradient.isfinite().all()) for gradient in gradients))

    def on_train_batch_end(self, trainer: Trainer, module: LightningModule, *args: Any) -> None:
        self.scales.append(trainer.precision_plugin.scaler.get_scale())  # type: ignore[attr-defined]
        held = {n: p.detach().clone() for n, p in module.named_parameters() if not p.is_meta}
        self.weights.append(held)


def fit_16_mixed(
    context: RankContext | None,
    stages: int,
    parameter: str,
    unused: Sequence[int] = (),
) -> tuple[list[float], list[dict[str, Tensor]], dict[str, Tensor]]:
    """Train with a gradient scaler on the CPU, and an overflow in step 2."""
    scaler = GradScaler("cpu", init_scale=1024.0, growth_interval=2)
    plant, task = _fit(context, stages, scaler, parameter, unused=unused)
    return plant.scales, plant.weights, {n: p.detach() for n, p in task.named_parameters()}


def _fit(
    context: RankContext | None,
    stages: int,
    scaler: GradScaler,
    parameter: str,
    frozen: bool = False,
    unused: Sequence[int] = (),
    make: type[Task] = Task,
) -> tuple[PlantOverflow, Task]:
    seed_everything(3, verbose=False)
    task = make("mlp", "sgd", metrics=False)
    if frozen:
        task.net[0].requires_grad_(False)
    train, _ = loaders(task, 40, 8, False, 0, torch.float32)
    plant = PlantOverflow(parameter, 2, unused)
    plan = PipelinePlan(replicas=(tuple(range(stages)),), split=(2, 6) if stages == 2 else (8,))
    trainer = Trainer(
        strategy=HeteroPipeStrategy(plan=plan, microbatches=4) if context else "auto",
        accelerator="cpu",
        devices=stages,
        plugins=[
            MixedPrecision("16-mixed", "cpu", scaler),
            *([context.environment] if context else []),
        ],
        max_epochs=1,
        gradient_clip_val=0.7,
        callbacks=[plant],
        **QUIET,
    )
    trainer.fit(task, train)
    return plant, task


@pytest.mark.parametrize("parameter", ["net.0.weight", "net.7.bias"])
def test_an_overflow_in_one_stage_skips_the_step_on_all(pool: RankPool, parameter: str) -> None:
    results = pool.run(fit_16_mixed, 2, 2, parameter)
    (expected,) = pool.run(_plainly, 1, parameter)
    for scales, weights, final in results:
        assert scales == expected[0]
        assert scales[2] < scales[1], "the scaler backed off"
        for name, value in weights[2].items():
            assert torch.equal(value, weights[1][name]), f"{name} moved in the skipped step"
            assert not torch.equal(value, weights[3][name]), f"{name} stood still in the next step"
        for name, value in final.items():
            assert relative(value, expected[2][name]) < 2e-3, name


def _plainly(context: RankContext, parameter: str, unused: Sequence[int] = ()) -> Any:
    return fit_16_mixed(None, 1, parameter, unused=unused)


def fit_with_disabled_scaler(
    context: RankContext, stages: int
) -> tuple[list[bool], dict[str, Tensor]]:
    """Return the steps with finite gradients, and the weights after the overflow of step 2."""
    scaler = GradScaler("cpu", enabled=False)
    plant, _ = _fit(context if stages > 1 else None, stages, scaler, "net.0.weight")
    return plant.finite[:3], plant.weights[2]


def test_a_disabled_scaler_leaves_the_gradients_of_other_stages(pool: RankPool) -> None:
    (first, _), (last, weights) = pool.run(fit_with_disabled_scaler, 2, 2)
    ((_, expected),) = pool.run(fit_with_disabled_scaler, 1, 1)
    assert first == [True, True, False]
    assert last == [True, True, True]
    for name, value in weights.items():
        assert relative(value, expected[name]) < 2e-3, name


def test_a_stage_without_gradients_in_a_step_steps_as_on_a_single_device(pool: RankPool) -> None:
    unused = (1, 2)  # the overflow is in step 2
    results = pool.run(fit_16_mixed, 2, 2, "net.7.bias", unused)
    (expected,) = pool.run(_plainly, 1, "net.7.bias", unused)
    for scales, weights, final in results:
        assert scales == expected[0]
        assert scales[2] < scales[1], "the scaler backed off"
        for step in unused:
            for name, value in weights[step].items():
                moved = step == 1 and not name.startswith("net.0.")
                assert torch.equal(value, weights[step - 1][name]) != moved, name
        for name, value in final.items():
            assert relative(value, expected[2][name]) < 2e-3, name


@pytest.mark.parametrize("gradient", ["channels_last", "scalar"])
def test_an_overflow_of_another_rank_reaches_gradients_of_any_layout(gradient: str) -> None:
    parameter = nn.Parameter(torch.ones(() if gradient == "scalar" else (2, 3, 4, 5)))
    parameter.grad = {
        "channels_last": torch.ones(2, 3, 4, 5).contiguous(memory_format=torch.channels_last),
        "scalar": torch.tensor(1.0),
    }[gradient]
    assert_step_skipped([nn.Parameter(torch.ones(0)), parameter])


def test_a_rank_without_gradients_skips_a_step_after_an_overflow_elsewhere() -> None:
    frozen = nn.Parameter(torch.ones(2), requires_grad=False)
    integers = nn.Parameter(torch.ones(1, dtype=torch.int8), requires_grad=False)
    remote = nn.Parameter(torch.ones(1, device="meta"))
    assert_step_skipped([integers, remote, frozen])
    assert_step_skipped([integers, remote])
    assert_step_skipped([integers, remote, frozen, nn.Parameter(torch.ones(3))])


@pytest.mark.parametrize("indices", [[[0, 2, 2]], [[]]], ids=["repeated", "empty"])
def test_an_overflow_of_another_rank_reaches_sparse_gradients(indices: list[list[int]]) -> None:
    parameter = nn.Parameter(torch.ones(5, 3))
    values = torch.ones(len(indices[0]), 3)
    parameter.grad = torch.sparse_coo_tensor(
        torch.tensor(indices).long(), values, (5, 3), check_invariants=True
    )
    assert_step_skipped([parameter])


@pytest.mark.parametrize(
    ("value", "dtype"), [(math.inf, torch.float32), (math.nan, torch.float32), (4e4, torch.float16)]
)
def test_an_overflow_in_a_sparse_gradient_is_shared(value: float, dtype: torch.dtype) -> None:
    # The float16 values are finite, but their sum is not.
    parameter = nn.Parameter(torch.ones(5, 3, dtype=dtype))
    values = torch.full((2, 3), value, dtype=dtype)
    parameter.grad = torch.sparse_coo_tensor(
        torch.tensor([[2, 2]]), values, (5, 3), check_invariants=True
    )
    shared = []
    optimizer = torch.optim.SGD([parameter], 0.1)
    with overflow_shared(
        optimizer, lambda: None, lambda flag: not shared.append(flag), CPU
    ) as closure:
        closure()
    assert shared == [True]


def assert_step_skipped(parameters: list[nn.Parameter]) -> None:
    """Check that a step is skipped on a rank with these parameters after an overflow elsewhere."""
    weights = [p.detach().clone() for p in parameters]
    gradients = [p.grad for p in parameters]
    optimizer = torch.optim.SGD(parameters, 0.1)
    scaler = GradScaler("cpu", init_scale=4.0)
    scaler.scale(torch.ones(()))  # creates the scale
    with overflow_shared(optimizer, lambda: "loss", lambda _: True, CPU) as closure:
        assert closure() == "loss"
        scaler.step(optimizer)
        scaler.update()
    assert scaler.get_scale() == 2.0
    assert len(optimizer.param_groups[0]["params"]) == len(parameters)
    for parameter, weight, gradient in zip(parameters, weights, gradients, strict=True):
        assert parameter.is_meta or torch.equal(parameter, weight)
        assert parameter.grad is gradient


class OptimizesLastLayers(Task):
    """Task whose optimizer has no parameter of the first stage, although all are trainable."""

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.net[2:].parameters(), lr=0.05)


def fit_untrained_stage(
    context: RankContext | None, stages: int, kind: str
) -> tuple[list[float], dict[str, Tensor]]:
    """Train with a first stage that stays as it is, and an overflow in the other one."""
    scale = 1.0 if kind == "frozen, scale 1" else 1024.0
    scaler = GradScaler("cpu", init_scale=scale, growth_interval=2)
    if kind == "not in the optimizer":
        plant, task = _fit(context, stages, scaler, "net.7.bias", make=OptimizesLastLayers)
    else:
        plant, task = _fit(context, stages, scaler, "net.7.bias", frozen=True)
    return plant.scales, {n: p.detach() for n, p in task.named_parameters()}


def untrained_stage_plainly(context: RankContext, kind: str) -> Any:
    return fit_untrained_stage(None, 1, kind)


@pytest.mark.parametrize("kind", ["frozen", "frozen, scale 1", "not in the optimizer"])
def test_an_untrained_stage_trains_as_on_a_single_device_with_a_scaler(
    pool: RankPool, kind: str
) -> None:
    (expected,) = pool.run(untrained_stage_plainly, 1, kind)
    for scales, weights in pool.run(fit_untrained_stage, 2, 2, kind):
        assert scales == expected[0]
        assert scales[2] < scales[1], "the scaler backed off"
        for name, value in weights.items():
            assert relative(value, expected[1][name]) < 2e-3, name


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_bf16_mixed_equals_a_single_device(pool: RankPool, schedule: str) -> None:
    # One micro-batch, so that both compute the same bf16 products in the same order.
    case = ParityCase(precision="bf16-mixed", schedule=schedule, microbatches=1, epochs=1)
    (expected,) = pool.run(_plain_case, 1, case)
    assert_same_training(pool.run(train_on_rank, 2, case), expected, 1e-5)


def _plain_case(context: RankContext, case: ParityCase) -> Any:
    return run_case(None, case, None)


class ChoosesPrecision(Classifier):
    """Model that calls its module in full precision in some places.

    Args:
        in_training: True: in training, too.
    """

    def __init__(self, in_training: bool) -> None:
        super().__init__()
        self._in_training = in_training

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        with torch.autocast("cpu", enabled=not self._in_training):
            return super().training_step(batch, batch_idx)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        exact = torch.autocast("cpu", enabled=False)
        for context in (nullcontext(), exact):
            with context:
                output = self.net(batch[0])
            self.observed += [torch.finfo(output.dtype).eps, float(output.double().sum())]

    def on_validation_epoch_end(self) -> None:
        # Plain training calls hooks without autocast.
        output = self.net(torch.ones(2, 16))
        self.observed += [torch.finfo(output.dtype).eps, float(output.double().sum())]


def evaluate_in_two_precisions(context: RankContext | None) -> list[float]:
    model = ChoosesPrecision(in_training=False)
    trainer = trainer_for(context, precision="bf16-mixed", limit_val_batches=1)
    trainer.fit(model, batches(), batches())
    return model.observed


def test_calls_outside_of_training_run_in_the_precision_of_the_caller(pool: RankPool) -> None:
    expected = evaluate_in_two_precisions(None)
    for observed in pool.run(evaluate_in_two_precisions, 2):
        assert observed[::2] == expected[::2]
        # Sums of logits differ as much as the weights of training in bfloat16.
        assert observed[1::2] == pytest.approx(expected[1::2], abs=0.5)


def train_in_full_precision(context: RankContext) -> str:
    trainer = trainer_for(context, precision="bf16-mixed")
    # Rank 1 names the error of rank 0.
    with pytest.raises((UnsupportedStepError, PeerLostError)) as caught:
        trainer.fit(ChoosesPrecision(in_training=True), batches())
    return str(caught.value)


def test_a_call_in_another_precision_is_refused_in_training(pool: RankPool) -> None:
    for error in pool.run(train_in_full_precision, 2):
        assert "must call 'net' in the precision of the Trainer" in error


class LogsNumbers(Classifier):
    """A model that logs a Python number, and reads nothing back."""

    def __init__(self) -> None:
        super().__init__()
        self.net.double()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.log("rate", 0.1)
        loss: Tensor = super().training_step([batch[0].double(), batch[1]], batch_idx)
        return loss


def logged_number(context: RankContext, schedule: str) -> tuple[float, torch.dtype]:
    trainer = trainer_for(context, schedule=schedule, precision="64-true", max_steps=1)
    trainer.fit(LogsNumbers(), batches())
    logged = trainer.callback_metrics["rate"]
    return logged.item(), logged.dtype


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_numbers_are_logged_in_double_precision(pool: RankPool, schedule: str) -> None:
    assert pool.run(logged_number, 2, schedule) == [(0.1, torch.float64)] * 2
