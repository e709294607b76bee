"""Optimizers of a mirror step as those of plain training, with gradients and states of any kind."""

from __future__ import annotations

import copy
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from lightning_dlres.mirror.config import MirrorConfig
from lightning_dlres.mirror.execute.optimizer_history import HistoryInMirror
from lightning_dlres.mirror.mirror import Mirror
from lightning_dlres.mirror.profile.history import _is_right

CPU = torch.device("cpu")
KINDS: dict[str, Any] = {
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=0.01, fused=True),
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9, fused=True),
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_parameter_of_two_optimizers_has_two_histories(kind: str) -> None:
    results = []
    for is_mirrored in (False, True):
        torch.manual_seed(0)
        shared, *heads = nn.Linear(32, 32), nn.Linear(32, 16), nn.Linear(32, 16)
        model = nn.ModuleList([shared, *heads])
        optimizers = [KINDS[kind]([*shared.parameters(), *head.parameters()]) for head in heads]
        mirror = Mirror(model, optimizers, MirrorConfig(), CPU) if is_mirrored else None
        losses = []
        for number in range(4):
            x = torch.randn(4, 32, generator=torch.Generator().manual_seed(number))
            with mirror.step("training") if mirror is not None else nullcontext():
                for optimizer, head, target in zip(optimizers, heads, (1, -2), strict=True):
                    optimizer.zero_grad()
                    loss: Tensor = (head(torch.tanh(shared(x))) - target).square().mean()
                    loss.backward()
                    optimizer.step()
                    losses.append(loss.item())
        if mirror is not None:
            mirror.close()
        results.append(losses)
    assert results[0] == results[1]


def train(
    kind: Any, change: Any, *, is_mirrored: bool, model: nn.Module | None = None
) -> list[Tensor]:
    """Return parameters after three steps, in which code changes things before each update."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(24, 24), nn.Linear(24, 8)) if model is None else model
    optimizer = kind(model.parameters())
    mirror = Mirror(model, [optimizer], MirrorConfig(), CPU) if is_mirrored else None
    for number in range(3):
        x = torch.randn(4, 24, generator=torch.Generator().manual_seed(number))
        with mirror.step("training") if mirror is not None else nullcontext():
            optimizer.zero_grad()
            (model(x) ** 2).mean().backward()
            change(model, optimizer, number)
            optimizer.step()
    if mirror is not None:
        mirror.close()
    return [parameter.detach().clone() for parameter in model.parameters()]


def column_major(gradient: Tensor) -> Tensor:
    return gradient.t().contiguous().t()


def expanded(gradient: Tensor) -> Tensor:
    return gradient.mean().expand_as(gradient)


GRADIENTS = {"column-major": column_major, "expanded": expanded}


@pytest.mark.parametrize("gradient", GRADIENTS)
@pytest.mark.parametrize("kind", ["Adam", "AdamW", "SGD", "Adagrad"])
def test_gradients_may_have_other_strides(kind: str, gradient: str) -> None:
    def change(model: nn.Module, optimizer: Any, number: int, *, is_dense: bool) -> None:
        for parameter in model.parameters():
            assert parameter.grad is not None
            changed = GRADIENTS[gradient](parameter.grad)
            parameter.grad = changed.contiguous() if is_dense else changed

    options: dict[str, Any] = {"lr": 0.1, **({"momentum": 0.9} if kind == "SGD" else {})}
    optimizer = getattr(torch.optim, kind)

    def with_kernel(fused: bool | None) -> Any:
        return lambda parameters: optimizer(parameters, **options, fused=fused)

    plain = train(with_kernel(True), partial(change, is_dense=True), is_mirrored=False)
    ours = train(with_kernel(None), partial(change, is_dense=False), is_mirrored=True)
    assert all(map(torch.equal, plain, ours))


def test_a_gradient_of_other_strides_is_the_users_again_after_the_step() -> None:
    given: list[Tensor] = []

    def change(model: nn.Module, optimizer: Any, number: int) -> None:
        weight = next(model.parameters())
        if given:
            assert torch.equal(given[-1], torch.full_like(weight, number - 1.0))
        given.append(torch.tensor(float(number)).expand_as(weight))
        weight.grad = given[-1]
        optimizer.register_step_post_hook(lambda *_: seen.append(weight.grad))

    seen: list[Tensor | None] = []
    train(torch.optim.AdamW, change, is_mirrored=True)
    assert seen[0] is given[0]
    assert all(gradient is given[-1] for gradient in seen[-3:])


class Convolution(nn.Module):
    """A convolution whose history is larger than the least size, and one whose is not."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(4, 16, 3), nn.Conv2d(16, 1, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = x.view(4, 4, 3, 2).repeat(1, 1, 2, 2)
        y: Tensor = self.second(torch.tanh(self.first(x)))
        return y.flatten(1)


def test_a_contiguous_state_may_be_loaded_for_parameters_in_channels_last() -> None:
    torch.manual_seed(0)
    model = Convolution()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, fused=True)
    model(torch.ones(4, 24)).sum().backward()
    optimizer.step()
    weights, states = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    states["param_groups"][0]["fused"] = None

    def loaded(is_mirrored: bool, is_late: bool = False) -> list[Tensor]:
        model = Convolution().to(memory_format=torch.channels_last)
        model.load_state_dict(weights)

        def make(parameters: Any) -> torch.optim.Optimizer:
            # The plain kernels of the other side are right for all strides.
            optimizer = torch.optim.AdamW(parameters, fused=None)
            if not is_late:
                optimizer.load_state_dict(copy.deepcopy(states))
            return optimizer

        def load(model: nn.Module, optimizer: Any, number: int) -> None:
            if is_late and number == 0:
                optimizer.load_state_dict(copy.deepcopy(states))

        return train(make, load, is_mirrored=is_mirrored, model=model)

    for is_late in (False, True):
        for own, expected in zip(loaded(True, is_late), loaded(False, is_late), strict=True):
            torch.testing.assert_close(own, expected, rtol=1e-5, atol=1e-6)


def test_gradients_may_become_sparse_after_the_first_step() -> None:
    def sparse(model: nn.Module, optimizer: Any, number: int) -> None:
        weight = next(model.parameters())
        assert weight.grad is not None
        weight.grad = weight.grad.to_sparse() if number else None

    def kind(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, lr=0.1)

    plain, ours = (train(kind, sparse, is_mirrored=is_mirrored) for is_mirrored in (False, True))
    for own, expected in zip(ours, plain, strict=True):
        torch.testing.assert_close(own, expected, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_hooks_after_a_step_see_its_gradients(momentum: float) -> None:
    results = []
    for is_mirrored in (False, True):
        seen: list[Tensor | None] = []

        def kind(parameters: Any, seen: list[Tensor | None] = seen) -> torch.optim.Optimizer:
            optimizer = torch.optim.SGD(parameters, lr=0.1, momentum=momentum, fused=True)
            own = optimizer.param_groups[0]["params"]
            optimizer.register_step_post_hook(
                lambda *_: seen.extend(None if p.grad is None else p.grad.clone() for p in own)
            )
            return optimizer

        train(kind, lambda *_: None, is_mirrored=is_mirrored)
        results.append(seen)
    assert len(results[0]) == len(results[1])
    for expected, own in zip(*results, strict=True):
        assert expected is not None
        assert own is not None
        assert torch.equal(own, expected)


def test_an_optimizer_without_history_steps_all_layers_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    updated: list[int] = []
    update = HistoryInMirror.update

    def counted(self: HistoryInMirror, parameters: Any) -> None:
        updated.append(len(parameters))
        update(self, parameters)

    monkeypatch.setattr(HistoryInMirror, "update", counted)
    train(partial(torch.optim.SGD, lr=0.1), lambda *_: None, is_mirrored=True)
    assert not any(updated)


def test_hooks_on_all_optimizers_see_the_users_steps_only() -> None:
    steps: list[type] = []
    handle = register_optimizer_step_post_hook(lambda one, *_: steps.append(type(one)))
    try:
        _is_right.cache_clear()
        train(torch.optim.AdamW, lambda *_: None, is_mirrored=True)
    finally:
        handle.remove()
    assert steps == [torch.optim.AdamW] * 3


def test_layers_that_are_unfrozen_later_lie_in_files_too(tmp_path: Path) -> None:
    results = []
    for directory in (None, tmp_path):
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Linear(200, 200) for _ in range(3)))
        model[0].requires_grad_(False)
        model[1].requires_grad_(False)
        # The first layer is in the optimizer from the beginning, the second one is added.
        trained = [*model[0].parameters(), *model[2].parameters()]
        optimizer = torch.optim.AdamW(trained, lr=0.01, fused=True)
        config = MirrorConfig(disk=directory)
        mirror = None if directory is None else Mirror(model, [optimizer], config, CPU)
        for number in range(4):
            if number == 2:
                model.requires_grad_(True)
                optimizer.add_param_group({"params": [*model[1].parameters()]})
            with mirror.step("training") if mirror is not None else nullcontext():
                model(torch.ones(2, 200)).square().mean().backward()
                if mirror is not None and number == 3:
                    gradients = [p.grad for p in model.parameters()]
                optimizer.step()
            optimizer.zero_grad()
        if mirror is not None:
            states = [optimizer.state[layer.weight] for layer in model]
            tensors = [*gradients[::2], *(s[k] for s in states for k in ("exp_avg", "exp_avg_sq"))]
            assert not any(tensor.untyped_storage().resizable() for tensor in tensors)
            mirror.close()
        results.append([p.detach().clone() for p in model.parameters()])
    assert all(map(torch.equal, *results))
