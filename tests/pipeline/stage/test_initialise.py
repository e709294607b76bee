"""Parameters keep their identity when their storage is replaced, and meta tensors get values."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch
from torch import nn

from lightning_dlres.core.errors import ConfigError
from lightning_dlres.pipeline.stage.initialise import (
    initialise,
    initialised_copy,
    replace_storage,
)

CPU = torch.device("cpu")


def test_a_parameter_moved_away_and_back_keeps_its_identity() -> None:
    parameter = nn.Parameter(torch.arange(4.0), requires_grad=False)
    parameter.note = {"decay": 0.1}  # type: ignore[attr-defined]
    holder = nn.Linear(1, 1)
    holder.weight = parameter
    users = {parameter: "a user's dict"}
    replace_storage(parameter, torch.empty(4, device="meta"))
    assert parameter.is_meta
    replace_storage(parameter, torch.arange(4.0).double())
    assert parameter.dtype == torch.float64
    assert parameter.tolist() == [0.0, 1.0, 2.0, 3.0]
    assert not parameter.requires_grad
    assert parameter.note == {"decay": 0.1}  # type: ignore[attr-defined]
    assert users[parameter] == "a user's dict"
    assert holder.weight is parameter
    assert type(parameter) is nn.Parameter


def test_an_earlier_gradient_or_graph_does_not_matter() -> None:
    parameter = nn.Parameter(torch.ones(2))
    loss = (parameter * 2).sum()
    loss.backward()
    replace_storage(parameter, torch.zeros(2))
    assert parameter.grad is None
    (parameter * 3).sum().backward()
    assert parameter.grad.tolist() == [3.0, 3.0]


def test_a_parameter_with_a_weak_reference_is_an_error() -> None:
    parameter = nn.Parameter(torch.ones(2))
    reference = weakref.ref(parameter)
    with pytest.raises(
        ConfigError,
        match=r"shape \(2,\) cannot be moved to another device: .*Drop other references",
    ):
        replace_storage(parameter, torch.zeros(2))
    assert reference() is parameter
    assert parameter.tolist() == [1.0, 1.0]


def test_a_recurrent_layer_made_on_the_meta_device_runs() -> None:
    with torch.device("meta"):
        layer = nn.LSTM(4, 3)
    initialise(layer, CPU, "lstm")
    assert torch.nn.functional.l1_loss(layer(torch.ones(2, 4))[0], torch.zeros(2, 3)) > 0


def test_initialised_modules_keep_their_values() -> None:
    linear = nn.Linear(2, 2)
    before = linear.weight.detach().clone()
    initialise(linear, CPU, "linear")
    initialise(nn.ReLU(), CPU, "no parameters")
    assert torch.equal(linear.weight, before)


def test_a_parameter_keeps_its_class_and_hooks() -> None:
    class Tagged(nn.Parameter):
        pass

    parameter, calls = Tagged(torch.ones(2)), []
    parameter.register_hook(lambda gradient: calls.append(1))
    replace_storage(parameter, torch.empty(2, device="meta"))
    replace_storage(parameter, torch.ones(2))
    parameter.sum().backward()
    assert type(parameter) is Tagged
    assert calls


def test_a_parameter_frozen_after_it_got_a_hook_can_be_moved() -> None:
    parameter = nn.Parameter(torch.ones(2))
    parameter.register_hook(lambda gradient: gradient)
    replace_storage(parameter.requires_grad_(False), torch.empty(2, device="meta"))
    assert parameter.is_meta


def test_a_hook_can_still_be_removed() -> None:
    parameter, calls = nn.Parameter(torch.ones(2)), []
    handle = parameter.register_hook(lambda gradient: calls.append(1))
    replace_storage(parameter, torch.zeros(2))
    handle.remove()
    parameter.sum().backward()
    assert not calls


class Refusing:
    """A hook that cannot be copied, as one with records of torch's profiler."""

    def __call__(self, *args: Any) -> None:
        pass

    def __deepcopy__(self, memo: Any) -> Refusing:
        raise RuntimeError("Tried to deepcopy a record")


class CountsCalls(nn.Linear):
    calls = 0

    def count(self, *args: Any) -> None:
        self.calls += 1


def test_a_copy_shares_only_hooks_that_cannot_be_copied() -> None:
    layer, refusing = CountsCalls(2, 2), Refusing()
    layer.register_forward_hook(refusing)
    layer.register_forward_hook(layer.count)
    copied = initialised_copy(layer, torch.device("cpu"))
    copied(torch.ones(1, 2))
    assert next(iter(copied._forward_hooks.values())) is refusing
    assert (layer.calls, getattr(copied, "calls", 0)) == (0, 1)


class RefusingLayer(nn.Linear):
    def __deepcopy__(self, memo: Any) -> Any:
        raise RuntimeError("Tried to deepcopy the layer")


def test_a_layer_that_cannot_be_copied_is_an_error() -> None:
    layer = RefusingLayer(2, 2)
    layer.register_forward_hook(lambda *_: None)
    with pytest.raises(RuntimeError, match="deepcopy the layer"):
        initialised_copy(layer, torch.device("cpu"))
