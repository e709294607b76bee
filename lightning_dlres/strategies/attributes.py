"""Plain attributes that a training step changes on the LightningModule: counters, running values,
lists of outputs.

The step runs on some ranks only, and on some more than once; plain training runs it once. So every
run starts from the same values, and what one run left is made so on every rank. A run gets copies
of the tensors, since it may change them in place: putting values back instead would invalidate a
graph that has saved them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from lightning_dlres.core.tree import Tree, map_tensors

_SCALARS = (bool, int, float, str, type(None))
_IN_PLACE = "in place"
_ABSENT = object()
Snapshot = dict[str, Any]


@dataclass(frozen=True)
class _Lent:
    copy: Tensor
    original: Tensor
    version: int


class PlainAttributes:
    """The public attributes of a module that are numbers, strings, tensors (not parameters or
    buffers), or lists of these."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._lent: dict[int, _Lent] = {}

    def snapshot(self) -> Snapshot:
        """Return the attributes; of lists a copy."""
        values = vars(self._module)
        found = {name: values[name] for name in self._names()}
        return {n: list(value) if isinstance(value, list) else value for n, value in found.items()}

    def _names(self) -> list[str]:
        return [n for n, v in vars(self._module).items() if n[:1] != "_" and _is_plain(v)]

    def lend(self, snapshot: Snapshot) -> None:
        """Put the values of a snapshot in place, with copies of its tensors."""
        self._lent = {}
        copies: dict[int, Tensor] = {}

        def lent(value: Any) -> Any:
            if not isinstance(value, Tensor):
                return value
            if id(value) not in copies:
                copy = copies[id(value)] = value.detach().clone()
                copy.requires_grad_(value.requires_grad)
                self._lent[id(copy)] = _Lent(copy, value, copy._version)
            return copies[id(value)]

        for name, value in snapshot.items():
            self._set(name, list(map(lent, value)) if isinstance(value, list) else lent(value))

    def restore(self, snapshot: Snapshot) -> None:
        """Put back what `snapshot` returned, and nothing else; lists stay the same objects."""
        for name, value in snapshot.items():
            self._set(name, value)
        for name in [n for n in self._names() if n not in snapshot]:
            delattr(self._module, name)

    def changes_since(self, base: Snapshot) -> Tree:
        """Return what has another value now: name -> [number of list elements that stay, None, or
        "in place"; new value or elements]. What was lent and not changed is the same."""
        changes = {}
        for name, value in self.snapshot().items():
            before = base.get(name)
            if name in base and self._same(before, value):
                continue
            start: int | str | None = _IN_PLACE if id(value) in self._lent else None
            if isinstance(value, list):
                kept = before if isinstance(before, list) else []
                start = len(kept) if self._same(kept, value[: len(kept)]) else 0
                value = value[start:]
            changes[name] = [start, map_tensors(lambda t: t.detach().clone(), value)]
        return changes

    def apply(self, changes: Tree) -> None:
        """Follow the changes of another rank."""
        for name, (start, value) in changes.items():
            current = vars(self._module).get(name)
            if isinstance(start, int):
                value = [*(current or [])[:start], *value]
            elif start == _IN_PLACE and isinstance(current, Tensor) and _alike(current, value):
                with torch.no_grad():
                    current.copy_(value)
                continue
            self._set(name, value)

    def _set(self, name: str, value: Any) -> None:
        current = vars(self._module).get(name, _ABSENT)
        if isinstance(current, list) and isinstance(value, list):
            current[:] = value
        elif current is not value:
            setattr(self._module, name, value)

    def _same(self, a: Any, b: Any) -> bool:
        if isinstance(a, list) and isinstance(b, list):
            return len(a) == len(b) and all(map(self._same, a, b))
        if isinstance(a, Tensor) and isinstance(b, Tensor):
            lent = self._lent.get(id(b))
            return a is b if lent is None else a is lent.original and lent.version == b._version
        return type(a) is type(b) and bool(a == b)


def changed_lists(changes: Tree) -> list[str]:
    """Return the names of the lists among the changes."""
    return [name for name, (start, _) in changes.items() if isinstance(start, int)]


def _alike(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and a.dtype == b.dtype


def _is_plain(value: Any) -> bool:
    if isinstance(value, list):
        return all(isinstance(item, (*_SCALARS, Tensor)) for item in value)
    return type(value) in _SCALARS or type(value) is Tensor
