"""Plain attributes that a training step changes on the LightningModule: counters, running values,
lists of outputs.

The step runs on some ranks only, and on some more than once; plain training runs it once. So every
run starts from the same values, and what one run left is made so on every rank.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from lightning_dlres.core.tree import Tree, map_tensors

_SCALARS = (bool, int, float, str, type(None))
Snapshot = dict[str, Any]


class PlainAttributes:
    """The public attributes of a module that are numbers, strings, tensors (not parameters or
    buffers), or lists of these."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module

    def snapshot(self) -> Snapshot:
        """Return the attributes; of lists a copy."""
        found = {}
        for name, value in vars(self._module).items():
            if not name.startswith("_") and _is_plain(value):
                found[name] = list(value) if isinstance(value, list) else value
        return found

    def restore(self, snapshot: Snapshot) -> None:
        """Put back what `snapshot` returned; lists stay the same objects."""
        for name, value in snapshot.items():
            self._set(name, value)

    def changes_since(self, base: Snapshot) -> Tree:
        """Return what has another value now: name -> [number of list elements that stay or None,
        new value or elements]."""
        changes = {}
        for name, value in self.snapshot().items():
            before = base.get(name)
            if name in base and _same(before, value):
                continue
            start = None
            if isinstance(value, list):
                kept = before if isinstance(before, list) else []
                start = len(kept) if _same(kept, value[: len(kept)]) else 0
                value = value[start:]
            changes[name] = [start, map_tensors(lambda t: t.detach().clone(), value)]
        return changes

    def apply(self, changes: Tree) -> None:
        """Follow the changes of another rank."""
        for name, (start, value) in changes.items():
            if start is not None:
                value = [*getattr(self._module, name, [])[:start], *value]
            self._set(name, value)

    def _set(self, name: str, value: Any) -> None:
        current = vars(self._module).get(name)
        if isinstance(current, list) and isinstance(value, list):
            current[:] = value
        else:
            setattr(self._module, name, value)


def changed_lists(changes: Tree) -> list[str]:
    """Return the names of the lists among the changes."""
    return [name for name, (start, _) in changes.items() if start is not None]


def _is_plain(value: Any) -> bool:
    if isinstance(value, list):
        return all(isinstance(item, (*_SCALARS, Tensor)) for item in value)
    return type(value) in _SCALARS or type(value) is Tensor


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, list) and isinstance(b, list):
        return len(a) == len(b) and all(_same(x, y) for x, y in zip(a, b, strict=True))
    if isinstance(a, Tensor) or isinstance(b, Tensor):
        return a is b
    return type(a) is type(b) and bool(a == b)
