"""Steps by single pushes are those of a naive reference, and with one worker those of torch."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.optim import SGD, Adam, AdamW, NAdam, Optimizer, RMSprop

from lightning_dlres.paramserver.execute.server.optimizers import ServerOptimizers, optimizer_name
from lightning_dlres.paramserver.protocol import OptimizerSetup
from tests.support.paramserver_shards import small_keys

SIZE, LR = 5, 0.1
workers_strategy, seeds = st.integers(2, 9), st.integers(0, 1 << 32)


def gradients(seed: int, count: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [
        torch.randn(SIZE, generator=generator, dtype=torch.float64).float() for _ in range(count)
    ]


def start_value() -> Tensor:
    return torch.linspace(-1.0, 2.0, SIZE)


def pushed(
    kind: type[Optimizer], options: dict[str, Any], workers: int, pushes: list[Tensor]
) -> list[Tensor]:
    """Return the parameter after each push."""
    (key,), parameter = small_keys([SIZE]), nn.Parameter(start_value(), requires_grad=False)
    optimizers = ServerOptimizers(
        [OptimizerSetup(name=optimizer_name(kind), groups=[options])], [key], [parameter]
    )
    values = []
    for gradient in pushes:
        parameter.grad = gradient.clone()
        optimizers.update(key, parameter, options, workers)
        values.append(parameter.detach().clone())
    return values


def assert_close(ours: list[Tensor], theirs: list[Tensor]) -> None:
    for mine, reference in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine.double(), reference.double(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (SGD, {"lr": LR}),
        (SGD, {"lr": LR, "momentum": 0.9, "nesterov": True, "weight_decay": 0.1}),
        (SGD, {"lr": LR, "momentum": 0.9, "dampening": 0.3, "maximize": True}),
        (Adam, {"lr": LR, "weight_decay": 0.1, "amsgrad": True}),
        (AdamW, {"lr": LR}),
        (RMSprop, {"lr": LR}),
    ],
)
def test_one_worker_steps_as_the_optimizer_itself(
    kind: type[Optimizer], options: dict[str, Any]
) -> None:
    parameter = nn.Parameter(start_value())
    optimizer = kind([parameter], **options)  # type: ignore[arg-type]
    pushes = gradients(0, 6)
    for gradient, ours in zip(pushes, pushed(kind, options, 1, pushes), strict=True):
        parameter.grad = gradient.clone()
        optimizer.step()
        assert torch.equal(ours, parameter.detach())


@given(
    seed=seeds,
    workers=workers_strategy,
    momentum=st.floats(0.1, 0.99),
    decay=st.sampled_from([0.0, 0.2]),
    nesterov=st.booleans(),
    maximize=st.booleans(),
)
def test_sgd_is_where_momentum_carries_it_over_the_pushes_of_others(
    seed: int, workers: int, momentum: float, decay: float, nesterov: bool, maximize: bool
) -> None:
    """The reference keeps plain parameters, and looks ahead from them after each push."""
    options = {
        "lr": LR,
        "momentum": momentum,
        "weight_decay": decay,
        "nesterov": nesterov,
        "maximize": maximize,
    }
    pushes = gradients(seed, 12)
    plain, ahead, expected = start_value().double(), start_value().double(), []
    velocity = torch.zeros(SIZE, dtype=torch.float64)
    others = workers if nesterov else workers - 1
    reach = sum(momentum**push for push in range(1, others + 1))
    for gradient in pushes:
        # Workers see the parameters ahead, and so does weight decay.
        total = (-1 if maximize else 1) * gradient.double() + decay * ahead
        velocity = momentum * velocity + total
        plain = plain - LR / workers * velocity
        ahead = plain - LR / workers * reach * velocity
        expected.append(ahead)
    assert_close(pushed(SGD, options, workers, pushes), expected)


@given(
    workers=workers_strategy,
    momentum=st.floats(0.1, 0.9),
    dampening=st.sampled_from([0.0, 0.4]),
)
def test_a_gradient_moves_a_parameter_as_far_as_in_a_joint_step(
    workers: int, momentum: float, dampening: float
) -> None:
    options = {"lr": LR, "momentum": momentum, "dampening": dampening}
    # The optimizer does not dampen its first gradient.
    pushes = [torch.zeros(SIZE), torch.ones(SIZE), *(torch.zeros(SIZE) for _ in range(300))]
    moved = start_value() - pushed(SGD, options, workers, pushes)[-1]
    expected = torch.full((SIZE,), LR / workers * (1 - dampening) / (1 - momentum))
    torch.testing.assert_close(moved, expected, rtol=1e-3, atol=1e-5)


@given(
    seed=seeds,
    workers=workers_strategy,
    kind=st.sampled_from([Adam, AdamW]),
    amsgrad=st.booleans(),
    maximize=st.booleans(),
)
def test_adam_follows_the_rule_for_smaller_batches_and_looks_ahead(
    seed: int, workers: int, kind: type[Optimizer], amsgrad: bool, maximize: bool
) -> None:
    decay, eps, root = 0.1, 1e-3, math.sqrt(workers)
    options = {
        "lr": LR,
        "weight_decay": decay,
        "betas": (0.9, 0.99),
        "eps": eps,
        "amsgrad": amsgrad,
        "maximize": maximize,
    }
    pushes, expected = gradients(seed, 12), []
    beta1, beta2 = 0.9 ** (1 / workers), 0.99
    value, average, square, most = start_value().double(), 0.0, 0.0, torch.zeros(SIZE).double()
    later = 0.9 ** ((workers - 1) / workers)
    for number, push in enumerate(pushes, start=1):
        gradient = (-1 if maximize else 1) * push.double()
        if kind is AdamW:
            value = value * (1 - LR * decay / workers)
        else:
            gradient = gradient + decay * value
        average = beta1 * average + (1 - beta1) * gradient
        square = beta2 * square + (1 - beta2) * gradient**2
        most = torch.maximum(most, square)
        size = ((most if amsgrad else square) / (1 - beta2**number)).sqrt() + eps
        direction = later * average / (1 - beta1**number) + (1 - later) * gradient
        value = value - LR / root * direction / size
        expected.append(value)
    assert_close(pushed(kind, options, workers, pushes), expected)


@pytest.mark.parametrize("kind", [NAdam, RMSprop])
def test_other_optimizers_step_with_a_share_of_the_learning_rate(kind: type[Optimizer]) -> None:
    pushes = gradients(1, 5)
    shared = pushed(kind, {"lr": LR / 4}, 1, pushes)
    assert all(map(torch.equal, pushed(kind, {"lr": LR}, 4, pushes), shared))
