"""Containers of user code as plain data, from which other ranks rebuild the same types.

`core.wire` alone does not suffice, since it is made for batches. It refuses sets, deques and
subclasses of lists, and turns a subclass of `str` into a plain string. An attribute must arrive as
the same type, or not at all: a step that calls `add` on a set fails on a rank that got a list.

A packed value is a list:

- `["value", value]`: a value that `core.wire` carries without a change of type.
- `["reference", encoding]`: an object that the receiver has, or gets apart from this value; see
  `attribute_changes`.
- `[base, class, argument, items, attributes]`: a container. `base` is the name of its built-in base
  class, `class` the import path of its class. `argument` is the largest length of a deque, or the
  import path of the default factory of a defaultdict. Items and attributes are packed values.
  `attributes` is None for a dict that is its own `__dict__`: its items are its attributes.
"""

from __future__ import annotations

import dataclasses
import sys
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from enum import Enum
from functools import cache
from pathlib import Path
from types import BuiltinFunctionType, FunctionType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lightning_dlres.core.errors import ConfigError, ProtocolError
from lightning_dlres.core.wire.tree import Tree, map_tensors
from lightning_dlres.strategies.hetero_pipe.replay.user_state.user_objects import (
    SCALARS,
    slot_names,
)

# Base classes of containers that `unpack` can rebuild. A subclass comes before its base.
_BASES: tuple[Any, ...] = (
    *(frozenset, set, deque, list, tuple),
    *(OrderedDict, defaultdict, dict),
)
_BASE_BY_NAME = {base.__name__: base for base in _BASES}
# Types without parts that `core.wire` carries. An instance of a subclass of one of these would
# arrive as an instance of the type itself.
_EXACT_LEAVES = {*SCALARS, np.ndarray, torch.Size, torch.dtype, torch.device, type(Path())}
_VALUE = "value"
_REFERENCE = "reference"
# Encodings that take the place of objects, by the object's id.
References = Mapping[int, Tree]
_NO_REFERENCES: References = {}


def arrives_unchanged(value: Any, references: References = _NO_REFERENCES) -> bool:
    """Return True if `core.wire` carries a value without a change of any type inside it.

    True does not promise that `core.wire` accepts the value.

    Args:
        value: The value.
        references: See `pack`. A list, tuple or dict that holds one of these objects is not carried
            as it is. A data class, or another mapping, is: `pack` cannot rebuild it.
    """

    def is_plain(part: Any) -> bool:
        return id(part) not in references and arrives_unchanged(part, references)

    kind = type(value)
    if kind is Tensor:
        is_dense = value.layout is torch.strided and not value.is_nested
        return is_dense and not value.is_quantized and not value.is_meta
    if kind in _EXACT_LEAVES or isinstance(value, (np.generic, Enum)):
        return True
    if kind in (list, tuple):
        return all(map(is_plain, value))
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        # `core.wire` carries the attributes of a data class. If the class is also a list, tuple,
        # set or deque, its items would be lost.
        if isinstance(value, (list, tuple, set, frozenset, deque)):
            return False
        names = {field.name for field in dataclasses.fields(value)} | {*_attributes(value)}
        return all(arrives_unchanged(getattr(value, name, None)) for name in names)
    if kind is dict:
        return all(is_plain(part) for pair in value.items() for part in pair)
    # `core.wire` runs the constructor of a subclass of `dict`, and drops its attributes.
    if isinstance(value, Mapping) and not isinstance(value, dict):
        return all(arrives_unchanged(part) for pair in value.items() for part in pair)
    return False


def pack(value: Any, references: References = _NO_REFERENCES) -> Tree:
    """Return a value as plain data, with copies of its tensors.

    Args:
        value: The value.
        references: Encodings of objects, by id. Inside the value, the encoding takes the place of
            the object.

    Raises:
        ConfigError: If another rank could not make a value of the same types.
    """

    def packed(part: Any) -> Tree:
        if id(part) in references:
            return [_REFERENCE, references[id(part)]]
        return pack(part, references)

    if arrives_unchanged(value, references):
        return [_VALUE, map_tensors(detached_copy, value)]
    kind: Any = type(value)
    base = next((base for base in _BASES if isinstance(value, base)), None)
    if base is None or dataclasses.is_dataclass(value) or not _can_be_made(kind, base):
        raise ConfigError(
            f"A {kind.__module__}.{kind.__qualname__} cannot be sent to another rank as the same "
            "type. Use numbers, strings, tensors, and lists, tuples, dicts, sets or deques of them."
        )
    # Call the methods of the base class, since the user's class may override them.
    items = (
        [[packed(key), packed(item)] for key, item in base.items(value)]
        if issubclass(base, dict)
        else [packed(item) for item in base.__iter__(value)]
    )
    argument: Any = None
    if base is deque:
        argument = value.maxlen
    elif base is defaultdict and value.default_factory is not None:
        argument = _path_of(value.default_factory)
    attributes = None
    if getattr(value, "__dict__", None) is not value:
        attributes = [[name, packed(inner)] for name, inner in _attributes(value).items()]
    return [base.__name__, _path_of(kind), argument, items, attributes]


def unpack(packed: Tree, resolve: Callable[[Tree], Any] | None = None) -> Any:
    """Return the value that `pack` turned into plain data, without running user constructors.

    Args:
        packed: The result of `pack`.
        resolve: Returns the object of an encoding in `references`. None: there were none.

    Raises:
        ProtocolError: If this rank does not have the class, or the factory of a defaultdict.
    """
    tag, *content = packed
    if tag == _VALUE:
        return content[0]
    if tag == _REFERENCE:
        return resolve(content[0]) if resolve is not None else None
    path, argument, items, attributes = content
    base, kind = _BASE_BY_NAME.get(tag), _at_path(path)
    if base is None or not isinstance(kind, type) or not issubclass(kind, base):
        raise ProtocolError(
            f"{path!r} must be a subclass of {tag} on every rank, but this rank has no such class. "
            "Import its module on all ranks."
        )
    result: Any
    if issubclass(base, dict):
        result = base.__new__(kind)
        if base is defaultdict:
            base.__init__(result, None if argument is None else _factory(argument))
        for key, item in items:
            base.__setitem__(result, unpack(key, resolve), unpack(item, resolve))
    elif base in (tuple, frozenset):
        result = base.__new__(kind, (unpack(item, resolve) for item in items))
    else:
        result = base.__new__(kind)
        values = (unpack(item, resolve) for item in items)
        base.__init__(result, values, *((argument,) if base is deque else ()))
    if attributes is None:
        result.__dict__ = result
    elif attributes:
        vars(result).update({name: unpack(inner, resolve) for name, inner in attributes})
    return result


def with_items(value: tuple[Any, ...], items: Sequence[Any]) -> tuple[Any, ...]:
    """Return a tuple of the same class with other items; the tuple itself if its class cannot be
    rebuilt from items."""
    kind = type(value)
    if not _can_be_made(kind, tuple):
        return value
    result = tuple.__new__(kind, items)
    if hasattr(value, "__dict__"):
        # Share the attributes, so that a new value is seen through both tuples.
        result.__dict__ = value.__dict__
    return result


def detached_copy(tensor: Tensor) -> Tensor:
    """Return a copy without a graph."""
    return tensor.detach().clone()


def _attributes(value: Any) -> dict[str, Any]:
    # Leave out names such as `__orig_class__`, which `typing` sets.
    attributes = getattr(value, "__dict__", {})
    return {name: inner for name, inner in attributes.items() if not name.startswith("__")}


@cache
def _can_be_made(kind: Any, base: Any) -> bool:
    """Return True if an instance can be rebuilt from its items and its `__dict__` alone.

    Args:
        kind: Class of the instance.
        base: Built-in base class, whose constructor is used.
    """
    if not {"__dict__", "__weakref__"}.issuperset(slot_names(kind)):
        return False
    try:
        # Fails for the named tuples that are written in C, such as results of `torch.max`.
        return type(base.__new__(kind)) is kind
    except TypeError:
        return False


def _path_of(thing: Any) -> str:
    """Return the import path of a class or function.

    Raises:
        ConfigError: If this path does not lead to it.
    """
    path = f"{getattr(thing, '__module__', None)}:{getattr(thing, '__qualname__', None)}"
    is_importable = isinstance(thing, (type, FunctionType, BuiltinFunctionType))
    if not is_importable or _at_path(path) is not thing:
        raise ConfigError(
            f"{thing!r} cannot be sent to another rank, which looks it up by its import path. "
            "Define it at the top level of a module."
        )
    return path


def _factory(path: str) -> Any:
    factory = _at_path(path)
    if not callable(factory):
        raise ProtocolError(
            f"{path!r} must be the factory of a defaultdict on every rank, but this rank has no "
            "such function or class. Import its module on all ranks."
        )
    return factory


def _at_path(path: str) -> Any:
    module, _, qualname = path.partition(":")
    result: Any = sys.modules.get(module)
    for part in qualname.split("."):
        result = getattr(result, part, None)
    return result
