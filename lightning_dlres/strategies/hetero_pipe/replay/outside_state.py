"""State that no run of a training step can take back: globals and class attributes of the user's
modules, objects with `__slots__`, iterators, open files, function closures, and large tensors of
data sets and samplers.

They are looked at before and after the step on real samples; those that changed are named.
"""

from __future__ import annotations

import gc
import io
import itertools
import random
import sys
import sysconfig
import zlib
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
from lightning_dlres.strategies.hetero_pipe.replay.attributes import is_foreign

# The most objects that are looked at, and the largest array.
_MOST_OBJECTS = 20_000
_MOST_BYTES = 1 << 24
_NAMED = 12
_SCALARS = (bool, int, float, complex, str, bytes, type(None))
# What torch and Lightning keep in a module's attributes.
_OF_TORCH = frozenset(vars(nn.Module()))
_PYTHON = Path(sysconfig.get_path("stdlib")).resolve()
_INSTALLED = {"site-packages", "dist-packages"}

Entries = list[tuple[str, Any]]


class OutsideState:
    """The state that user code can reach, as it is when this object is made.

    Args:
        roots: objects of the user's, by name.
        classes: classes of the user's; their modules are looked at, and those that they import.
        layers: modules that are not looked at.
    """

    def __init__(
        self,
        roots: Iterable[tuple[str, Any]],
        classes: Iterable[type],
        layers: Iterable[nn.Module] = (),
    ) -> None:
        seen = {id(inner) for layer in layers for inner in layer.modules()}
        self._seen: list[tuple[str, Any, Entries]] = []
        modules = ((module.__name__, module) for module in _own_modules(classes))
        waiting = deque([*roots, *modules])
        while waiting and len(self._seen) < _MOST_OBJECTS:
            path, value = waiting.popleft()
            entries = None if id(value) in seen else _looked_at(value)
            if entries is None:
                continue
            seen.add(id(value))
            self._seen.append((path, value, entries))
            # Inside of an iterator nothing has a name of the user's.
            waiting += [(path + name.partition(" ")[0], inner) for name, inner in entries]

    def changed(self, made: LayerTensors) -> list[str]:
        """Return the names of what is not as it was; tensors that layers `made` do not count."""
        names: dict[str, None] = {}
        for path, value, entries in self._seen:
            before, now = dict(entries), dict(_looked_at(value) or [])
            for name in [*before, *(name for name in now if name not in before)]:
                new = now.get(name)
                is_made = isinstance(new, Tensor) and made.layer_of(new) is not None
                if not is_made and not _same(before.get(name), new):
                    # A position in a sequence, a file or an iterator has no name of its own.
                    names[path + name if name.startswith(".") or "['" in name else path] = None
        return list(names)


def line_about(names: list[str]) -> str | None:
    """Return one line that names what a step changed; None if there is nothing."""
    if not names:
        return None
    more = f", and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return (
        f"dlres: training_step changes {', '.join(names[:_NAMED])}{more}, which cannot be taken "
        "back: the ranks that run the step change it, each time they run it, and other ranks do "
        "not. Keep such state in numbers, tensors and lists of the LightningModule."
    )


def _same(a: Any, b: Any) -> bool:
    return a is b or (type(a) is type(b) and isinstance(a, (*_SCALARS, frozenset)) and a == b)


def _looked_at(value: Any) -> Entries | None:
    try:
        return _entries(value)
    except Exception:
        # An object of the user's may raise wherever it is touched, such as a proxy of a closed one.
        return None


def _entries(value: Any) -> Entries | None:
    """Return what an object holds, by name; None if it is not looked into."""
    if isinstance(value, (*_SCALARS, Metric, MetricCollection, BaseException)):
        return None
    if isinstance(value, Tensor):
        return [("", value._version)]
    if isinstance(value, np.ndarray):
        is_plain = value.nbytes <= _MOST_BYTES and not value.dtype.hasobject
        return [("", zlib.crc32(value.tobytes()))] if is_plain else None
    if isinstance(value, dict):
        return [(f"[{key!r}]", inner) for key, inner in value.items()]
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
        return [("", _position(value))]
    if isinstance(value, GeneratorType):
        frame = value.gi_frame
        if frame is None:
            return [("", -1)]
        inside = (value.gi_yieldfrom, *frame.f_locals.values())
        return [("", frame.f_lasti), *((f" {i}", v) for i, v in enumerate(inside))]
    if hasattr(type(value), "__next__"):
        return _of_iterator(value)
    return _of_object(value)


def _of_iterator(value: Any) -> Entries:
    if isinstance(value, itertools.count):
        return [("", repr(value))]
    hint = getattr(value, "__length_hint__", None)
    inside = vars(value).values() if hasattr(value, "__dict__") else gc.get_referents(value)
    return [("", hint() if hint is not None else 0), *((f" {i}", v) for i, v in enumerate(inside))]


def _of_object(value: Any) -> Entries | None:
    kind: Any = type(value)
    names: Mapping[str, Any] | None
    if isinstance(value, ModuleType):
        names = vars(value) if _is_own(value.__name__) else None
    elif isinstance(value, type):
        names = vars(value) if _is_own(value.__module__) else None
    elif isinstance(value, FunctionType):
        return _of_function(value) if _is_own(value.__module__) else None
    elif isinstance(value, nn.Module):
        own = {name: inner for name, inner in vars(value).items() if name not in _OF_TORCH}
        names = {**own, **value._modules, **value._parameters}
    elif is_foreign(kind) and not isinstance(value, (Dataset, Sampler)):
        return None
    else:
        slots = {n: getattr(value, n) for n in _slots_of(kind) if hasattr(value, n)}
        names = {**slots, **getattr(value, "__dict__", {})}
    if names is None:
        return None
    return [(f".{n}", v) for n, v in list(names.items()) if not str(n).startswith("__")]


def _of_function(function: FunctionType) -> Entries:
    found = [(f".{name}", value) for name, value in vars(function).items()]
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=False):
        # A cell is empty until its variable has a value.
        found += [(f".{name}", content) for content in gc.get_referents(cell)]
    return found + [(f" {i}", value) for i, value in enumerate(function.__defaults__ or ())]


def _position(file: io.IOBase) -> int:
    try:
        return file.tell() if not file.closed and file.seekable() else -1
    except (OSError, ValueError):
        # A text file that is iterated does not tell; what it reads from, a block at a time, does.
        return _position(file.buffer) if hasattr(file, "buffer") else -1


@cache
def _slots_of(kind: Any) -> tuple[str, ...]:
    slots = [vars(base).get("__slots__", ()) for base in kind.__mro__]
    return tuple(n for of in slots for n in ((of,) if isinstance(of, str) else of))


@cache
def _is_own(name: str | None) -> bool:
    """Return whether a module is the user's: neither installed nor a part of Python."""
    file = getattr(sys.modules.get(name or ""), "__file__", None)
    if name == "__main__":
        return True
    if file is None or (name or "").partition(".")[0] == DlresError.__module__.partition(".")[0]:
        return False
    path = Path(file).resolve()
    return _INSTALLED.isdisjoint(path.parts) and not path.is_relative_to(_PYTHON)


def _own_modules(classes: Iterable[type]) -> Iterator[ModuleType]:
    """Yield the user's modules that these classes come from, and those that they import."""
    names = [base.__module__ for kind in classes for base in kind.__mro__]
    seen: set[str] = set()
    while names:
        name = names.pop()
        module = sys.modules.get(name)
        if name in seen or module is None or not _is_own(name):
            continue
        seen.add(name)
        yield module
        for value in vars(module).values():
            if isinstance(value, ModuleType):
                names.append(value.__name__)
            elif isinstance(value, (type, FunctionType)):
                names.append(value.__module__ or "")
