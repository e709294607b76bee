"""Changes of the user's attributes as plain data, to be sent to other ranks and applied there.

The changes of one run of the step are a dict from the path of an object to its change. A change is
a list that starts with its kind:

- `["names", new, removed, order]`: attributes or dict entries. `new` has one list for each name
  with a new value: `[name, value]`. `removed` has the names that were deleted. `order` has all keys
  of a dict if their order has changed, else it is None.
- `["items", start, items]`: a list or deque. It keeps its first `start` items; `items` has those
  that follow.
- `["set", new, removed]`: a set, with its new members and those that it no longer has.
- `["state", state]`: a random generator.
- `["shared", values]`: no object's change, but new values that several names refer to. There is at
  most one such list, and it is under a name that is no path.

Every name, value, item and member has an encoding, and is sent as `[encoding, value]`. The encoding
says how the receiver makes the value:

- None: the value itself.
- "in place": a tensor or array that existed before the run. It is sent as `[place, value]`. The
  place is the path of an object, a name or index in it, and the indices in nested tuples. The value
  is written into the one that the receiver had there before it applied any change, so that other
  references to it see the new values.
- "shared": the value is an index in the list of shared values.
- "known": the value is the path of an object that existed before the run. The receiver uses its own
  object of that path; what the run changed in it is a change of its own.
- "packed": the value is a container that `containers` has packed.
- "unsendable": the object cannot be sent. The value is `[class name, path of the owner, name in the
  owner]`. A rank that ran the step uses the object of its own run. Other ranks keep the value that
  they have. If they have nothing there, they get no such attribute, key or member; a new item of a
  list is None, so that items after it have the same index on all ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_dlres.core.wire.tree import Tree
from lightning_dlres.pipeline.execute.digest import digest
from lightning_dlres.strategies.hetero_pipe.replay.user_state.containers import unpack
from lightning_dlres.strategies.hetero_pipe.replay.user_state.user_objects import (
    ABSENT,
    ObjectState,
    namespace_of,
    value_key,
)

# The encodings; the module's docstring describes them.
IN_PLACE = "in place"
KNOWN = "known"
PACKED = "packed"
SHARED = "shared"
UNSENDABLE = "unsendable"

# `ChangeDecoder.decode`.
Decode = Callable[..., Any]
# Objects that cannot be sent, by the path of their owner and their name in it. A rank has only
# those that its own run left.
Unsendable = Mapping[tuple[str, Any], Any]


def changed_collections(changes: Tree) -> list[str]:
    """Return the paths of the lists, deques and sets among the changes."""
    return [path for path, change in changes.items() if change[0] in ("items", "set")]


def changed_generators(changes: Tree) -> set[str]:
    """Return the paths of the random generators among the changes."""
    return {path for path, change in changes.items() if change[0] == "state"}


def unsendable_values(changes: Tree) -> dict[str, str]:
    """Return the class names of the objects that cannot be sent, by the object's full name."""
    classes = {}
    for change in changes.values():
        for encoding, value in _encoded_values(change):
            if encoding == UNSENDABLE:
                class_name, path, name = value
                if not isinstance(name, str):
                    full_name = f"{path}[{name!r}]"
                else:
                    full_name = f"{path}.{name}" if path else name
                classes[full_name] = class_name
    return classes


def name_of(path: str, change: Tree) -> str:
    """Return how an error names the change of an object."""
    kind, *content = change
    if kind == "names" and content[0]:
        (_, name), _ = content[0][0]
        return f"{name!r} of {path!r}" if path else repr(name)
    return repr(path)


def fingerprints(changes: Tree) -> dict[str, int]:
    """Return a hash of every change by path; runs that leave equal values have equal hashes."""
    return {path: digest(change) for path, change in changes.items()}


class ChangeDecoder:
    """Decoder of the values in the changes of one run.

    Args:
        changes: The changes.
        states: The states of all objects before any change is applied, by path.
        unsendable: This rank's own objects that cannot be sent; empty if it did not run the step.
    """

    def __init__(
        self, changes: Tree, states: Mapping[str, ObjectState], unsendable: Unsendable
    ) -> None:
        self._states, self._unsendable = states, unsendable
        self._shared: list[Any] = []
        for kind, *rest in changes.values():
            if kind == "shared":
                # A value may refer to those before it.
                for encoded in rest[0]:
                    self._shared.append(self.decode(encoded))

    def decode(self, encoded: Sequence[Any], current: Any = ABSENT) -> Any:
        """Return the value of a pair `[encoding, value]`.

        Args:
            encoded: The pair.
            current: This rank's value in the same place; `ABSENT` without one.
        """
        encoding, value = encoded
        if encoding == KNOWN:
            return self._states[value].owner if value in self._states else current
        if encoding == UNSENDABLE:
            return self._unsendable.get((value[1], value[2]), current)
        if encoding == PACKED:
            return unpack(value, self._referenced)
        if encoding == SHARED:
            return self._shared[value]
        return self._written(*value) if encoding == IN_PLACE else value

    def _referenced(self, encoded: Sequence[Any]) -> Any:
        # An object that this rank does not have leaves None inside a container.
        return self.decode(encoded, None)

    def _written(self, place: Sequence[Any], value: Any) -> Any:
        """Return the tensor or array at a place, with a new value; the value if there is none of
        its type and shape."""
        path, key, *indices = place
        try:
            content = self._states[path].content
            is_name = type(key) is str or isinstance(content, list)
            kept = content[key] if is_name else list(content.values())[key]
            for index in indices:
                kept = kept[index]
        except (LookupError, TypeError):
            return value
        if not _has_same_type_and_shape(kept, value):
            return value
        if isinstance(kept, Tensor):
            with torch.no_grad():
                kept.copy_(value)
        else:
            kept[...] = value
        return kept


def apply_change(state: ObjectState, change: Tree, decode: Decode) -> None:
    """Apply a change of another rank's run, or of this rank's own run, to an object.

    Args:
        state: State of the object now.
        change: One change; see the module's docstring.
        decode: `ChangeDecoder.decode` of all changes.
    """
    kind, *rest = change
    if kind == "names":
        _apply_names(state, *rest, decode=decode)
    elif kind == "state":
        state.write(rest[0])
    elif kind == "set":
        new, removed = rest
        removed_members = set(map(decode, removed))
        # Members are removed by equality and by `value_key`. Equality alone would keep NaN, which
        # equals nothing. `value_key` alone would keep an object of which an equal copy arrived.
        removed_keys = set(map(value_key, removed_members))
        remaining = {
            member
            for member in state.content - removed_members
            if value_key(member) not in removed_keys
        }
        state.write(remaining | {m for m in map(decode, new) if m is not ABSENT})
    else:
        start, items = rest
        current = state.content
        tail = [
            decode(item, current[start + i] if start + i < len(current) else None)
            for i, item in enumerate(items)
        ]
        state.write([*current[:start], *tail])


def _apply_names(
    state: ObjectState,
    new: Sequence[Any],
    removed: Sequence[Any],
    order: Sequence[Any] | None,
    *,
    decode: Decode,
) -> None:
    namespace = namespace_of(state.owner)
    for encoded_key, encoded in new:
        key = decode(encoded_key)
        # A key object that this rank does not have cannot get a value.
        result = ABSENT if key is ABSENT else decode(encoded, namespace.get(key, ABSENT))
        if result is not ABSENT:
            namespace[key] = result
    for key in map(decode, removed):
        namespace.pop(key, None)
    if order is not None:
        keys = [key for key in map(decode, order) if key in namespace]
        reordered = {key: namespace[key] for key in keys}
        # Keys that only this rank has follow at the end.
        reordered |= {key: value for key, value in namespace.items() if key not in reordered}
        namespace.clear()
        namespace.update(reordered)


def _encoded_values(change: Tree) -> Iterator[Sequence[Any]]:
    """Yield the pairs `[encoding, value]` of a change, except those in the `order` of a dict."""
    kind, *rest = change
    if kind == "names":
        new, removed, _ = rest
        for pair in new:
            yield from pair
        yield from removed
    elif kind == "set":
        yield from rest[0]
        yield from rest[1]
    elif kind == "items":
        yield from rest[1]


def _has_same_type_and_shape(a: Any, b: Any) -> bool:
    return type(a) is type(b) and a.shape == b.shape and a.dtype == b.dtype
