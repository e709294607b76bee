"""Settings of layers are restored after a step, and every change is an error."""

from __future__ import annotations

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


@pytest.mark.parametrize("name", ["scale", "mask"])
def test_a_module_that_the_step_calls_may_replace_its_tensors(name: str) -> None:
    layer, new = Layer(), torch.zeros(2)
    assert restore_after(sets(name, new), layer, is_shared=True) is None
    assert getattr(layer, name) is new
    error = restore_after(sets("factor", 2.0), layer, is_shared=True)
    assert error is not None
    assert "must not change 'factor'" in error
