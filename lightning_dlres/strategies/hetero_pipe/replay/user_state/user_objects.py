"""Objects that hold state of user code: their kinds, and reading and writing their content.

An object of the user's is a module, a callback, a container, any other object with attributes, or a
random generator. `ObjectState` is the content of one such object at one point in time.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Collection, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import cache, partial
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any, cast

import numpy as np
import torch
from lightning.pytorch import LightningDataModule, LightningModule, Trainer
from lightning.pytorch.loggers import Logger
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader, Dataset, Sampler
from torchmetrics import Metric, MetricCollection

from lightning_dlres.core import _compat
from lightning_dlres.core.wire.payload import as_bytes
from lightning_dlres.pipeline.stage.module_attributes import MANAGED_ATTRIBUTES, are_identical

SCALARS = (bool, int, float, complex, str, bytes, type(None))
# Stands for a missing value, where None may be a value.
ABSENT = object()
# Kinds whose content maps names, or keys, to values.
NAMED_KINDS = frozenset({"object", "module", "dict", "settings"})
# Types of values that a run of the step may change in place. Every run gets copies of them.
COPIED_TYPES = {Tensor, np.ndarray}

# Objects of these packages are not the user's state.
_LIBRARIES = {
    *("torch", "lightning", "pytorch_lightning", "lightning_fabric", "torchmetrics", "numpy"),
    *("lightning_dlres", "transformers", "tokenizers", "datasets", "omegaconf", "functools"),
    *("logging", "threading", "queue", "socket", "multiprocessing", "concurrent", "asyncio"),
    *("matplotlib", "PIL", "pandas", "wandb", "tensorboard", "weakref", "_thread", "io", "typing"),
}
# Objects of these classes are not the user's state either, even if the user defines a subclass.
_OPAQUE = (
    type,
    FunctionType,
    ModuleType,
    BaseException,
    Trainer,
    Logger,
    Optimizer,
    DataLoader,
    Enum,
)
# Classes that may hold a whole data set. Only their settings (small attributes) are compared.
_DATA_SOURCES = (Dataset, Sampler, LightningDataModule)
# Attributes that libraries manage in every module, and the methods that this package temporarily
# replaces in a module's `__dict__`.
_HIDDEN_ATTRIBUTES = MANAGED_ATTRIBUTES | {"forward", _compat.CALL, "log", "print"}
_KINDS_WITH_ATTRIBUTES = NAMED_KINDS - {"dict"}
# Types whose values hold no other objects with state.
_FLAT_TYPES = {*SCALARS, Tensor, np.ndarray}
# Immutable types that are compared quickly.
_QUICK_TYPES = {int, str, bytes, bool, type(None), float}
# Immutable types whose equal values cannot be told apart. Floats and complex numbers are not among
# them: 0.0 equals -0.0.
_HASHABLE_TYPES = {*SCALARS, torch.dtype, torch.device, type(Path())} - {float, complex}
# Largest number of items of a sequence that counts as a setting, such as the learning rates of all
# groups.
_MAX_SETTING_ITEMS = 16
# Largest size in bytes of a tensor that counts as a setting, such as a sampler's weights. Every run
# of the step copies it.
_MAX_SETTING_BYTES = 1 << 20


@dataclass(frozen=True)
class ObjectState:
    """The content of one object of the user's, as it was when this state was read.

    Attributes:
        path: Path of attributes and items that leads to the object, from the LightningModule or the
            Trainer.
        owner: The object itself.
        kind: One of the names that `kind_of` returns.
        content: The state. Named kinds have a dict, sequences a list, sets a set, and random
            generators the state of the generator.
        types: Types of the values in `content`.
        holds_copied: Whether a value in `content` is of `COPIED_TYPES`, also within a tuple.
        names: All attribute names of the object, including those that `content` leaves out; empty
            for kinds without attributes.
        values: Values of `names`, in the same order. For a set, its members in its own order.
    """

    path: str
    owner: Any
    kind: str
    content: Any
    types: frozenset[type] = frozenset()
    holds_copied: bool = False
    names: tuple[str, ...] = ()
    values: tuple[Any, ...] = ()

    @staticmethod
    def read(path: str, owner: Any, kind: str) -> ObjectState:
        """Return the state of an object now."""
        content = read_content(owner, kind)
        values = content.values() if kind in NAMED_KINDS else content
        types = frozenset(() if kind in ("random", "set") else map(type, values))
        state = partial(
            ObjectState, path, owner, kind, content, types, _holds_copied(values, types)
        )
        if kind == "set":
            return state(values=tuple(owner))
        if kind not in _KINDS_WITH_ATTRIBUTES:
            return state()
        namespace = namespace_of(owner)
        return state(tuple(namespace), tuple(namespace.values()))

    def is_surely_unchanged(self) -> bool:
        """Return whether a quick comparison proves that the object has not changed.

        False also stands for "unknown": a tensor may have changed in place, or an equal value may
        have taken the place of a number.
        """
        # Identity proves that nothing changed: an object that is not immutable has a state of its
        # own, or belongs to a library. Equality would not prove it: 0, False and -0.0 are equal.
        return not self.holds_copied and self.holds_same_objects()

    def holds_same_objects(self) -> bool:
        """Return whether the object holds the very objects that it held, in the same order.

        A random generator holds its state.
        """
        if self.kind == "random":
            return same_generator_state(read_content(self.owner, self.kind), self.content)
        if self.names:
            namespace = namespace_of(self.owner)
            if are_identical(namespace, self.names) and are_identical(
                namespace.values(), self.values
            ):
                return True
        if self.kind in NAMED_KINDS:
            now = self.owner if self.kind == "dict" else read_content(self.owner, self.kind)
            return are_identical(now, self.content) and are_identical(
                now.values(), self.content.values()
            )
        if self.kind == "set":
            # The order of a set stays the same until the set changes.
            return are_identical(self.owner, self.values)
        return are_identical(self.owner, self.content)

    def children(self) -> Iterator[tuple[str, Any]]:
        """Yield the objects with state inside this one, with their paths."""
        if self.types <= _FLAT_TYPES:
            return
        if self.kind in ("object", "module"):
            prefix = f"{self.path}." if self.path else ""
            named = ((prefix + name, value) for name, value in self.content.items())
        elif self.kind == "dict":
            named = ((f"{self.path}[{key!r}]", value) for key, value in self.content.items())
        elif self.kind == "settings":
            # A list of settings may change in place.
            named = ((f"{self.path}.{n}", v) for n, v in self.content.items() if type(v) is list)
        elif self.kind in ("list", "deque", "tuple"):
            named = ((f"{self.path}[{i}]", value) for i, value in enumerate(self.content))
        else:
            return
        yield from ((path, value) for path, value in named if kind_of(value) is not None)

    def write(self, content: Any) -> None:
        """Replace the object's content in place, since other objects may refer to the object."""
        owner = self.owner
        if self.kind == "settings":
            namespace = namespace_of(owner)
            for name in read_content(owner, "settings").keys() - content.keys():
                del namespace[name]
            namespace.update(content)
        elif self.kind in ("object", "module", "dict"):
            _write_names(owner, self.kind, content)
        elif self.kind in ("list", "deque"):
            if not are_identical(owner, content):
                owner.clear()
                owner.extend(content)
        elif self.kind == "set":
            if not _same_members(owner, content):
                owner.clear()
                owner.update(content)
        elif not same_generator_state(read_content(owner, self.kind), content):
            if isinstance(owner, torch.Generator):
                owner.set_state(content)
            elif isinstance(owner, random.Random):
                owner.setstate(content)
            else:
                owner.bit_generator.state = content


def kind_of(value: Any) -> str | None:
    """Return the kind of an object with state; None for all other values.

    The kinds are "metric", "module", "settings" (data sources), "random", "object", and the
    built-in containers "dict", "list", "deque", "set" and "tuple".
    """
    return _kind_of_class(cast(Hashable, type(value)))


def has_own_attributes(value: Any) -> bool:
    """Return whether a container can have attributes beside its items, as a subclass that the user
    defines."""
    is_builtin = type(value).__module__ in ("builtins", "collections")
    is_container = kind_of(value) in ("dict", "list", "deque", "set", "tuple")
    return is_container and not is_builtin and hasattr(value, "__dict__")


def is_data_source(value: Any) -> bool:
    """Return whether an object may hold a whole data set."""
    return isinstance(value, _DATA_SOURCES)


def is_library_class(kind: type) -> bool:
    """Return whether objects of a class belong to a library, so that they are not the user's
    state."""
    return kind.__module__.partition(".")[0] in _LIBRARIES or issubclass(kind, _OPAQUE)


def namespace_of(owner: Any) -> dict[Any, Any]:
    """Return the dict that holds an object's names: the object itself if it is a dict."""
    return owner if isinstance(owner, dict) else vars(owner)


def read_content(owner: Any, kind: str) -> Any:
    """Return an object's content now, in a container of its own; see `ObjectState.content`."""
    if kind == "dict":
        return dict(owner)
    if kind in ("list", "deque"):
        return list(owner)
    if kind == "set":
        return set(owner)
    if kind == "tuple":
        return owner
    if kind == "module":
        is_root = isinstance(owner, LightningModule)
        hidden = _lightning_attributes() if is_root else _HIDDEN_ATTRIBUTES
        return {name: value for name, value in vars(owner).items() if name not in hidden}
    if kind == "object":
        return dict(vars(owner))
    if kind == "settings":
        return {name: value for name, value in namespace_of(owner).items() if _is_setting(value)}
    if isinstance(owner, torch.Generator):
        return owner.get_state()
    return owner.getstate() if isinstance(owner, random.Random) else owner.bit_generator.state


@cache
def slot_names(kind: Any) -> tuple[str, ...]:
    """Return the names in the `__slots__` of a class and its base classes."""
    slots = [vars(base).get("__slots__", ()) for base in kind.__mro__]
    return tuple(
        name for names in slots for name in ((names,) if isinstance(names, str) else names)
    )


def value_key(value: Any) -> Hashable:
    """Return a key that two values share only if user code cannot tell them apart.

    Python's own equality is no such key: 0, False and -0.0 are equal, and NaN equals nothing. The
    key of a mutable object is its identity; it is valid while the object exists.
    """
    kind: Any = type(value)
    if kind is float:
        return kind, value.hex()
    if kind is complex:
        return kind, value.real.hex(), value.imag.hex()
    if kind in _HASHABLE_TYPES:
        return kind, value
    if isinstance(value, np.generic):
        return kind, value.dtype.str, value.tobytes()
    if kind in (tuple, frozenset):
        return kind, kind(map(value_key, value))
    return kind, id(value)


def same_tensors(a: Tensor, b: Tensor) -> bool:
    """Return whether two tensors have the same shape, dtype, device, layout and values, bit by bit.

    NaN is the same as NaN, and 0.0 differs from -0.0.
    """
    # A nested tensor may have no shape.
    if a.is_nested or b.is_nested:
        return a.is_nested and b.is_nested and a.layout == b.layout and _same_parts(a, b)
    if (a.shape, a.dtype, a.device, a.layout) != (b.shape, b.dtype, b.device, b.layout):
        return False
    if a.layout is not torch.strided:
        return _same_parts(a, b)
    # A tensor on the meta device has no values.
    if a.is_meta:
        return True
    if a.is_quantized or b.is_quantized:
        return torch.equal(a, b)
    return torch.equal(as_bytes(a), as_bytes(b))


def _same_parts(a: Tensor, b: Tensor) -> bool:
    parts, others = _dense_parts(a.detach()), _dense_parts(b.detach())
    return len(parts) == len(others) and all(map(same_tensors, parts, others))


def _dense_parts(tensor: Tensor) -> Sequence[Tensor]:
    """Return the strided tensors that a nested or sparse tensor is made of."""
    if tensor.is_nested:
        return tensor.unbind()
    if tensor.layout is torch.sparse_coo:
        # Public functions show the indices only of a coalesced tensor, in which each is once.
        is_coalesced = torch.tensor(tensor.is_coalesced())
        tensor = tensor.coalesce()
        return tensor.indices(), tensor.values(), is_coalesced
    if tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        return tensor.crow_indices(), tensor.col_indices(), tensor.values()
    if tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
        return tensor.ccol_indices(), tensor.row_indices(), tensor.values()
    return (tensor.to_dense(),)


def same_generator_state(a: Any, b: Any) -> bool:
    """Return whether two states of a random generator, of torch, NumPy or Python, are equal."""
    if isinstance(a, Tensor):
        return torch.equal(a, b)
    if isinstance(a, np.ndarray):
        return np.array_equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same_generator_state(a[name], b[name]) for name in a)
    return bool(a == b)


def _same_members(a: Collection[Any], b: Collection[Any]) -> bool:
    """Return whether two sets hold the same objects."""
    return len(a) == len(b) and set(map(id, a)) == set(map(id, b))


def _write_names(owner: Any, kind: str, content: dict[Any, Any]) -> None:
    namespace = owner if kind == "dict" else vars(owner)
    # Delete the names that `content` lacks. Comparing lengths is quick, but misses a name that took
    # the place of another: the check after the write finds it. The lengths of a module prove
    # nothing, since its namespace also has names that are not content.
    if len(namespace) != len(content) or kind == "module":
        for name in [n for n in read_content(owner, kind) if n not in content]:
            del namespace[name]
    for name, value in content.items():
        if namespace.get(name, ABSENT) is not value:
            namespace[name] = value
    if len(namespace) != len(content) and kind != "module":
        for name in [n for n in namespace if n not in content]:
            del namespace[name]
    # A cache that drops its oldest entry depends on the order of a dict.
    if kind == "dict" and not are_identical(namespace, content):
        namespace.clear()
        namespace.update(content)


def _holds_copied(values: Iterable[Any], types: frozenset[type]) -> bool:
    """Return whether a value is of `COPIED_TYPES`, also within a tuple.

    Args:
        values: The values.
        types: Their types.
    """
    if not COPIED_TYPES.isdisjoint(types):
        return True
    if not any(issubclass(kind, tuple) for kind in types):
        return False
    items = [value for value in values if isinstance(value, tuple)]
    return any(_holds_copied(item, frozenset(map(type, item))) for item in items)


def _is_setting(value: Any) -> bool:
    if type(value) in _QUICK_TYPES:
        return True
    if isinstance(value, (tuple, list)):
        return len(value) <= _MAX_SETTING_ITEMS and all(
            type(item) in _QUICK_TYPES for item in value
        )
    if type(value) is Tensor:
        return value.layout is torch.strided and value.nbytes <= _MAX_SETTING_BYTES
    return type(value) is np.ndarray and value.nbytes <= _MAX_SETTING_BYTES


@cache
def _lightning_attributes() -> frozenset[str]:
    hooks = ("train_dataloader", "val_dataloader", "test_dataloader", "predict_dataloader")
    return (
        _HIDDEN_ATTRIBUTES
        | frozenset(vars(LightningModule()))
        | {"_hparams", "_hparams_initial", *hooks}
    )


@cache
def _kind_of_class(kind: Any) -> str | None:
    # Keep this order: a metric is also a module, and a data source may be one too.
    if issubclass(kind, (Metric, MetricCollection)):
        return "metric"
    if issubclass(kind, (torch.jit.ScriptModule, *_OPAQUE)):
        return None
    if issubclass(kind, nn.Module):
        return "module"
    if issubclass(kind, _DATA_SOURCES):
        return "settings"
    if issubclass(kind, (torch.Generator, random.Random, np.random.Generator)):
        return "random"
    if is_library_class(kind):
        return None
    for base in (dict, list, deque, set, tuple):
        if issubclass(kind, base):
            return base.__name__
    return "object" if getattr(kind, "__dictoffset__", 0) else None
