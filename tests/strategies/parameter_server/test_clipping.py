"""Clipping by the servers: the same updates as clipping by the ranks, or an error."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import example, given, reject
from hypothesis import strategies as st
from lightning.pytorch import LightningModule
from lightning.pytorch.plugins.precision import Precision
from torch import Tensor, nn

from lightning_dlres.core.errors import UnsupportedStepError
from lightning_dlres.strategies.parameter_server.clipping import (
    Clipping,
    ClippingBounds,
    trainer_bounds,
)

BOUNDS = {
    "clip by norm": ("norm", 0.05),
    "clip by a larger norm": ("norm", 0.5),
    "clip by value": ("value", 0.02),
    "clip by a larger value": ("value", 0.2),
}
ACTIONS = (
    "backward",
    "backward of one layer",
    "backward of the other layer",
    "backward with a graph",
    "step",
    "zero to none",
    "zero",
    "scale",
    "replace",
    *BOUNDS,
)


class WithoutTrainer(Precision):
    def pre_backward(self, tensor: Tensor, module: LightningModule) -> Tensor:
        """Return the tensor; there are no callbacks to call."""
        return tensor


def train(
    actions: Sequence[str], clipping: Clipping | None, *, reuses_memory: bool = False
) -> list[Tensor]:
    """Return the parameters after each step.

    Args:
        actions: Some of `ACTIONS`.
        clipping: Clips in the step, as servers do; None clips at once, as plain training does.
        reuses_memory: Whether all gradients of a parameter have the same memory, as in a mirror.
    """
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2)).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    precision = WithoutTrainer()
    if reuses_memory:
        for parameter in model.parameters():
            parameter.register_post_accumulate_grad_hook(moved_to(torch.empty_like(parameter)))
    if clipping is not None:
        clipping.attach(precision)
        for parameter in model.parameters():
            parameter.register_post_accumulate_grad_hook(clipping.renew)  # type: ignore[arg-type]
    generator = torch.Generator().manual_seed(0)
    seen = []
    for action in actions:
        gradients = [p for p in model.parameters() if p.grad is not None]
        if action.startswith("backward"):
            x = torch.randn(5, 4, dtype=torch.double, generator=generator)
            hidden = model[:2](x)
            last = hidden.detach() if action == "backward of one layer" else hidden
            output = hidden if action == "backward of the other layer" else model[2](last)
            loss = output.square().sum()
            # The strategy calls it, too.
            precision.pre_backward(loss, LightningModule())
            loss.backward(create_graph=action == "backward with a graph")
        elif action == "step":
            step(optimizer, ClippingBounds() if clipping is None else clipping.of(optimizer))
            seen += [p.detach().clone() for p in model.parameters()]
        elif action.startswith("zero"):
            optimizer.zero_grad(set_to_none=action == "zero to none")
        elif action == "scale":
            with torch.no_grad():
                for parameter in gradients:
                    parameter.grad *= 0.5  # type: ignore[operator]
        elif action == "replace":
            for parameter in gradients:
                assert parameter.grad is not None
                parameter.grad = parameter.grad.detach() * 0.5
        else:
            algorithm, bound = BOUNDS[action]
            precision.clip_gradients(optimizer, bound, algorithm)  # type: ignore[arg-type]
    return seen


def moved_to(memory: Tensor) -> Callable[[Tensor], None]:
    """Return a hook that moves each new gradient to the same memory."""

    def move(parameter: Tensor) -> None:
        gradient = parameter.grad
        if gradient is not None and gradient.data_ptr() != memory.data_ptr():
            parameter.grad = memory.detach().copy_(gradient.detach())

    return move


def step(optimizer: torch.optim.Optimizer, bounds: ClippingBounds) -> None:
    """Step with clipped gradients, and leave the gradients as they were."""
    parameters = [p for p in optimizer.param_groups[0]["params"] if p.grad is not None]
    before = [parameter.grad for parameter in parameters]
    for parameter in parameters:
        parameter.grad = parameter.grad.detach().clone()
    if bounds.max_norm is not None:
        torch.nn.utils.clip_grad_norm_(parameters, bounds.max_norm)
    if bounds.max_value is not None:
        torch.nn.utils.clip_grad_value_(parameters, bounds.max_value)
    optimizer.step()
    for parameter, gradient in zip(parameters, before, strict=True):
        parameter.grad = gradient


@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph")
@given(st.lists(st.sampled_from(ACTIONS), min_size=3, max_size=14))
@example(["backward", "clip by norm", "backward", "step"])
@example(["backward", "clip by norm", "backward with a graph", "step"])
@example(["backward", "clip by norm", "zero", "backward", "step"])
@example(["backward", "clip by norm", "replace", "step"])
@example(["backward", "clip by norm", "replace", "backward", "step"])
@example(["backward of one layer", "clip by norm", "backward", "step"])
def test_steps_equal_those_of_plain_training_or_raise(actions: list[str]) -> None:
    try:
        plain = train(actions, None)
    except RuntimeError:
        # Torch clips no gradients by value, and changes none that has a graph.
        reject()
    try:
        ours = train(actions, Clipping())
    except UnsupportedStepError:
        return
    assert len(ours) == len(plain)
    # Norms are clipped with a small constant, so twice is not exactly once.
    assert all(torch.allclose(a, b, atol=1e-4) for a, b in zip(ours, plain, strict=True))


CLIPPED = ["backward", "clip by norm"]


@pytest.mark.parametrize(
    "actions",
    [
        [*CLIPPED, "step", "zero to none", "backward", "step"],
        [*CLIPPED, "zero to none", "backward", "step"],
        [*CLIPPED, "step", "step"],
        [*CLIPPED, "clip by a larger norm", "step"],
        ["backward", "clip by a larger norm", "clip by norm", "clip by value", "step"],
        ["backward", "clip by value", "clip by a larger value", "step"],
        ["backward", "backward", "clip by norm", "step", "zero to none", *CLIPPED, "step"],
        ["backward of one layer", "clip by norm", "step", "zero to none", *CLIPPED, "step"],
        ["backward", *CLIPPED, "step", "zero to none", "backward", "backward", *CLIPPED, "step"],
    ],
    ids=" ".join,
)
@pytest.mark.parametrize("reuses_memory", [False, True])
def test_steps_as_users_have_them_are_clipped_as_in_plain_training(
    actions: list[str], reuses_memory: bool
) -> None:
    ours, plain = train(actions, Clipping(), reuses_memory=reuses_memory), train(actions, None)
    assert all(torch.allclose(a, b, atol=1e-6) for a, b in zip(ours, plain, strict=True))


@pytest.mark.parametrize(
    "actions",
    [
        [*CLIPPED, "backward", "step"],
        [*CLIPPED, "scale", "step"],
        [*CLIPPED, "replace", "step"],
        [*CLIPPED, "scale", "clip by value"],
        ["backward of one layer", "clip by norm", "backward with a graph", "step"],
        ["backward of one layer", "clip by norm", "backward of the other layer", "step"],
    ],
    ids=" ".join,
)
def test_gradients_that_change_after_they_were_clipped_are_refused(actions: list[str]) -> None:
    with pytest.raises(UnsupportedStepError, match="after all other changes"):
        train(actions, Clipping())


def test_clipping_by_value_before_the_norm_is_refused() -> None:
    with pytest.raises(UnsupportedStepError, match="Clip by norm first"):
        train(["backward", "clip by value", "clip by norm"], Clipping())


def clipping_trainer(bound: float | None, algorithm: str) -> Any:
    return SimpleNamespace(gradient_clip_val=bound, gradient_clip_algorithm=algorithm)


def test_the_bounds_of_a_trainer_hold_in_every_step() -> None:
    for action in ("clip by norm", "clip by value"):
        algorithm, bound = BOUNDS[action]
        fixed = Clipping(partial(trainer_bounds, clipping_trainer(bound, algorithm)))
        ours = train(["backward", "step", "zero to none", "backward", "scale", "step"], fixed)
        plain = train(
            ["backward", action, "step", "zero to none", "backward", "scale", action, "step"], None
        )
        assert all(torch.allclose(a, b, atol=1e-6) for a, b in zip(ours, plain, strict=True))
    for bound in (None, 0):
        assert trainer_bounds(clipping_trainer(bound, "norm")) == ClippingBounds()
