"""New values of one run that several names refer to.

They are sent once, so that they are one object on every rank: a later write through one name must
show through the others.
"""

from __future__ import annotations

import dataclasses
from collections import Counter, deque
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any

from lightning_dlres.strategies.hetero_pipe.replay.user_state.user_objects import (
    COPIED_TYPES,
    SCALARS,
)

_CONTAINERS = (list, tuple, deque, set, frozenset, dict)


def shared_values(
    values: Iterable[Any], known: Collection[int], originals: Collection[int]
) -> list[Any]:
    """Return the objects that several of the values are, or hold. An object comes after those that
    it holds.

    Args:
        values: The new values.
        known: Ids of containers and objects that existed before the run; these are not searched.
        originals: Ids of tensors and arrays that existed before the run. One in a container counts
            as shared, since the model may refer to it elsewhere.
    """
    search = _Search(known, originals)
    try:
        for value in values:
            search.visit(value, is_inside=False)
    except RecursionError:
        # A value nested so deep cannot be sent either.
        return []
    return [value for value in search.ordered if search.counts[id(value)] > 1]


class _Search:
    """Search through new values, with the number of references to each object."""

    def __init__(self, known: Collection[int], originals: Collection[int]) -> None:
        self._known, self._originals = known, originals
        self.counts: Counter[int] = Counter()
        # Also keeps the objects alive, so that Python gives their ids to no others.
        self.ordered: list[Any] = []

    def visit(self, value: Any, is_inside: bool) -> None:
        if type(value) in SCALARS or id(value) in self._known or not _has_identity(value):
            return
        is_first = id(value) not in self.counts
        self.counts[id(value)] += 2 if is_inside and id(value) in self._originals else 1
        if not is_first:
            return
        for part in _parts(value):
            self.visit(part, is_inside=True)
        self.ordered.append(value)


def _has_identity(value: Any) -> bool:
    """Return True for a value that can be sent, and that user code may write to or look into."""
    if dataclasses.is_dataclass(value):
        return not isinstance(value, type)
    return type(value) in COPIED_TYPES or isinstance(value, (*_CONTAINERS, Mapping))


def _parts(value: Any) -> Iterator[Any]:
    """Yield the parts of a container that can be sent as references to other objects."""
    base: Any = next((base for base in _CONTAINERS if isinstance(value, base)), None)
    # Data classes and other mappings are sent whole.
    if base is None or dataclasses.is_dataclass(value):
        return
    # Call the methods of the base class, since the user's class may override them.
    yield from base.__iter__(value)
    if base is dict:
        yield from dict.values(value)
    attributes = getattr(value, "__dict__", None)
    if attributes is not None and attributes is not value:
        yield from attributes.values()
