"""State that a training step can change, but that this package does not undo after a run of it.

This is: globals and class attributes of the user's Python modules, objects with `__slots__`,
iterators, open files, function closures, byte arrays, objects in NumPy arrays, and large tensors of
data sets and samplers.

The state is read before and after the trial step on real samples. One line for the user names the
parts that changed.
"""

from __future__ import annotations

import gc
import io
import itertools
import random
import sys
import sysconfig
import zlib
from array import array
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from pathlib import Path
from types import FunctionType, GeneratorType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, Sampler
from torchmetrics import Metric, MetricCollection

from lightning_dlres.core.errors import DlresError
from lightning_dlres.pipeline.execute.layer_tensors import LayerTensors
from lightning_dlres.pipeline.stage.module_attributes import MANAGED_ATTRIBUTES
from lightning_dlres.strategies.hetero_pipe.replay.user_state.user_objects import (
    SCALARS,
    is_library_class,
    slot_names,
    value_key,
)

# Largest number of objects that are read; the search stops there.
_MAX_OBJECTS = 20_000
# Largest array, in bytes, whose content is compared.
_MAX_ARRAY_BYTES = 1 << 24
# Largest number of names in the line for the user.
_MAX_NAMES = 12
_STANDARD_LIBRARY = Path(sysconfig.get_path("stdlib")).resolve()
_INSTALL_FOLDERS = {"site-packages", "dist-packages"}

# The parts of an object, by name. An attribute's name starts with "." and an item's with "[". A
# part for which user code has no name, such as the list inside an iterator, has a name that starts
# with " ". The object's own value has the empty name.
Entries = list[tuple[str, Any]]


class UntrackedState:
    """The state that user code can reach, read when this object is made.

    The search also passes through tracked state, which may refer to untracked objects. Tracked
    state does not count as changed, because every run of the step is undone.

    Args:
        roots: The user's objects, by name.
        classes: The user's classes. The Python modules that define them are searched, and the
            user's modules that these import.
        layers: Modules that are not searched.
    """

    def __init__(
        self,
        roots: Iterable[tuple[str, Any]],
        classes: Iterable[type],
        layers: Iterable[nn.Module] = (),
    ) -> None:
        seen = {id(inner) for layer in layers for inner in layer.modules()}
        # Name, object and parts. Holding the object keeps Python from giving its id to another one.
        self._objects: list[tuple[str, Any, Entries]] = []
        modules = ((module.__name__, module) for module in _user_modules(classes))
        queue = deque([*roots, *modules])
        while queue and len(self._objects) < _MAX_OBJECTS:
            path, value = queue.popleft()
            entries = None if id(value) in seen else _read(value)
            if entries is None:
                continue
            seen.add(id(value))
            self._objects.append((path, value, entries))
            # A part whose name starts with " " gets the name of the object.
            queue += [(path + name.partition(" ")[0], inner) for name, inner in entries]

    def changed(self, layer_tensors: LayerTensors) -> list[str]:
        """Return the names of the parts that have changed since this object was made, except for
        tensors that layers made."""
        names: dict[str, None] = {}
        for path, value, entries in self._objects:
            before, now = dict(entries), dict(_read(value) or [])
            for name in [*before, *(name for name in now if name not in before)]:
                new = now.get(name)
                if isinstance(new, Tensor) and layer_tensors.layer_of(new) is not None:
                    continue
                if not _is_same(before.get(name), new):
                    # An index, or a position in a file or an iterator, would not help the user.
                    is_named = name.startswith(".") or "['" in name
                    names[path + name if is_named else path] = None
        return list(names)


def untracked_state_warning(names: list[str]) -> str | None:
    """Return one line that names the untracked state that a step changed; None without names."""
    if not names:
        return None
    more = f", and {len(names) - _MAX_NAMES} more" if len(names) > _MAX_NAMES else ""
    return (
        f"dlres: training_step changes {', '.join(names[:_MAX_NAMES])}{more}, which cannot be "
        "undone: the ranks that run the step change it in every run, and other ranks never change "
        "it. Keep such state in numbers, tensors and lists of the LightningModule."
    )


def _is_same(a: Any, b: Any) -> bool:
    return a is b or value_key(a) == value_key(b)


def _read(value: Any) -> Entries | None:
    try:
        return _entries(value)
    except Exception:
        # An object of the user's may raise at any access, such as a proxy of a closed connection.
        return None


def _entries(value: Any) -> Entries | None:
    """Return the parts of an object by name; None if it is not searched."""
    if isinstance(value, (*SCALARS, Metric, MetricCollection, BaseException)):
        return None
    if isinstance(value, Tensor):
        return [("", value._version)]
    if isinstance(value, np.ndarray):
        if value.nbytes > _MAX_ARRAY_BYTES:
            return None
        if value.dtype.hasobject:
            return [(f"[{i}]", inner) for i, inner in enumerate(value.flat)]
        return [("", zlib.crc32(value.tobytes()))]
    if isinstance(value, (bytearray, array)):
        return [("", zlib.crc32(value))] if memoryview(value).nbytes <= _MAX_ARRAY_BYTES else None
    if isinstance(value, dict):
        # Not `value.items()`: that of a subclass may make its values, such as the mappings of
        # transformers, which import all of its models.
        return [(f"[{key!r}]", inner) for key, inner in dict.items(value)]
    if isinstance(value, (list, tuple, deque)):
        return [("", len(value)), *((f"[{i}]", inner) for i, inner in enumerate(value))]
    if isinstance(value, (set, frozenset)):
        return [("", frozenset(value))]
    if isinstance(value, torch.Generator):
        return [("", zlib.crc32(value.get_state().numpy().tobytes()))]
    if isinstance(value, (random.Random, np.random.Generator)):
        state = value.getstate() if isinstance(value, random.Random) else value.bit_generator.state
        return [("", repr(state))]
    if isinstance(value, io.IOBase):
        return [("", _file_position(value))]
    if isinstance(value, GeneratorType):
        frame = value.gi_frame
        if frame is None:
            return [("", -1)]
        inside = (value.gi_yieldfrom, *frame.f_locals.values())
        return [("", frame.f_lasti), *((f" {i}", v) for i, v in enumerate(inside))]
    if hasattr(type(value), "__next__"):
        return _iterator_entries(value)
    return _object_entries(value)


def _iterator_entries(value: Any) -> Entries:
    if isinstance(value, itertools.count):
        return [("", repr(value))]
    hint = getattr(value, "__length_hint__", None)
    inside = vars(value).values() if hasattr(value, "__dict__") else gc.get_referents(value)
    return [("", hint() if hint is not None else 0), *((f" {i}", v) for i, v in enumerate(inside))]


def _object_entries(value: Any) -> Entries | None:
    kind: Any = type(value)
    names: Mapping[str, Any] | None
    if isinstance(value, ModuleType):
        names = vars(value) if _is_user_module(value.__name__) else None
    elif isinstance(value, type):
        names = vars(value) if _is_user_module(value.__module__) else None
    elif isinstance(value, FunctionType):
        return _function_entries(value) if _is_user_module(value.__module__) else None
    elif isinstance(value, nn.Module):
        own = {name: inner for name, inner in vars(value).items() if name not in MANAGED_ATTRIBUTES}
        names = {**own, **value._modules, **value._parameters}
    elif is_library_class(kind) and not isinstance(value, (Dataset, Sampler)):
        return None
    else:
        slots = {n: getattr(value, n) for n in slot_names(kind) if hasattr(value, n)}
        names = {**slots, **getattr(value, "__dict__", {})}
    if names is None:
        return None
    return [(f".{n}", v) for n, v in list(names.items()) if not str(n).startswith("__")]


def _function_entries(function: FunctionType) -> Entries:
    entries = [(f".{name}", value) for name, value in vars(function).items()]
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=False):
        # A cell is empty until its variable has a value.
        entries += [(f".{name}", content) for content in gc.get_referents(cell)]
    return entries + [(f" {i}", value) for i, value in enumerate(function.__defaults__ or ())]


def _file_position(file: io.IOBase) -> int:
    try:
        return file.tell() if not file.closed and file.seekable() else -1
    except (OSError, ValueError):
        # `tell` of a text file raises while user code iterates over the file. Its buffer has a
        # position, too, which moves one block at a time.
        return _file_position(file.buffer) if hasattr(file, "buffer") else -1


@cache
def _is_user_module(name: str | None) -> bool:
    """Return whether a Python module is the user's: neither installed nor a part of Python, nor of
    this package."""
    file = getattr(sys.modules.get(name or ""), "__file__", None)
    if name == "__main__":
        return True
    if file is None or (name or "").partition(".")[0] == DlresError.__module__.partition(".")[0]:
        return False
    path = Path(file).resolve()
    return _INSTALL_FOLDERS.isdisjoint(path.parts) and not path.is_relative_to(_STANDARD_LIBRARY)


def _user_modules(classes: Iterable[type]) -> Iterator[ModuleType]:
    """Yield the user's Python modules that define these classes, and those that they import."""
    names = [base.__module__ for kind in classes for base in kind.__mro__]
    seen: set[str] = set()
    while names:
        name = names.pop()
        module = sys.modules.get(name)
        if name in seen or module is None or not _is_user_module(name):
            continue
        seen.add(name)
        yield module
        for value in vars(module).values():
            if isinstance(value, ModuleType):
                names.append(value.__name__)
            elif isinstance(value, (type, FunctionType)):
                names.append(value.__module__ or "")
