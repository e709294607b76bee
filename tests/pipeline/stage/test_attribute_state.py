"""Attributes of modules, restored after runs that change them."""

from __future__ import annotations

from collections import deque
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from lightning_dlres.pipeline.stage.attribute_state import AttributeState


class Statistics:
    def __init__(self) -> None:
        self.calls, self.rows = 0, [1.0]


def add_rows(value: Statistics) -> None:
    value.calls += 1
    value.rows.append(2.0)


VALUES: dict[str, tuple[Any, Any]] = {
    "list": ([1, 2], lambda value: value.append(3)),
    "shorter list": ([1, 2], lambda value: value.pop()),
    "bounded deque": (deque([1, 2], 2), lambda value: value.append(3)),
    "dict": ({"a": 1}, lambda value: value.update(a=2, b=3)),
    "order of a dict": ({"a": 1, "b": 2}, lambda value: value.update(a=value.pop("a"))),
    "set": ({1, 2}, lambda value: value.discard(1)),
    "tensor": (torch.ones(2), lambda value: value.add_(1)),
    "tensor through data": (torch.ones(2), lambda value: value.data.add_(1)),
    "grown tensor": (torch.ones(2), lambda value: setattr(value, "data", torch.ones(3))),
    "array": (np.ones(2), lambda value: value.__iadd__(1)),
    "object": (Statistics(), add_rows),
    "nested": ({"a": [(torch.ones(2), {1})]}, lambda value: value["a"][0][0].zero_()),
    "deep set": ({"a": [(torch.ones(2), {1})]}, lambda value: value["a"][0][1].add(2)),
}


def described(value: Any) -> str:
    """Return a text with all that a value holds."""
    if isinstance(value, Statistics):
        return f"{vars(value)}"
    return repr(value)


@pytest.mark.parametrize("kind", VALUES)
def test_an_object_in_an_attribute_gets_its_content_back(kind: str) -> None:
    module, (value, change) = nn.Sequential(nn.Linear(2, 2)), VALUES[kind]
    module[0].kept = value
    before = described(value)
    state = AttributeState(module.modules())
    change(value)
    assert described(value) != before
    state.restore()
    assert module[0].kept is value
    assert described(value) == before


def test_attributes_get_their_objects_back() -> None:
    module: Any = nn.Linear(2, 2)
    module.is_ready, module.rows = False, []
    rows, state = module.rows, AttributeState([module], {"forward"})
    module.is_ready, module.rows, module.new = True, [1], 2
    module.forward = replaced = lambda x: x
    state.restore()
    assert module.is_ready is False
    assert module.rows is rows
    assert not hasattr(module, "new")
    assert module.forward is replaced


def test_a_module_in_an_attribute_is_not_opened() -> None:
    module, other = nn.Linear(2, 2), nn.Linear(2, 2)
    module.others = [other]  # type: ignore[assignment]
    state = AttributeState([module])
    other.calls = 1  # type: ignore[assignment]
    state.restore()
    assert other.calls == 1


def test_buffers_get_their_tensors_back() -> None:
    module: Any = nn.BatchNorm1d(2)
    mean, state = module.running_mean, AttributeState([module])
    module.running_mean = mean + 1
    module.register_buffer("late", torch.zeros(1), persistent=False)
    state.restore()
    assert module.running_mean is mean
    assert not hasattr(module, "late")
    assert "late" not in module._non_persistent_buffers_set


def test_arrays_that_cannot_be_written_to_are_left_alone() -> None:
    module: Any = nn.Linear(2, 2)
    module.table, module.late = np.frombuffer(b"abcd", np.uint8), np.ones(2)
    state = AttributeState([module])
    module.late.setflags(write=False)
    state.restore()
    assert bytes(module.table) == b"abcd"
