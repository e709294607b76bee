"""A copy of the user's loader to read from beside training: a stream can be read only once, and a
dataset may draw from a generator of its own."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from itertools import islice
from typing import Any

import numpy as np
from torch import Tensor

from lightning_dlres.core.errors import DlresError

_LARGE = 1 << 20
# A combined loader, its dict of lists, a loader, its data set, the tuple of that, a tensor.
_DEPTH = 6
_MANY = 100


class NoCopyError(DlresError):
    """The loader holds what cannot be copied."""


def a_copy(loader: Any) -> Any:
    """Return a copy; large arrays and tensors are shared with the original.

    Raises:
        NoCopyError: it holds something that cannot be copied, such as an open file.
    """
    try:
        return copy.deepcopy(loader, _large(loader))
    except Exception as error:
        raise NoCopyError(
            f"the data cannot be copied, and reading it twice may change it: {error}"
        ) from error


def _large(root: Any) -> dict[int, Any]:
    """Return the large arrays and tensors in a loader, or in a list or dict of loaders."""
    large: dict[int, Any] = {}
    waiting, seen = [(root, 0)], {id(root)}
    while waiting:
        value, depth = waiting.pop(0)
        if isinstance(value, (Tensor, np.ndarray)):
            if value.nbytes >= _LARGE:
                large[id(value)] = value
        elif depth < _DEPTH:
            for child in islice(_inside(value), _MANY):
                if id(child) not in seen:
                    seen.add(id(child))
                    waiting.append((child, depth + 1))
    return large


def _inside(value: Any) -> Iterable[Any]:
    if isinstance(value, (list, tuple)):
        return value
    if isinstance(value, dict):
        return value.values()
    return vars(value).values() if _has_vars(value) else ()


def _has_vars(value: Any) -> bool:
    return hasattr(value, "__dict__") and not isinstance(value, type)
