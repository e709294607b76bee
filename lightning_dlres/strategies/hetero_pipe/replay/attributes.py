"""State of user code that a training step changes beside parameters and buffers: attributes of the
LightningModule and of modules outside of the layers, containers, objects and random generators that
these refer to, and attributes of callbacks.

The step runs on some ranks only, and on some more than once; plain training runs it once. So every
run starts from the same values, and what one run left is made so on every rank. A run gets copies
of the tensors, since it may change them in place: putting values back instead would invalidate a
graph that has saved them.
"""

from __future__ import annotations

import operator
import random
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import cache
from types import FunctionType, ModuleType
from typing import Any, cast

import numpy as np
import torch
from lightning.pytorch import Callback, LightningDataModule, LightningModule, Trainer
from lightning.pytorch.loggers import Logger
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader, Dataset, Sampler
from torchmetrics import Metric, MetricCollection

from lightning_dlres import _compat
from lightning_dlres.core.errors import ConfigError
from lightning_dlres.core.wire.tree import Tree, map_tensors
from lightning_dlres.pipeline.execute.digest import digest
from lightning_dlres.pipeline.execute.layer_tensors import LayerTensors

_SCALARS = (bool, int, float, complex, str, bytes, type(None))
# Objects of these packages are no state of the user's.
_FOREIGN = {
    *("torch", "lightning", "pytorch_lightning", "lightning_fabric", "torchmetrics", "numpy"),
    *("lightning_dlres", "transformers", "tokenizers", "datasets", "omegaconf", "functools"),
    *("logging", "threading", "queue", "socket", "multiprocessing", "concurrent", "asyncio"),
    *("matplotlib", "PIL", "pandas", "wandb", "tensorboard", "weakref", "_thread", "io", "typing"),
}
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
# They may hold a whole data set: of these only what is quickly told.
_LARGE = (Dataset, Sampler, LightningDataModule)
_IN_PLACE = "in place"
_ABSENT = object()


@dataclass(frozen=True)
class _Node:
    """An object with state, as it is at a moment.

    Attributes:
        types: those of the content's values.
        names, values: of an object with attributes: all of them, content or not.
    """

    path: str
    owner: Any
    kind: str
    content: Any
    types: frozenset[type] = frozenset()
    names: tuple[str, ...] = ()
    values: tuple[Any, ...] = ()

    def is_untouched(self) -> bool:
        """Return whether nothing has changed, where that is quickly said."""
        if self.kind == "random" or not self.types <= _QUICK:
            return False
        if self.names:
            space = _namespace(self.owner)
            # Identity proves equality here: values of these types are immutable.
            if tuple(space) == self.names and all(map(operator.is_, space.values(), self.values)):
                return True
        now = (
            self.owner if self.kind in ("dict", "list", "set") else _content(self.owner, self.kind)
        )
        return bool(now == self.content)


class UserState:
    """What `training_step` may reach of the user's state.

    Args:
        modules: returns the modules outside of the layers, with names; the LightningModule's is "".
        layers: the layers; their attributes belong to the stages.
        callbacks: the Trainer's.
        settings: returns objects of the Trainer, by name, whose numbers and strings count.
    """

    def __init__(
        self,
        modules: Callable[[], Iterable[tuple[str, nn.Module]]],
        layers: Sequence[nn.Module] = (),
        callbacks: Sequence[Callback] = (),
        settings: Callable[[], Mapping[str, Any]] = dict,
    ) -> None:
        self._modules, self._callbacks, self._settings = modules, callbacks, settings
        self._of_layers = {id(inner) for layer in layers for inner in layer.modules()}
        self._metrics: list[tuple[str, nn.Module]] = []

    def lend(self, made: LayerTensors | None = None) -> Loan:
        """Put copies of all tensors in place, and return what takes them back; those that layers
        have made stay the same, so that their use is noticed."""
        return Loan(self._nodes(), made or LayerTensors())

    def apply(self, changes: Tree, own: Mapping[Any, Any]) -> None:
        """Follow the changes of another rank, or of this one: `own` has its values that cannot be
        sent."""
        if not changes:
            return
        nodes = {node.path: node for node in self._nodes()}
        for path, change in changes.items():
            if path in nodes:
                _apply(nodes[path], change, nodes, own)

    def all_metrics(self) -> dict[str, nn.Module]:
        """Return the metrics, and collections of them, that are there now."""
        self._nodes()
        return dict(self._metrics)

    def _nodes(self) -> list[_Node]:
        nodes: list[_Node] = []
        seen: set[int] = set()
        self._metrics = []
        waiting: list[tuple[str, Any]] = []
        for name, module in self._modules():
            seen.add(id(module))
            if isinstance(module, (Metric, MetricCollection)):
                # Made since the run began, perhaps: a tracker's, or a new one for every epoch.
                self._metrics.append((name, module))
            else:
                waiting.append((name, module))
        for index, callback in enumerate(self._callbacks):
            waiting.append((f"trainer.callbacks[{index}]", callback))
        registered = len(waiting)
        for name, owner in self._settings().items():
            if id(owner) not in seen and (isinstance(owner, dict) or hasattr(owner, "__dict__")):
                seen.add(id(owner))
                nodes.append(_node(name, owner, "settings"))
        for count, (path, value) in enumerate(waiting):
            kind = _kind_of(value)
            if kind is None or (id(value) in seen and count >= registered):
                continue
            seen.add(id(value))
            if kind == "module" and count >= registered:
                if id(value) in self._of_layers:
                    continue
                waiting += [(f"{path}.{name}", child) for name, child in value.named_children()]
                buffers = vars(value)["_buffers"]
                nodes.append(_node(f"{path}'s buffers", buffers, "dict"))
            if kind == "metric":
                self._metrics.append((path, value))
                continue
            node = _node(path, value, kind)
            if kind != "tuple":
                nodes.append(node)
            if not node.types <= _FLAT:
                waiting += _children(path, node.content, kind)
        return nodes


def _node(path: str, owner: Any, kind: str) -> _Node:
    content = _content(owner, kind)
    values = content.values() if kind in _NAMED else content
    types = frozenset(() if kind in ("random", "set") else map(type, values))
    if kind not in _WITH_ATTRIBUTES:
        return _Node(path, owner, kind, content, types)
    space = _namespace(owner)
    return _Node(path, owner, kind, content, types, tuple(space), tuple(space.values()))


def _children(path: str, content: Any, kind: str) -> Iterator[tuple[str, Any]]:
    if kind in ("object", "module"):
        prefix = f"{path}." if path else ""
        for name, value in content.items():
            if _kind_of(value) is not None:
                yield prefix + name, value
    elif kind == "dict":
        for key, value in content.items():
            if _kind_of(value) is not None:
                yield f"{path}[{key!r}]", value
    elif kind in ("list", "deque", "tuple"):
        for index, value in enumerate(content):
            if _kind_of(value) is not None:
                yield f"{path}[{index}]", value


class Loan:
    """What one run of the step got: the values of before, with copies of the tensors.

    Attributes:
        kept: what a run left that cannot be sent to other ranks, by path and key.
    """

    def __init__(self, nodes: Sequence[_Node], made: LayerTensors) -> None:
        self._nodes, self._made = nodes, made
        self._paths = {id(node.owner): node.path for node in nodes}
        self._copies: dict[int, Any] = {}
        self._originals: dict[int, tuple[Any, Any, int]] = {}
        self.kept: dict[Any, Any] = {}
        for node in nodes:
            if not node.types.isdisjoint(_COPIED):
                _put(node, self._lent(node.content, node.kind))

    def take_back(self, made: LayerTensors | None = None) -> None:
        """Put everything back as it was; containers stay the same objects. What hooks took of the
        tensors that layers have `made` in this run stays where it is."""
        for node in self._nodes:
            if node.is_untouched():
                continue
            if made and node.kind in _NAMED:
                for name, value in _content(node.owner, node.kind).items():
                    if isinstance(value, Tensor) and made.layer_of(value) is not None:
                        node.content[name] = value
            _put(node, node.content)

    def changes(self) -> Tree:
        """Return what has another value now, by path. What was lent and not changed is the
        same."""
        found = {}
        for node in self._nodes:
            change = None if node.is_untouched() else self._change(node)
            if change is not None:
                found[node.path] = change
        return found

    def _lent(self, content: Any, kind: str) -> Any:
        if kind in _NAMED:
            return {name: self._copy(value) for name, value in content.items()}
        if kind in ("list", "deque"):
            return list(map(self._copy, content))
        return content

    def _copy(self, value: Any) -> Any:
        kind = type(value)
        if kind is tuple and any(type(item) in _VALUES for item in value):
            return tuple(map(self._copy, value))
        if kind not in _VALUES or (kind is Tensor and self._made.layer_of(value) is not None):
            return value
        if id(value) not in self._copies:
            if isinstance(value, Tensor):
                copy: Any = value.detach().clone().requires_grad_(value.requires_grad)
                self._originals[id(copy)] = copy, value, copy._version
            else:
                copy = value.copy()
                self._originals[id(copy)] = copy, value, 0
            self._copies[id(value)] = copy
        return self._copies[id(value)]

    def _change(self, node: _Node) -> Tree:
        before, now = node.content, _content(node.owner, node.kind)
        if node.kind in _NAMED:
            new = [
                [*self._sent(node.path, key, value)]
                for key, value in now.items()
                if not self._same(before.get(key, _ABSENT), value)
            ]
            gone = [key for key in before if key not in now and node.kind != "settings"]
            return ["names", new, gone] if new or gone else None
        if node.kind in ("list", "deque"):
            if len(now) == len(before) and all(map(self._same, before, now)):
                return None
            stays = all(map(self._same, before, now)) and len(now) > len(before)
            start = len(before) if stays and node.kind == "list" else 0
            pieces = enumerate(now[start:], start)
            return ["items", start, [self._sent(node.path, i, v)[1:] for i, v in pieces]]
        if node.kind == "set":
            if now == before:
                return None
            return ["set", [self._sent(node.path, i, v)[1:] for i, v in enumerate(now)]]
        return None if _same_state(before, now) else ["state", now]

    def _sent(self, path: str, key: Any, value: Any) -> tuple[Any, Any, Any]:
        """Return the key, how the value is sent, and the value."""
        mode: str | None = _IN_PLACE if id(value) in self._originals else None
        if id(value) in self._paths:
            return key, "known", self._paths[id(value)]
        try:
            if isinstance(value, (set, frozenset)):
                return key, type(value).__name__, map_tensors(_taken, list(value))
            return key, mode, map_tensors(_taken, value)
        except ConfigError:
            self.kept[path, key] = value
            return key, "kept", [type(value).__name__, path, key]

    def _same(self, a: Any, b: Any) -> bool:
        if a is b:
            return not self._is_changed(b)
        if id(b) in self._originals:
            return a is self._originals[id(b)][1] and not self._is_changed(b)
        if type(a) is not type(b):
            return False
        if isinstance(a, tuple):
            return len(a) == len(b) and all(map(self._same, a, b))
        return isinstance(a, _SCALARS) and bool(a == b)

    def _is_changed(self, value: Any) -> bool:
        copy, original, version = self._originals.get(id(value), (None, None, 0))
        if copy is None:
            return False
        if isinstance(copy, Tensor):
            return bool(copy._version != version)
        return bool(copy.shape != original.shape or copy.tobytes() != original.tobytes())


def changed_lists(changes: Tree) -> list[str]:
    """Return the names of the lists and sets among the changes."""
    return [path for path, change in changes.items() if change[0] in ("items", "set")]


def drawn_from(changes: Tree) -> set[str]:
    """Return the names of the random generators among the changes."""
    return {path for path, change in changes.items() if change[0] == "state"}


def not_sent(changes: Tree) -> dict[str, str]:
    """Return where a run left what cannot be sent to other ranks: path -> class."""
    found = {}
    for change in changes.values():
        for entry in change[1] if change[0] in ("names", "set") else change[-1]:
            if change[0] != "state" and entry[-2] == "kept":
                kind, path, key = entry[-1]
                named = f"{path}.{key}" if path else str(key)
                found[named if isinstance(key, str) else f"{path}[{key!r}]"] = kind
    return found


def fingerprints(changes: Tree) -> dict[str, int]:
    """Return a number for every change; runs that leave the same have the same numbers."""
    return {path: digest(change) for path, change in changes.items()}


def _apply(node: _Node, change: Tree, nodes: Mapping[str, _Node], own: Mapping[Any, Any]) -> None:
    kind, *rest = change

    def received(mode: Any, value: Any, current: Any) -> Any:
        if mode == "known":
            return nodes[value].owner if value in nodes else current
        if mode == "kept":
            return own.get((value[1], value[2]), current)
        if mode == _IN_PLACE and _alike(current, value):
            if isinstance(current, Tensor):
                with torch.no_grad():
                    current.copy_(value)
            else:
                current[...] = value
            return current
        return set(value) if mode == "set" else frozenset(value) if mode == "frozenset" else value

    if kind == "names":
        new, gone = rest
        namespace = _namespace(node.owner)
        for key, mode, value in new:
            found = received(mode, value, namespace.get(key, _ABSENT))
            if found is not _ABSENT:
                namespace[key] = found
        for key in gone:
            namespace.pop(key, None)
    elif kind == "state":
        _put(node, rest[0])
    elif kind == "set":
        _put(node, {received(mode, value, None) for mode, value in rest[0]})
    else:
        start, items = rest
        current = node.content
        tail = [
            received(mode, value, current[start + i] if start + i < len(current) else None)
            for i, (mode, value) in enumerate(items)
        ]
        _put(node, [*current[:start], *tail])


def _taken(tensor: Tensor) -> Tensor:
    return tensor.detach().clone()


def _alike(a: Any, b: Any) -> bool:
    return type(a) is type(b) and a.shape == b.shape and a.dtype == b.dtype


def _same_state(a: Any, b: Any) -> bool:
    return torch.equal(a, b) if isinstance(a, Tensor) else digest(a) == digest(b)


def _content(owner: Any, kind: str) -> Any:
    if kind == "dict":
        return dict(owner)
    if kind in ("list", "deque"):
        return list(owner)
    if kind == "set":
        return set(owner)
    if kind == "tuple":
        return owner
    if kind == "module":
        hidden = _of_lightning() if isinstance(owner, LightningModule) else _OF_TORCH
        return {name: value for name, value in vars(owner).items() if name not in hidden}
    if kind == "object":
        return dict(vars(owner))
    if kind == "settings":
        return {name: value for name, value in _namespace(owner).items() if _is_setting(value)}
    if isinstance(owner, torch.Generator):
        return owner.get_state()
    return owner.getstate() if isinstance(owner, random.Random) else owner.bit_generator.state


def _namespace(owner: Any) -> dict[Any, Any]:
    return owner if isinstance(owner, dict) else vars(owner)


def _is_setting(value: Any) -> bool:
    if type(value) in _QUICK:
        return True
    if isinstance(value, (tuple, list)):
        return len(value) <= _SHORT and all(type(item) in _QUICK for item in value)
    return _is_small(value)


def _is_small(value: Any) -> bool:
    """Return whether a value is a tensor or array of which every run may get a copy."""
    if type(value) is Tensor:
        return value.layout is torch.strided and value.nbytes <= _SMALL_BYTES
    return type(value) is np.ndarray and value.nbytes <= _SMALL_BYTES


def _put(node: _Node, content: Any) -> None:
    owner = node.owner
    if node.kind == "settings":
        namespace = _namespace(owner)
        for name in _content(owner, "settings").keys() - content.keys():
            del namespace[name]
        namespace.update(content)
    elif node.kind in ("object", "module", "dict"):
        namespace = owner if node.kind == "dict" else vars(owner)
        if len(namespace) != len(content) or node.kind == "module":
            for name in [n for n in _content(owner, node.kind) if n not in content]:
                del namespace[name]
        for name, value in content.items():
            if namespace.get(name, _ABSENT) is not value:
                namespace[name] = value
        if len(namespace) != len(content) and node.kind != "module":
            for name in [n for n in namespace if n not in content]:
                del namespace[name]
    elif node.kind in ("list", "deque"):
        if len(owner) != len(content) or not all(map(operator.is_, owner, content)):
            owner.clear()
            owner.extend(content)
    elif node.kind == "set":
        if owner != content:
            owner.clear()
            owner.update(content)
    elif not _same_state(_content(owner, node.kind), content):
        if isinstance(owner, torch.Generator):
            owner.set_state(content)
        elif isinstance(owner, random.Random):
            owner.setstate(content)
        else:
            owner.bit_generator.state = content


# What torch keeps in a module's attributes, and what stands in for methods during the run.
_OF_TORCH = frozenset(vars(nn.Module())) | {"forward", _compat.CALL, "log", "print"}
_VALUES = {Tensor, np.ndarray}
_COPIED = {Tensor, np.ndarray, tuple}
_FLAT = {*_SCALARS, Tensor, np.ndarray}
# Kinds whose content has names.
_NAMED = frozenset({"object", "module", "dict", "settings"})
_WITH_ATTRIBUTES = _NAMED - {"dict"}
# The most items of a sequence that is a setting, such as the learning rates of all groups.
_SHORT = 16
# The most bytes of a tensor that is a setting, such as a sampler's weights: it is copied in every
# run of the step.
_SMALL_BYTES = 1 << 20
# Values whose equality is quickly told.
_QUICK = {int, str, bytes, bool, type(None), float}


@cache
def _of_lightning() -> frozenset[str]:
    hooks = ("train_dataloader", "val_dataloader", "test_dataloader", "predict_dataloader")
    return _OF_TORCH | frozenset(vars(LightningModule())) | {"_hparams", "_hparams_initial", *hooks}


def _kind_of(value: Any) -> str | None:
    """Return how an object is looked into; None if it is not."""
    return _kind(cast(Hashable, type(value)))


def is_data(value: Any) -> bool:
    """Return whether an object may hold a whole data set."""
    return isinstance(value, _LARGE)


def is_foreign(kind: type) -> bool:
    """Return whether objects of a class are no state of the user's."""
    return kind.__module__.partition(".")[0] in _FOREIGN or issubclass(kind, _OPAQUE)


@cache
def _kind(kind: Any) -> str | None:
    if issubclass(kind, (Metric, MetricCollection)):
        return "metric"
    if issubclass(kind, (torch.jit.ScriptModule, *_OPAQUE)):
        return None
    if issubclass(kind, nn.Module):
        return "module"
    if issubclass(kind, _LARGE):
        return "settings"
    if issubclass(kind, (torch.Generator, random.Random, np.random.Generator)):
        return "random"
    if is_foreign(kind):
        return None
    for base in (dict, list, deque, set, tuple):
        if issubclass(kind, base):
            return base.__name__
    return "object" if getattr(kind, "__dictoffset__", 0) else None
