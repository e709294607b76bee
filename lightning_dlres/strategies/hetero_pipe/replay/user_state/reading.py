"""One reading of the user's state, and whether it still holds.

A step may run once per micro-batch. Reading the state again before each run would take longer than
a small step, though hardly anything can have changed: every run is undone.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import nn

from lightning_dlres.pipeline.stage.module_attributes import are_identical
from lightning_dlres.strategies.hetero_pipe.replay.user_state.user_objects import (
    ObjectState,
    kind_of,
)


@dataclass(frozen=True)
class Roots:
    """The objects from which the user's state is searched.

    Attributes:
        modules: The modules outside of the layers, with their names.
        settings: Objects of the Trainer by name.
    """

    modules: Sequence[tuple[str, nn.Module]]
    settings: Mapping[str, Any]

    def are_same(self, others: Roots) -> bool:
        """Return whether these are the same objects, in the same order."""
        pairs = (
            ([module for _, module in self.modules], [module for _, module in others.modules]),
            (list(self.settings.values()), list(others.settings.values())),
        )
        return all(are_identical(ours, theirs) for ours, theirs in pairs)


@dataclass(frozen=True)
class Reading:
    """The state of every object that a step can reach, as it was when this was read.

    Attributes:
        states: The states.
        metrics: The metrics, with their names.
        roots: The objects from which the search began. None if the search went through modules that
            a list or another object holds: new children of those would not be noticed.
    """

    states: Sequence[ObjectState]
    metrics: Sequence[tuple[str, nn.Module]]
    roots: Roots | None

    @contextmanager
    def restored(self) -> Iterator[None]:
        """Context manager that gives each object back what it held at its beginning.

        No tensor is copied: one that is written to keeps its new values.
        """
        try:
            yield
        finally:
            for state in self.states:
                state.write(state.content)

    def is_current(self, roots: Roots) -> bool:
        """Return whether a new search from these objects would find the same.

        False also stands for "unknown". Tensors may have changed in place.
        """
        return (
            self.roots is not None
            and self.roots.are_same(roots)
            and all(state.holds_same_objects() for state in self.states)
        )


def reading_of(path: str, owner: Any) -> Reading:
    """Return the state of any object, with those of the objects and containers in it.

    Data sources in it, such as data sets, count with their settings only.

    Args:
        path: Name of the object.
        owner: Object with attributes.
    """
    states = [ObjectState.read(path, owner, "object")]
    seen = {id(owner)}
    for state in states:
        for child_path, child in state.children():
            kind = kind_of(child)
            if kind is not None and kind not in ("metric", "module") and id(child) not in seen:
                seen.add(id(child))
                states.append(ObjectState.read(child_path, child, kind))
    return Reading([state for state in states if state.kind != "tuple"], [], None)
