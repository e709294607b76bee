"""Attributes of modules: those that torch manages, and comparison by identity."""

from __future__ import annotations

import operator
from collections.abc import Collection
from typing import Any

from torch import nn

# Attributes that torch manages in every module. One of them is `training`: steps may change it.
TORCH_ATTRIBUTES = frozenset(vars(nn.Module()))


def are_identical(a: Collection[Any], b: Collection[Any]) -> bool:
    """Return whether two collections hold the same objects in the same order."""
    return len(a) == len(b) and all(map(operator.is_, a, b))
