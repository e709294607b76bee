"""Settings of layers are restored after a step, and every change is an error."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from lightning_dlres.pipeline.execute.layer_settings import LayerSettings


class Layer(nn.Module):
    """Layer with one attribute of every kind."""

    mask: Tensor | None
    offset: Tensor | None

    def __init__(self) -> None:
        super().__init__()
        self.factor, self.cache, self.scale = 1.0, None, torch.ones(2)
        self.outputs: list[Tensor] = []
        self.register_buffer("mask", torch.ones(2))
        self.register_buffer("offset", None)


NAMES = ("factor", "cache", "scale", "outputs", "mask", "offset")


def restore_after(change: Callable[[Layer], object], layer: Layer, is_shared: bool) -> str | None:
    """Change a layer, put its settings back, and return the error."""
    settings = LayerSettings(nn.Sequential(layer), [layer], [layer] if is_shared else [])
    snapshot = settings.snapshot()
    change(layer)
    error = settings.restore(snapshot)
    assert settings.restore(snapshot) is None
    return error


def sets(name: str, value: object) -> Callable[[Layer], object]:
    return lambda layer: setattr(layer, name, value)


def deletes(name: str) -> Callable[[Layer], object]:
    return lambda layer: delattr(layer, name)


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("factor", sets("factor", 2.0)),
        ("factor", sets("factor", torch.ones(3))),
        ("factor", deletes("factor")),
        ("cache", sets("cache", torch.ones(3))),
        ("cache", sets("cache", [])),
        ("cache", deletes("cache")),
        ("new", sets("new", None)),
        ("new", sets("new", torch.ones(3))),
        ("scale", sets("scale", torch.ones(2))),
        ("scale", sets("scale", None)),
        ("scale", deletes("scale")),
        ("mask", sets("mask", torch.ones(2))),
        ("mask", sets("mask", None)),
        ("offset", sets("offset", torch.ones(2))),
        ("outputs", sets("outputs", None)),
    ],
)
def test_every_change_of_a_setting_is_undone_and_named(
    name: str, change: Callable[[Layer], object]
) -> None:
    layer = Layer()
    before, attributes = [getattr(layer, n) for n in NAMES], set(vars(layer))
    error = restore_after(change, layer, is_shared=False)
    assert error is not None
    assert f"must not change {name!r} of the layer '0'" in error
    assert set(vars(layer)) == attributes
    assert all(getattr(layer, n) is value for n, value in zip(NAMES, before, strict=True))


@pytest.mark.parametrize(
    "change",
    [
        lambda layer: None,
        lambda layer: layer.eval(),
        sets("factor", 2.0 - 1.0),
        sets("outputs", [torch.ones(1)]),
        sets("hook_results", {}),
    ],
)
def test_equal_values_and_other_objects_are_no_changes(change: Callable[[Layer], object]) -> None:
    assert restore_after(change, Layer(), is_shared=False) is None


def fills_mask(layer: Layer) -> None:
    assert layer.mask is not None
    layer.mask.fill_(2.0)


@pytest.mark.parametrize(
    ("words", "change"),
    [
        ("the mode .* of the layer '0'", lambda layer: layer.eval()),
        ("the hooks of the layer '0'", lambda layer: layer.register_forward_hook(print)),
        ("the forward of a layer", sets("forward", torch.relu)),
        ("the parameters of a layer", sets("weight", nn.Parameter(torch.ones(1)))),
        ("the buffer '0.mask'", fills_mask),
        ("'outputs' of the layer '0'", sets("outputs", [])),
        ("'results' of the layer '0'", sets("results", {})),
        ("'factor' of the layer '0'", sets("factor", 2.0)),
    ],
)
def test_a_change_before_the_call_of_layers_is_named(
    words: str, change: Callable[[Layer], object]
) -> None:
    layer = Layer()
    settings = LayerSettings(nn.Sequential(layer), [layer])
    snapshot, behaviour = settings.snapshot(), settings.behaviour()
    assert settings.change_before_call(snapshot, behaviour) is None
    change(layer)
    error = settings.change_before_call(snapshot, behaviour)
    assert error is not None
    assert re.search(f"must not change {words}", error)


def test_hooks_and_forwards_of_modules_around_the_layers_count() -> None:
    layer, around = Layer(), nn.Sequential()
    settings = LayerSettings(nn.Sequential(layer, around), [layer], (), [("1", around)])
    code = settings.code()
    assert settings.change_of_code(code) is None
    around.register_forward_pre_hook(print)
    assert "the hooks of the layer '1'" in str(settings.change_of_code(code))


def test_another_object_for_a_parameter_is_named() -> None:
    layer = nn.Linear(2, 2)
    settings = LayerSettings(nn.Sequential(layer), [layer])
    layer.weight.data = torch.ones(2, 2)
    assert settings.replaced_weight() is None
    layer.weight = nn.Parameter(torch.ones(2, 2))
    assert "another object for '0.weight'" in str(settings.replaced_weight())


@pytest.mark.parametrize("name", ["scale", "mask"])
def test_a_module_that_the_step_calls_may_replace_its_tensors(name: str) -> None:
    layer, new = Layer(), torch.zeros(2)
    assert restore_after(sets(name, new), layer, is_shared=True) is None
    assert getattr(layer, name) is new
    error = restore_after(sets("factor", 2.0), layer, is_shared=True)
    assert error is not None
    assert "must not change 'factor'" in error
