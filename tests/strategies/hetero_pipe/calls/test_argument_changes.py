"""Changes of nested arguments, found on copies and made on the user's own objects."""

from __future__ import annotations

import copy
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from lightning_dlres.core.wire.tree import flatten, unflatten
from lightning_dlres.strategies.hetero_pipe.calls.changed_arguments import (
    ArgumentChanges,
    given_back,
    with_changes,
)

LEAVES = st.one_of(
    st.integers(0, 3),
    st.builds(lambda n: torch.full((2,), float(n)), st.integers(0, 3)),
    st.builds(lambda n: np.full(2, float(n)), st.integers(0, 3)),
    st.text(max_size=2),
)
VALUES = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.dictionaries(st.sampled_from("abc"), inner, max_size=3),
        st.tuples(inner, inner),
    ),
    max_leaves=8,
)


def change(value: Any, draw: Any) -> None:
    """Change a value in place, at a random place of it."""
    if isinstance(value, Tensor | np.ndarray):
        value += 1
    elif isinstance(value, tuple):
        change(value[draw(st.integers(0, 1))], draw)
    elif isinstance(value, list | dict):
        keys = list(value) if isinstance(value, dict) else list(range(len(value)))
        kind = draw(st.sampled_from(["add", "replace", "remove", "inside"]))
        if kind == "add" or not keys:
            new = draw(VALUES)
            if isinstance(value, dict):
                value[draw(st.sampled_from("abcd"))] = new
            else:
                value.insert(draw(st.integers(0, len(value))), new)
            return
        key = draw(st.sampled_from(keys))
        if kind == "replace":
            value[key] = draw(VALUES)
        elif kind == "remove":
            del value[key]
        else:
            change(value[key], draw)


def is_equal(a: Any, b: Any) -> bool:
    if type(a) is not type(b):
        return False
    if isinstance(a, Tensor):
        return torch.equal(a, b)
    if isinstance(a, np.ndarray):
        return np.array_equal(a, b)
    if isinstance(a, dict):
        return list(a) == list(b) and all(is_equal(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(is_equal, a, b))
    return bool(a == b)


def sent(tree: Any) -> Any:
    """Return what another rank gets."""
    structure, tensors = flatten(tree)
    return unflatten(structure, [tensor.clone() for tensor in tensors])


@given(st.data())
def test_the_users_objects_change_as_those_of_the_members(data: st.DataObject) -> None:
    args, kwargs = data.draw(st.lists(VALUES, max_size=2)), {"named": data.draw(VALUES)}
    there_args, there_kwargs = sent([args, kwargs])
    changes: list[list[Any]] = []
    for _ in range(data.draw(st.integers(1, 3))):
        found = ArgumentChanges(there_args, there_kwargs)
        for value in [*there_args, *there_kwargs.values()]:
            if data.draw(st.booleans()):
                change(value, data.draw)
        changes += found.found()
        there_args, there_kwargs, changes = sent([there_args, there_kwargs, changes])
    expected = [copy.deepcopy(there_args), copy.deepcopy(there_kwargs)]
    containers = [value for value in [*args, *kwargs.values()] if isinstance(value, list | dict)]
    crossing = with_changes(torch.ones(3), there_args, there_kwargs, changes)
    output = given_back(sent(crossing), args, kwargs)
    assert torch.equal(output, torch.ones(3))
    for own, wanted in zip(
        [*args, *kwargs.values()], [*expected[0], *expected[1].values()], strict=True
    ):
        # A dict may have its keys in another order.
        assert is_equal(ordered(own), ordered(wanted))
    assert all(any(value is own for own in [*args, *kwargs.values()]) for value in containers)


def ordered(value: Any) -> Any:
    """Return a value with sorted dicts."""
    if isinstance(value, dict):
        return {key: ordered(value[key]) for key in sorted(value)}
    if isinstance(value, list | tuple):
        return type(value)(map(ordered, value))
    return value


def test_nothing_is_sent_if_nothing_has_changed() -> None:
    arguments = [torch.ones(2), [1, {"a": np.ones(2)}]]
    changes = ArgumentChanges(arguments, {"n": 1}).found()
    assert changes == []
    assert with_changes("output", arguments, {"n": 1}, changes) == "output"


def test_gradients_reach_the_users_tensor() -> None:
    own, weight = torch.zeros(3), torch.ones(3, requires_grad=True)
    there = torch.zeros(3)
    found = ArgumentChanges([there], {})
    there.add_(2 * weight)
    given_back(with_changes(None, [there], {}, found.found()), [own], {})
    own.sum().backward()
    assert weight.grad is not None
    assert weight.grad.tolist() == [2.0, 2.0, 2.0]


@dataclass
class Late:
    first: Tensor
    second: Tensor = field(init=False)


def test_a_field_may_be_set_by_a_member() -> None:
    own, there = Late(torch.zeros(2)), Late(torch.zeros(2))
    found = ArgumentChanges([there], {})
    there.second = torch.ones(2)
    given_back(with_changes(None, [there], {}, found.found()), [own], {})
    assert own.second.tolist() == [1.0, 1.0]


def test_an_array_with_nan_has_not_changed() -> None:
    arguments = [np.array([1.0, np.nan]), np.array([None, "a"], dtype=object)]
    assert ArgumentChanges(arguments, {}).found() == []
