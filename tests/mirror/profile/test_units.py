"""Units of a model's parameters."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from lightning_dlres.core.errors import ConfigError
from lightning_dlres.mirror.profile.units import find_units, units_by_module


class Owner(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.own = nn.Parameter(torch.ones(3))
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.second.weight = self.first.weight
        self.nothing = nn.Tanh()


def test_each_parameter_is_in_the_unit_of_its_first_owner() -> None:
    model = Owner()
    units = find_units(model)
    assert [unit.name for unit in units] == ["", "first", "second"]
    assert [unit.names for unit in units] == [
        ("own",),
        ("first.weight", "first.bias"),
        ("second.bias",),
    ]
    assert units[1].offsets == (0, 512)
    assert units[1].nbytes == 1024
    needed = units_by_module(model, units)
    # A tied weight is needed by both of its owners.
    assert needed == {model: (0,), model.first: (1,), model.second: (1, 2)}


def test_views_have_the_layout_of_the_parameters() -> None:
    model = nn.Conv2d(2, 3, 3).to(memory_format=torch.channels_last)
    (unit,) = find_units(model)
    memory = torch.zeros(unit.nbytes, dtype=torch.uint8)
    for view, parameter in zip(unit.views(memory), unit.parameters, strict=True):
        assert (view.shape, view.stride()) == (parameter.shape, parameter.stride())
        view.copy_(parameter.detach())
        assert torch.equal(view, parameter)


def shared_memory() -> nn.Module:
    model = nn.Linear(4, 4)
    model.other = nn.Parameter(model.weight.detach())
    return model


def parts_of_a_vector() -> nn.Module:
    model = nn.Linear(4, 4)
    nn.utils.vector_to_parameters(
        nn.utils.parameters_to_vector(model.parameters()), [*model.parameters()]
    )
    return model


def overlapping() -> nn.Module:
    model = nn.Module()
    model.weight = nn.Parameter(torch.ones(1, 3).expand(4, 3))
    return model


@pytest.mark.parametrize(
    ("model", "words"),
    [
        (nn.LazyLinear(3), "without memory"),
        (nn.Linear(2, 2, device="meta"), "without memory"),
        (shared_memory(), "in the same memory. Register one Parameter"),
        (parts_of_a_vector(), "in parts of one tensor. Give each a copy"),
        (overlapping(), "with strides"),
    ],
    ids=["lazy", "meta", "shared", "parts", "overlapping"],
)
def test_parameters_that_cannot_move_are_refused(model: nn.Module, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        find_units(model)
