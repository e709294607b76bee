"""Tensors in the arguments and results of operations."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Yield the tensors in nested lists, tuples and dicts, in order."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from tensors_in(item)
    elif isinstance(value, dict):
        for item in value.values():
            yield from tensors_in(item)


def named_tensors_in(value: Any, name: str = "") -> Iterator[tuple[str, Tensor]]:
    """Yield the same tensors with their places, such as "0.mask"."""
    if isinstance(value, Tensor):
        yield name, value
    elif isinstance(value, (list, tuple)):
        for index, item in enumerate(value):
            yield from named_tensors_in(item, f"{name}.{index}")
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from named_tensors_in(item, f"{name}.{key}")
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            yield from named_tensors_in(getattr(value, field.name, None), f"{name}.{field.name}")


def replaced(function: Callable[[Tensor], Any], value: Any) -> Any:
    """Return nested lists, tuples and dicts with `function` applied to each tensor."""
    return mapped(lambda leaf: function(leaf) if isinstance(leaf, Tensor) else leaf, value)


def mapped(function: Callable[[Any], Any], value: Any) -> Any:
    """Return nested lists, tuples and dicts with `function` applied to each other object."""
    if isinstance(value, list):
        return [mapped(function, item) for item in value]
    if isinstance(value, tuple):
        items = [mapped(function, item) for item in value]
        if type(value) is tuple:
            return tuple(items)
        # Named tuples take one argument per item, the results of torch's operations a sequence.
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    if isinstance(value, dict):
        return {key: mapped(function, item) for key, item in value.items()}
    return function(value)
