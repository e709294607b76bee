"""Snapshots of the attributes of modules, for trial runs that leave no trace.

A layer may count its calls, fill a list, or write to a tensor that is no buffer. A trial that left
such a change would start training from another state than on a single device.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Collection, Iterable, Iterator
from types import FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from lightning_dlres.core._compat import CALL, registered_buffers
from lightning_dlres.pipeline.stage.closeness import has_same_values
from lightning_dlres.pipeline.stage.module_attributes import (
    HAS_COLLECTORS,
    MANAGED_ATTRIBUTES,
    are_identical,
)

# Objects of other packages' classes are the user's, if they have attributes.
_LIBRARIES = sys.stdlib_module_names | {
    *("torch", "torchvision", "torchmetrics", "lightning", "pytorch_lightning"),
    *("lightning_fabric", "lightning_dlres", "transformers", "numpy"),
}
_SCALARS = {bool, int, float, complex, str, bytes, type(None)}
_NOT_OPENED = (nn.Module, type, FunctionType, MethodType, ModuleType)


class AttributeState:
    """The attributes of modules now, and the content of the objects in them.

    Args:
        modules: The modules.
        left_out: Names of attributes that are not restored.
    """

    def __init__(self, modules: Iterable[nn.Module], left_out: Collection[str] = ()) -> None:
        self._left_out = {CALL, HAS_COLLECTORS, *left_out}
        modules = list(modules)
        self._namespaces = [(vars(module), self._kept(vars(module))) for module in modules]
        pending = [
            value
            for _, namespace in self._namespaces
            for name, value in namespace.items()
            if name not in MANAGED_ATTRIBUTES
        ]
        # By the id of each object: the object and its content.
        self._contents: dict[int, tuple[Any, Any]] = {}
        # A layer may register a buffer in its first call, or put another tensor in its place.
        for module in modules:
            for registered in registered_buffers(module):
                self._contents[id(registered)] = registered, _content_of(registered)
        seen = set(self._contents)
        for value in pending:
            if id(value) in seen:
                continue
            seen.add(id(value))
            content = _content_of(value)
            if content is not None:
                self._contents[id(value)] = value, content
            pending.extend(_children_of(value))

    def restore(self) -> None:
        """Give all modules, and all objects, what they held."""
        for namespace, before in self._namespaces:
            for name in self._kept(namespace).keys() - before.keys():
                del namespace[name]
            namespace.update(before)
        for value, content in self._contents.values():
            _restore(value, content)

    def _kept(self, namespace: dict[str, Any]) -> dict[str, Any]:
        return {name: value for name, value in namespace.items() if name not in self._left_out}


def _is_opened(value: Any) -> bool:
    """Return whether the attributes of an object count: one of a class of the user's."""
    root = type(value).__module__.partition(".")[0]
    return (
        hasattr(value, "__dict__") and root not in _LIBRARIES and not isinstance(value, _NOT_OPENED)
    )


def _content_of(value: Any) -> Any:
    """Return what an object holds, as a copy; None for one that cannot change, or is not opened."""
    if isinstance(value, Tensor):
        # A computed tensor is made anew in every run.
        is_plain = type(value) is Tensor and value.grad_fn is None and not value.is_meta
        return value.detach().clone() if is_plain and value.layout == torch.strided else None
    if isinstance(value, np.ndarray):
        return value.copy() if value.flags.writeable else None
    if isinstance(value, list | deque):
        return list(value)
    if isinstance(value, dict):
        return dict(value)
    if isinstance(value, set):
        return set(value)
    return dict(vars(value)) if _is_opened(value) else None


def _children_of(value: Any) -> Iterator[Any]:
    elements = value.values() if isinstance(value, dict) else value
    # A vocabulary has many elements, and nothing in them can change.
    if isinstance(value, list | deque | tuple | dict) and not _SCALARS.issuperset(
        map(type, elements)
    ):
        yield from elements
    if _is_opened(value):
        yield from vars(value).values()


def _restore(value: Any, content: Any) -> None:
    """Give an object the content that it had."""
    if isinstance(value, Tensor):
        if value.shape != content.shape:
            value.data = content
        elif not has_same_values(value, content):
            value.data.copy_(content)
    elif isinstance(value, np.ndarray):
        if value.flags.writeable:
            value[...] = content
    elif isinstance(value, list | deque | set):
        if not are_identical(list(value), list(content)):
            value.clear()
            value.extend(content) if not isinstance(value, set) else value.update(content)
    else:
        namespace = value if isinstance(value, dict) else vars(value)
        if not (
            are_identical(list(namespace), list(content))
            and are_identical(list(namespace.values()), list(content.values()))
        ):
            namespace.clear()
            namespace.update(content)
