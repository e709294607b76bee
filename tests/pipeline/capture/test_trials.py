"""Trial runs, after which a module is as before."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from lightning_dlres.pipeline.capture.modes import TRAINING, trial

CPU = torch.device("cpu")


def set_data(weight: Tensor, values: Tensor) -> None:
    weight.data = values


def augment(weight: Tensor, values: Tensor) -> None:
    weight += values


def assign(weight: Tensor, values: Tensor) -> None:
    weight[0] = values[0]


WRITES: dict[str, Callable[[Tensor, Tensor], object]] = {
    "chain": lambda weight, values: weight.mul_(0.9).add_(values, alpha=0.1),
    "lerp_": lambda weight, values: weight.lerp_(values, 0.1),
    "copy_": lambda weight, values: weight.copy_(values),
    "data.copy_": lambda weight, values: weight.data.copy_(values),
    "data": set_data,
    "augmented": augment,
    "item": assign,
    "view": lambda weight, values: weight.view(-1)[1:].zero_(),
    "out": lambda weight, values: torch.add(weight, values, out=weight),
    "foreach": lambda weight, values: torch._foreach_add_([weight], [values]),
    "init": lambda weight, values: nn.init.normal_(weight),
    "twice": lambda weight, values: (weight.zero_(), weight.add_(1)),
}


@pytest.mark.parametrize("name", WRITES)
def test_parameters_that_a_trial_changes_are_restored(name: str) -> None:
    module = nn.Sequential(nn.Linear(3, 4), nn.Linear(3, 4))
    module[1].weight = module[0].weight
    weight, values = module[0].weight, torch.rand(4, 3)
    before, storage = weight.detach().clone(), weight.data_ptr()
    with trial(module, TRAINING, CPU), torch.no_grad():
        WRITES[name](weight, values)
        assert not torch.equal(weight, before)
    assert torch.equal(weight, before)
    assert module[1].weight is weight
    assert weight.data_ptr() == storage
    assert weight.requires_grad


def fail_after_a_write(module: nn.Linear) -> None:
    with trial(module, TRAINING, CPU), torch.no_grad():
        module.weight.mul_(2)
        raise ArithmeticError


def test_a_failed_trial_restores_parameters() -> None:
    module = nn.Linear(3, 4)
    before = module.weight.detach().clone()
    with pytest.raises(ArithmeticError):
        fail_after_a_write(module)
    assert torch.equal(module.weight, before)


def test_parameters_that_no_operation_changes_are_not_copied(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    module = nn.Linear(3, 4)
    copied: list[Tensor] = []
    clone = Tensor.clone
    monkeypatch.setattr(Tensor, "clone", lambda tensor: copied.append(tensor) or clone(tensor))
    with trial(module, TRAINING, CPU):
        output = module(torch.rand(2, 3))
        output.mul_(2)
        module.weight.requires_grad_()
        output.sum().backward()
    assert copied == []


class Counting(nn.Module):
    """Layer that sets attributes when it runs."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.is_ready, self.hooked = nn.Linear(3, 3), False, nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        self.is_ready, self.made = True, x
        self.hooked.seen = 1
        out: Tensor = self.linear(x)
        return out


def test_attributes_that_a_trial_sets_are_restored() -> None:
    module = nn.Sequential(Counting(), Counting())
    with trial(module, TRAINING, CPU):
        module(torch.rand(2, 3))
        assert all(layer.is_ready for layer in module)
    for layer in module:
        assert layer.is_ready is False
        assert not hasattr(layer, "made")
        assert not hasattr(layer.hooked, "seen")
