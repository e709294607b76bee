"""Backward uses layers in unusual ways: results are right, and the window keeps its limit."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from lightning_dlres.mirror.config import MirrorConfig
from lightning_dlres.mirror.mirror import Mirror

WIDTH = 32
LAYER = 4 * WIDTH * WIDTH + 512
CPU = torch.device("cpu")
Loss = Callable[[Any, Tensor], Tensor]


def square(model: nn.Module, x: Tensor) -> Tensor:
    loss: Tensor = model(x).square().mean()
    return loss


def train(
    make: Callable[[], nn.Module],
    config: MirrorConfig | None,
    *,
    loss_of: Loss = square,
    before_backward: Callable[[Any], None] = lambda model: None,
    accumulate: int = 1,
    steps: int = 8,
) -> tuple[list[Tensor], list[int], Mirror | None]:
    """Return losses and parameters, the peak of the window in each step, and the mirror."""
    torch.manual_seed(0)
    model = make()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02, fused=True)
    mirror = None if config is None else Mirror(model, [optimizer], config, CPU)
    results, peaks = [], []
    for number in range(steps):
        x = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(number))
        is_stepping = (number + 1) % accumulate == 0
        if mirror is not None:
            mirror.window.peak_bytes = 0
        is_free = config is not None and config.update == "layerwise" and is_stepping
        with nullcontext() if mirror is None else mirror.step("training", is_free=is_free):
            loss = loss_of(model, x)
            before_backward(model)
            loss.backward()
            if is_stepping:
                optimizer.step()
        if is_stepping:
            optimizer.zero_grad()
        results.append(loss.detach())
        if mirror is not None:
            peaks.append(mirror.window.peak_bytes)
    if mirror is not None:
        mirror.close()
    return [*results, *(p.detach().clone() for p in model.parameters())], peaks, mirror


def assert_alike(make: Callable[[], nn.Module], config: MirrorConfig, **options: Any) -> None:
    plain, *_ = train(make, None, **options)
    ours, *_ = train(make, config, **options)
    assert all(map(torch.equal, ours, plain))


def layers(number: int = 6) -> nn.Sequential:
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(number)))


def frozen_middle() -> nn.Sequential:
    model = layers()
    for layer in list(model)[1:-1]:
        layer.requires_grad_(False)
    return model


class Affine(nn.Module):
    """A layer whose bias gets its gradient before backward uses the scale."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.randn(WIDTH, WIDTH) / WIDTH**0.5)
        self.bias = nn.Parameter(torch.zeros(WIDTH))
        self.unused = nn.Parameter(torch.zeros(3))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.scale + self.bias


def adversarial(model: nn.Module, x: Tensor) -> Tensor:
    """Return the loss for inputs that were moved along the gradient of frozen layers."""
    x = x.clone().requires_grad_()
    model.requires_grad_(False)
    (slope,) = torch.autograd.grad(square(model, x), x)
    model.requires_grad_(True)
    return square(model, (x + 0.1 * slope.sign()).detach())


def with_input_gradient(model: nn.Module, x: Tensor) -> Tensor:
    """Return a loss after a backward that computes no gradients of parameters."""
    x = x.clone().requires_grad_()
    torch.autograd.grad(square(model, x), x)
    return square(model, x)


MODELS: dict[str, tuple[Callable[[], nn.Module], Loss]] = {
    "frozen": (frozen_middle, square),
    "affine": (lambda: nn.Sequential(*(Affine() for _ in range(6))), square),
    "adversarial": (layers, adversarial),
    "input gradient": (layers, with_input_gradient),
}


@pytest.mark.parametrize("case", MODELS)
@pytest.mark.parametrize("window", ["min", 3 * LAYER])
def test_layers_without_all_their_gradients_leave_the_window(case: str, window: int | str) -> None:
    make, loss_of = MODELS[case]
    plain, *_ = train(make, None, loss_of=loss_of)
    ours, peaks, _ = train(make, MirrorConfig(window=window), loss_of=loss_of)
    assert all(map(torch.equal, ours, plain))
    # Two parameters of `Affine` take another alignment.
    most = (LAYER if window == "min" else int(window)) + 2 * 512
    assert max(peaks) <= most


@pytest.mark.parametrize("update", ["layerwise", "after_backward"])
@pytest.mark.parametrize("case", MODELS)
def test_each_layer_is_updated_once(case: str, update: Any) -> None:
    make, loss_of = MODELS[case]
    config = MirrorConfig(update=update)
    assert_alike(make, config, loss_of=loss_of, accumulate=2, steps=12)


class Teacher(nn.Module):
    """A checkpointed part calls a layer whose trained use comes later."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.head = (nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def _segment(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            target = self.second(x)
        y: Tensor = self.first(x) * target
        return y

    def forward(self, x: Tensor) -> Any:
        y = checkpoint(self._segment, x.requires_grad_(), use_reentrant=False)
        return self.head(torch.tanh(self.second(y)))


class StoppedGradient(nn.Module):
    """A detached weight is used outside of its module's call, before the layer itself."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.head = (nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x: Tensor) -> Any:
        y = F.linear(torch.tanh(self.first(x)), self.second.weight.detach())
        return self.head(torch.tanh(self.second(torch.tanh(y))))


class CheckpointedStop(nn.Module):
    """A checkpointed part uses the detached weight of a layer whose trained use comes later."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.head = (nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def _segment(self, x: Tensor) -> Tensor:
        return F.linear(torch.tanh(self.first(x)), self.second.weight.detach())

    def forward(self, x: Tensor) -> Any:
        y = checkpoint(self._segment, x.requires_grad_(), use_reentrant=False)
        return self.head(torch.tanh(self.second(torch.tanh(y))))


@pytest.mark.parametrize("make", [Teacher, StoppedGradient, CheckpointedStop])
@pytest.mark.parametrize("window", ["min", "auto"])
def test_a_weight_that_backward_needs_later_is_not_updated_before(
    make: Callable[[], nn.Module], window: str
) -> None:
    assert_alike(make, MirrorConfig(update="layerwise", window=window))


def test_a_detached_weight_keeps_only_its_own_layer_for_the_update_after_backward() -> None:
    *_, mirror = train(StoppedGradient, MirrorConfig(update="layerwise"))
    assert mirror is not None
    assert not mirror._streaming.late_uses


class NoisyWeights(nn.Module):
    """Weights that get noise through `data` before forward, which is removed before backward."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = layers(3)

    def forward(self, x: Tensor) -> Any:
        for parameter in self.parameters():
            parameter.data.add_(0.25)
        return self.layers(x)

    def restore(self) -> None:
        for parameter in self.parameters():
            parameter.data.sub_(0.25)


@pytest.mark.parametrize("window", ["min", "auto", 100 * LAYER])
def test_weights_may_change_through_data_between_forward_and_backward(window: int | str) -> None:
    assert_alike(NoisyWeights, MirrorConfig(window=window), before_backward=NoisyWeights.restore)


class DataReplacing(nn.Linear):
    """A layer that gives its weight other data in each call."""

    def forward(self, x: Tensor) -> Tensor:
        self.weight.data = torch.full((WIDTH, WIDTH), 1 / WIDTH) + self.bias.detach().mean()
        return F.linear(x, self.weight) + self.weight.detach().sum()


class CalledTwice(nn.Module):
    """A module that gives a weight other data, and one that shares and reads it."""

    def __init__(self) -> None:
        super().__init__()
        self.replacing, self.reading = DataReplacing(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.reading.weight = self.replacing.weight

    def forward(self, x: Tensor) -> Any:
        return self.reading(torch.tanh(self.replacing(torch.tanh(self.reading(x)))))


@pytest.mark.parametrize("window", ["min", "auto", 100 * LAYER])
def test_a_layer_that_replaces_its_data_is_read_anew(window: int | str) -> None:
    assert_alike(CalledTwice, MirrorConfig(window=window))
