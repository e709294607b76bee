"""Keys and optimizer states of a model: cut into keys and put together again."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn, optim

from lightning_dlres.core.errors import ConfigError
from lightning_dlres.paramserver.setup.model_keys import keys_of
from lightning_dlres.paramserver.setup.optimizer_states import fill_state, states_by_key


def trained(kind: Any, model: nn.Module) -> torch.optim.Optimizer:
    """Return an optimizer with two steps of state."""
    optimizer: torch.optim.Optimizer = kind(model.parameters())
    for _ in range(2):
        for parameter in model.parameters():
            parameter.grad = torch.randn_like(parameter)
        optimizer.step()
    return optimizer


@pytest.mark.parametrize(
    "kind",
    [
        optim.SGD,
        lambda p: optim.SGD(p, momentum=0.9),
        optim.Adam,
        lambda p: optim.AdamW(p, amsgrad=True),
        optim.Adamax,
        optim.NAdam,
        optim.RAdam,
        optim.Adagrad,
        optim.Adadelta,
        lambda p: optim.RMSprop(p, centered=True, momentum=0.5),
        optim.ASGD,
        optim.Rprop,
        optim.Adafactor,
    ],
)
def test_states_are_cut_and_joined(kind: Any) -> None:
    model = nn.Sequential(nn.Linear(300, 100), nn.Linear(100, 3), nn.LayerNorm(3))
    model.register_parameter("scale", nn.Parameter(torch.ones(())))
    optimizer = trained(kind, model)
    before = optimizer.state_dict()
    keys = keys_of(model, [optimizer], 2, 64 << 10)
    assert len(keys.keys) > len(keys.parameters) or kind is optim.Adafactor
    by_key = states_by_key(keys, [optimizer])
    for index in range(len(keys.keys)):
        by_key.setdefault(index, {})
    fill_state(keys, optimizer, lambda indices: (by_key[index] for index in indices))
    after = optimizer.state_dict()
    assert after["param_groups"] == before["param_groups"]
    assert after["state"].keys() == before["state"].keys()
    for index, state in before["state"].items():
        assert state.keys() == after["state"][index].keys()
        for name, value in state.items():
            other = after["state"][index][name]
            if isinstance(value, torch.Tensor):
                assert torch.equal(value, other)
                assert (value.dtype, value.shape) == (other.dtype, other.shape)
            else:
                assert value == other


def test_tied_parameters_have_one_key() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model[1].weight = model[0].weight
    keys = keys_of(model, [optim.SGD(model.parameters())], 1, 64 << 10)
    assert sorted(key.name for key in keys.keys) == ["0.bias", "0.weight", "1.bias"]


def test_parameters_outside_of_the_model_are_refused() -> None:
    model, other = nn.Linear(2, 2), nn.Linear(2, 2)
    optimizer = optim.SGD([*model.parameters(), *other.parameters()])
    with pytest.raises(ConfigError, match="got 2 others"):
        keys_of(model, [optimizer], 1, 64 << 10)


def test_a_parameter_of_two_optimizers_is_refused() -> None:
    model = nn.Linear(2, 2)
    optimizers = [optim.SGD(model.parameters()), optim.Adam(model.parameters())]
    with pytest.raises(ConfigError, match="in one optimizer"):
        keys_of(model, optimizers, 1, 64 << 10)


def test_new_parameters_are_refused() -> None:
    model = nn.Linear(2, 2)
    optimizer = optim.SGD([model.weight])
    keys = keys_of(model, [optimizer], 1, 64 << 10)
    optimizer.add_param_group({"params": [model.bias]})
    with pytest.raises(ConfigError, match="must keep its parameters"):
        keys.places([optimizer])


@pytest.mark.parametrize(
    ("dtype", "fix"),
    [(torch.complex64, "view_as_complex"), (torch.int8, "Register it as a buffer")],
)
def test_parameters_that_are_no_real_numbers_are_refused(dtype: torch.dtype, fix: str) -> None:
    model = nn.Linear(2, 2)
    model.register_parameter("other", nn.Parameter(torch.zeros(2, dtype=dtype), False))
    with pytest.raises(ConfigError, match=fix):
        keys_of(model, [optim.SGD(model.parameters())], 1, 64 << 10)


def test_parameters_may_move_between_groups_and_leave() -> None:
    model = nn.Linear(2, 2)
    optimizer = optim.SGD([{"params": [model.weight]}, {"params": [model.bias], "lr": 0.5}])
    keys = keys_of(model, [optimizer], 1, 64 << 10)
    assert keys.places([optimizer]) == {model.weight: (0, 0), model.bias: (0, 1)}
    optimizer.param_groups[1]["params"] = [model.weight]
    del optimizer.param_groups[0]
    assert keys.places([optimizer]) == {model.weight: (0, 0)}
    optimizer.param_groups.append({"params": [model.weight], "lr": 0.1})
    with pytest.raises(ConfigError, match="must be in one group of one optimizer"):
        keys.places([optimizer])
    del optimizer.param_groups[1]
    others = [optim.SGD([torch.zeros(1, requires_grad=True)]), optimizer]
    with pytest.raises(ConfigError, match="must keep its parameters"):
        keys.places(others)


def test_a_frozen_alias_is_no_second_value() -> None:
    model = nn.Linear(2, 2)
    model.register_parameter("alias", nn.Parameter(model.weight.data, requires_grad=False))
    assert len(keys_of(model, [optim.SGD(model.parameters())], 1, 64 << 10).keys) == 3


layouts = st.tuples(
    st.integers(0, 12),
    st.lists(st.tuples(st.integers(1, 4), st.integers(1, 5)), min_size=1, max_size=2),
)


@given(st.lists(layouts, min_size=2, max_size=4))
def test_parameters_in_the_same_memory_are_refused(places: list[Any]) -> None:
    memory = torch.zeros(64)
    model = nn.Module()
    elements: list[set[int]] = []
    for number, (offset, axes) in enumerate(places):
        shape, strides = zip(*axes, strict=True)
        view = torch.as_strided(memory, shape, strides, offset)
        model.register_parameter(f"p{number}", nn.Parameter(view))
        indices = torch.as_strided(torch.arange(64), shape, strides, offset)
        elements.append(set(indices.flatten().tolist()))
    optimizer = optim.SGD(model.parameters())
    if any(a & b for a, b in itertools.combinations(elements, 2)):
        with pytest.raises(ConfigError, match="in the same memory"):
            keys_of(model, [optimizer], 1, 64 << 10)
    else:
        assert len(keys_of(model, [optimizer], 1, 64 << 10).keys) == len(places)
