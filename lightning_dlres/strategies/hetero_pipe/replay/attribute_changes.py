"""Changes of the user's attributes as plain data, to be sent to other ranks and applied there.

The changes of one run of the step are a dict from the path of an object to its change. A change is
a list that starts with its kind:

- `["names", new, gone]`: attributes or dict entries. `new` has `[key, encoding, value]` for each
  name with a new value; `gone` has the names that were deleted.
- `["items", start, items]`: a list or deque. It keeps its first `start` items; `items` has
  `[encoding, value]` for each item that follows.
- `["set", items]`: a set, with `[encoding, value]` for each of its members.
- `["state", state]`: a random generator.

The encoding says how the receiver makes the value:

- None: the value itself.
- "in place": a tensor or array that is written into the one that the receiver has, so that other
  references to it see the new values.
- "known": the value is the path of an object whose state is replayed itself.
- "set", "frozenset": the value is a list of the members.
- "unsendable": the object cannot be sent. The value is `[class name, path, key]`. A rank that ran
  the step has the object of its own run; other ranks keep what they have.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from lightning_dlres.core.wire.tree import Tree
from lightning_dlres.pipeline.execute.digest import digest
from lightning_dlres.strategies.hetero_pipe.replay.user_objects import (
    ABSENT,
    ObjectState,
    namespace_of,
)

IN_PLACE = "in place"
KNOWN = "known"
UNSENDABLE = "unsendable"

# Objects that cannot be sent, by path and key; each rank has those of its own run.
Unsendable = Mapping[tuple[str, Any], Any]


def changed_sequences(changes: Tree) -> list[str]:
    """Return the names of the lists, deques and sets among the changes."""
    return [path for path, change in changes.items() if change[0] in ("items", "set")]


def changed_generators(changes: Tree) -> set[str]:
    """Return the names of the random generators among the changes."""
    return {path for path, change in changes.items() if change[0] == "state"}


def unsendable_values(changes: Tree) -> dict[str, str]:
    """Return the names of the objects that a run left and that cannot be sent, with their
    classes."""
    classes = {}
    for change in changes.values():
        if change[0] == "state":
            continue
        for entry in change[1] if change[0] in ("names", "set") else change[-1]:
            if entry[-2] == UNSENDABLE:
                kind, path, key = entry[-1]
                attribute = f"{path}.{key}" if path else str(key)
                classes[attribute if isinstance(key, str) else f"{path}[{key!r}]"] = kind
    return classes


def fingerprints(changes: Tree) -> dict[str, int]:
    """Return a hash of every change by path; runs that leave equal values have equal hashes."""
    return {path: digest(change) for path, change in changes.items()}


def apply_change(
    state: ObjectState, change: Tree, states: Mapping[str, ObjectState], unsendable: Unsendable
) -> None:
    """Make a change of another rank's, or of this rank's own run, on an object.

    Args:
        state: State of the object now.
        change: One change; see the module's docstring.
        states: The states of all objects now, by path.
        unsendable: This rank's own objects that cannot be sent; empty if it did not run the step.
    """
    kind, *rest = change

    def decoded(encoding: Any, value: Any, current: Any) -> Any:
        if encoding == KNOWN:
            return states[value].owner if value in states else current
        if encoding == UNSENDABLE:
            return unsendable.get((value[1], value[2]), current)
        if encoding == IN_PLACE and _has_same_form(current, value):
            if isinstance(current, Tensor):
                with torch.no_grad():
                    current.copy_(value)
            else:
                current[...] = value
            return current
        if encoding == "set":
            return set(value)
        return frozenset(value) if encoding == "frozenset" else value

    if kind == "names":
        new, gone = rest
        namespace = namespace_of(state.owner)
        for key, encoding, value in new:
            result = decoded(encoding, value, namespace.get(key, ABSENT))
            if result is not ABSENT:
                namespace[key] = result
        for key in gone:
            namespace.pop(key, None)
    elif kind == "state":
        state.write(rest[0])
    elif kind == "set":
        state.write({decoded(encoding, value, None) for encoding, value in rest[0]})
    else:
        start, items = rest
        current = state.content
        tail = [
            decoded(encoding, value, current[start + i] if start + i < len(current) else None)
            for i, (encoding, value) in enumerate(items)
        ]
        state.write([*current[:start], *tail])


def _has_same_form(a: Any, b: Any) -> bool:
    return type(a) is type(b) and a.shape == b.shape and a.dtype == b.dtype
