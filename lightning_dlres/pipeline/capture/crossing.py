"""Header of the messages between layers of a captured module, beside their tensors."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import msgspec

from lightning_dlres.core.errors import ConfigError
from lightning_dlres.core.wire.tree import Tree, flatten
from lightning_dlres.pipeline.capture.placeholders.skeleton import Skeleton
from lightning_dlres.pipeline.capture.trace import GLUE, Value

# Stands for the number of samples, so that micro-batches of all sizes have the same skeletons.
SAMPLES = -1


class Header(msgspec.Struct, frozen=True, array_like=True):
    """Message about the layers before, beside their tensors.

    Attributes:
        samples: Number of samples; -1 in a message that is joined with others.
        sample_value: Index of a tensor whose first dimension is the number of samples; -1 if there
            is none.
        skeletons: Skeletons of the outputs of calls, with the number of the call, and of the
            module's inputs, with -1.
        decisions: Decisions so far. After the last layer, those that are made again are None: for a
            batch that is joined of micro-batches they may be others.
        values: After the last layer, the roles of the values that are sent, as by `role_of`.
        is_single: True if the batch of a step is a single sample.
        moved: For each tensor, the dimension that is first in the message, so that tensors can be
            joined and cut along the samples; empty if none is moved.
        opening: Fingerprint of the operations before the first block; empty if they are those of
            each run, as in a module's forward.
    """

    samples: int
    sample_value: int
    skeletons: list[tuple[int, Skeleton]]
    decisions: list[Any]
    values: list[tuple[str, int, int]] | None
    is_single: bool
    moved: list[int]
    opening: str = ""


@dataclasses.dataclass(frozen=True)
class Returned:
    """Result of a step that has called no layer."""

    result: Any


def role_of(value: Value) -> tuple[str, int, int]:
    """Return what a value is in all paths of a forward. Operations have other numbers in each."""
    return value.source, -1 if value.source == GLUE else value.index, value.position


def without_objects(tree: Tree) -> Tree:
    """Return a tree with None in the place of objects that cannot be sent, such as caches."""
    try:
        flatten(tree)
    except ConfigError:
        if isinstance(tree, Mapping) and not dataclasses.is_dataclass(tree):
            return {key: without_objects(value) for key, value in tree.items()}
        if type(tree) in (list, tuple):
            return type(tree)(map(without_objects, tree))
        if dataclasses.is_dataclass(tree) and not isinstance(tree, type):
            names = [field.name for field in dataclasses.fields(tree) if field.init]
            return dataclasses.replace(
                tree, **{n: without_objects(getattr(tree, n)) for n in names}
            )
        return None
    return tree
