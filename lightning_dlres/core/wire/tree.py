"""Trees: nested containers of tensors, split into plain data and tensors, and rebuilt.

A batch or a layer's output may be a tensor, or lists, tuples, dicts, named tuples, dataclasses and
other mappings of them. To send a tree to another rank without pickle, it is split into a
*structure* (plain data for msgpack) and its tensors. The structure names classes. The receiver
builds only data classes, named tuples and mappings that it has already imported, so that no message
can choose code to run.
"""

from __future__ import annotations

import dataclasses
import functools
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from enum import Enum
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lightning_dlres.core.errors import ConfigError, ProtocolError

# A nested container of tensors and data, or a single one of them.
Tree = Any
# A node of plain data for msgpack: a tag, followed by the node's content.
Structure = list[Any]

# Array classes without further state. Others have a mask, a unit or other operators.
_PLAIN_ARRAYS = (np.ndarray, np.memmap)
# msgpack holds integers of 64 bits. Larger ones travel as text.
_INT64_BOUND = 1 << 63
_CONVERT = (
    "Make a tensor of it in the dataset or its collate function if a batch holds it, else in the "
    "layer that returns it."
)
# Tags of nodes without children: tensor, array, NumPy scalar, plain value, large integer, complex
# number, torch.Size, dtype or device, and path. The other tags are "l" list, "u" tuple, "d" dict,
# "n" named tuple, "c" data class, "m" other mapping, and "e" enum member.
_LEAVES = ("t", "a", "g", "v", "i", "z", "s", "k", "p")
# A value of a subclass arrives as a plain one.
_PLAIN_VALUES = (str, bytes, int, float, complex)


def flatten(tree: Tree) -> tuple[Structure, list[Tensor]]:
    """Return the structure of `tree` and its tensors in order (NumPy arrays count as tensors).

    Raises:
        ConfigError: If the tree contains itself, or an object that is neither data nor a container
            of data.
    """
    tensors: list[Tensor] = []
    try:
        return _describe(tree, tensors), tensors
    except RecursionError:
        raise ConfigError(
            "A batch or a layer's output cannot be sent to another rank: it is nested too deep, or "
            f"contains itself. {_CONVERT}"
        ) from None


def unflatten(structure: Structure, tensors: Sequence[Tensor]) -> Tree:
    """Return the tree of a structure and its tensors.

    Raises:
        ProtocolError: If the structure is malformed, or names a class that is not imported here or
            is not a container of data.
    """
    try:
        return _build(structure, tensors)
    except ProtocolError:
        raise
    except (
        AttributeError,
        LookupError,
        TypeError,
        ValueError,
        ArithmeticError,
        RuntimeError,
    ) as error:
        raise ProtocolError(
            f"The structure of a received tree is malformed: {error!r}. Check that all ranks run "
            "the same version."
        ) from error


def tensors_of(tree: Tree) -> list[Tensor]:
    """Return the tensors of a tree, in the order of `flatten`."""
    if isinstance(tree, Tensor):
        return [tree]
    return flatten(tree)[1]


def map_tensors(function: Callable[[Tensor], Tree], tree: Tree) -> Tree:
    """Return the tree with `function` applied to each of its tensors."""
    if isinstance(tree, Tensor):
        return function(tree)
    structure, tensors = flatten(tree)
    return unflatten(structure, [function(tensor) for tensor in tensors])


def _describe(node: Tree, tensors: list[Tensor]) -> Structure:
    if isinstance(node, Tensor):
        tensors.append(node)
        return ["t", len(tensors) - 1]
    kind = type(node)
    if kind in (list, tuple):
        return ["l" if kind is list else "u", [_describe(child, tensors) for child in node]]
    # Long lists hold numbers: states of random generators, sequences of tokens.
    if node is None or kind in (float, bool) or (kind is int and _fits(node)):
        return ["v", node]
    if isinstance(node, (np.ndarray, np.generic)):
        if isinstance(node, np.ndarray) and type(node) not in _PLAIN_ARRAYS:
            raise _refused(type(node), f"Only its values would arrive. {_CONVERT}")
        tensors.append(_from_numpy(node))
        return ["g" if isinstance(node, np.generic) else "a", len(tensors) - 1]
    if isinstance(node, Enum):
        # A combination of flags is no member of the class, so the receiver cannot look it up.
        if node.name not in type(node).__members__:
            raise _refused(type(node), f"{node!r} is not one of its members. Send its value.")
        return ["e", _class_name(type(node)), node.name]
    if isinstance(node, _PLAIN_VALUES) and getattr(node, "__dict__", None):
        raise _refused(kind, f"Its attributes {sorted(vars(node))} would not arrive. {_CONVERT}")
    if isinstance(node, str):
        return ["v", _utf8(node)]
    if isinstance(node, bool):
        return ["v", node]
    if isinstance(node, float):
        return ["v", float(node)]
    if isinstance(node, bytes):
        return ["v", bytes(node)]
    if isinstance(node, int):
        # Hexadecimal: Python refuses to convert thousands of digits to or from decimal text.
        return ["v", int(node)] if _fits(node) else ["i", hex(node)]
    if isinstance(node, complex):
        return ["z", node.real, node.imag]
    if isinstance(node, torch.Size):
        return ["s", list(node)]
    if isinstance(node, Path):
        return ["p", _utf8(str(node))]
    if isinstance(node, (torch.dtype, torch.device)):
        return ["k", type(node).__name__, str(node).removeprefix("torch.")]
    return _describe_container(node, tensors)


def _fits(number: int) -> bool:
    return -_INT64_BOUND <= number < _INT64_BOUND


def _describe_container(node: Tree, tensors: list[Tensor]) -> Structure:
    kind = type(node)
    if dataclasses.is_dataclass(node) and not isinstance(node, type):
        values = [[name, _describe(getattr(node, name), tensors)] for name in _attributes(node)]
        return ["c", _class_name(kind), values]
    if isinstance(node, tuple) and hasattr(kind, "_fields"):
        return ["n", _class_name(kind), [_describe(child, tensors) for child in node]]
    if isinstance(node, Mapping):
        pairs = [
            [_describe(key, tensors), _describe(value, tensors)] for key, value in node.items()
        ]
        if kind is dict:
            return ["d", pairs]
        if _can_be_built_from_dict(kind):
            return ["m", _class_name(kind), pairs]
    raise _refused(
        kind,
        "A batch or a layer's output must be made of tensors, arrays, numbers, strings, and lists, "
        "tuples, dicts, named tuples, data classes or mappings of them. " + _advice(kind),
    )


def _refused(kind: type, reason: str) -> ConfigError:
    """Return the error for an object of a class that cannot be sent."""
    return ConfigError(
        f"A {kind.__module__}.{kind.__qualname__} cannot be sent to another rank. {reason}"
    )


def _attributes(node: Any) -> list[str]:
    """Return the names of a data class's fields that are set, and of its other attributes.

    Values of `cached_property` are omitted: the receiver computes them again, perhaps for another
    part of the batch.
    """
    kind = type(node)
    fields = [f.name for f in dataclasses.fields(node) if hasattr(node, f.name)]
    if isinstance(node, Mapping):
        return fields
    others = [
        name
        for name in getattr(node, "__dict__", {})
        if name not in fields
        # `typing` sets names such as `__orig_class__`, which are no data.
        and not name.startswith("__")
        and not isinstance(getattr(kind, name, None), functools.cached_property)
    ]
    return fields + others


def _advice(kind: type) -> str:
    """Return advice on replacing an object of a class that cannot be sent."""
    for base in kind.__mro__:
        if base.__module__ == "PIL.Image":
            return (
                "Make a tensor of each image in the dataset, as torchvision's "
                "transforms.functional.pil_to_tensor does."
            )
        # Models return caches by default, so advice about the dataset would not help.
        if base.__module__.startswith("transformers.") and base.__name__.endswith("Cache"):
            return "Call the model with use_cache=False, or set model.config.use_cache = False."
    if issubclass(kind, Iterator):
        return "Make a list of what it yields."
    return _CONVERT


def _utf8(text: str) -> str:
    """Return the text as a plain `str`; raise a ConfigError if it is not valid Unicode."""
    try:
        return text.encode().decode()
    except UnicodeEncodeError as error:
        raise ConfigError(
            f"The string {text!r} cannot be sent to another rank: {error}. {_CONVERT}"
        ) from error


def _can_be_built_from_dict(kind: Any) -> bool:
    """Return True if a mapping class can be called with a dict, as the receiver does."""
    try:
        return isinstance(kind({}), kind)
    except Exception:
        # A user's constructor may raise any exception.
        return False


def _from_numpy(array: np.ndarray[Any, Any] | np.generic) -> Tensor:
    try:
        return torch.from_numpy(np.ascontiguousarray(array).reshape(np.shape(array)))
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"A NumPy array of dtype {array.dtype} cannot be sent to another rank: its dtype must "
            f"be numeric. {_CONVERT}"
        ) from error


def _class_name(kind: type) -> str:
    """Return the name by which another rank finds a class.

    Raises:
        ConfigError: If another rank could not find it by that name.
    """
    name = f"{kind.__module__}:{kind.__qualname__}"
    if _lookup(name) is not kind:
        raise _refused(
            kind, "Other ranks find a class by its name: define it at the top level of its module."
        )
    return name


def _build(node: Structure, tensors: Sequence[Tensor]) -> Tree:
    tag = node[0]
    if tag in _LEAVES:
        return _build_leaf(node, tensors)
    if tag in ("l", "u"):
        children = [_build(child, tensors) for child in node[1]]
        return children if tag == "l" else tuple(children)
    if tag == "d":
        return {_build(key, tensors): _build(value, tensors) for key, value in node[1]}
    return _build_object(node, tensors)


def _build_leaf(node: Structure, tensors: Sequence[Tensor]) -> Tree:
    tag = node[0]
    if tag == "t":
        return tensors[node[1]]
    if tag == "a":
        return tensors[node[1]].detach().numpy()
    if tag == "g":
        return tensors[node[1]].detach().numpy()[()]
    if tag == "v":
        return node[1]
    if tag == "i":
        # Base 0 accepts hexadecimal text, and the decimal text of earlier versions' stores.
        return int(node[1], 0)
    if tag == "z":
        return complex(node[1], node[2])
    if tag == "s":
        return torch.Size(node[1])
    if tag == "p":
        return Path(node[1])
    if node[1] == "device":
        return torch.device(node[2])
    dtype = getattr(torch, node[2])
    if not isinstance(dtype, torch.dtype):
        raise ProtocolError(
            f"{node[2]!r} arrived as a dtype, but torch has no such dtype here. Check that all "
            "ranks run the same version of torch."
        )
    return dtype


def _build_object(node: Structure, tensors: Sequence[Tensor]) -> Tree:
    tag, name, content = node
    kind = _resolve(name)
    if tag == "e" and issubclass(kind, Enum):
        return kind[content]
    if tag == "n" and issubclass(kind, tuple) and hasattr(kind, "_make"):
        return kind._make(_build(child, tensors) for child in content)
    if tag == "m" and issubclass(kind, Mapping):
        return kind({_build(key, tensors): _build(value, tensors) for key, value in content})  # type: ignore[call-arg]
    if tag == "c" and dataclasses.is_dataclass(kind):
        values = {field: _build(child, tensors) for field, child in content}
        if issubclass(kind, Mapping):
            return kind(**values)
        instance = object.__new__(kind)
        for field, value in values.items():
            object.__setattr__(instance, field, value)
        return instance
    raise ProtocolError(
        f"{name!r} arrived as a container of data, but is not one in this process. Check that all "
        "ranks run the same code."
    )


def _lookup(name: str) -> Any:
    """Return the object of a name such as "module:Class", or None; imports nothing."""
    module, _, qualname = name.partition(":")
    target: Any = sys.modules.get(module)
    for part in qualname.split("."):
        target = getattr(target, part, None)
    return target


def _resolve(name: str) -> type:
    kind = _lookup(name)
    if not isinstance(kind, type):
        raise ProtocolError(
            f"{name!r} arrived in a batch, but no such class is imported here. Import it on all "
            "ranks."
        )
    return kind
