"""Copies of the user's loader, from which samples are read without an effect on training.

The loader itself must not be read for this: a stream can be read only once, and a dataset may draw
from a random generator of its own.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable
from itertools import islice
from typing import Any

import numpy as np
from torch import Tensor

from lightning_dlres.core.errors import DlresError

# Size in bytes from which an array or tensor is shared with the copy instead of copied.
_SHARED_BYTES = 1 << 20
# Levels of references that are searched for large arrays. The usual levels are: a combined loader,
# its dict of lists, a loader, its dataset, the dataset's tuple, a tensor.
_MAX_DEPTH = 6
# Number of elements of a container or object that are searched.
_MAX_CHILDREN = 100


class NoCopyError(DlresError):
    """Error of a loader that holds an object that cannot be copied."""


def copy_of(loader: Any) -> Any:
    """Return a copy of a loader that shares large arrays and tensors with the original.

    Raises:
        NoCopyError: If the loader holds an object that cannot be copied, such as an open file.
    """
    try:
        return copy.deepcopy(loader, _large_arrays(loader))
    except Exception as error:
        raise NoCopyError(
            f"the data cannot be copied, and reading it twice may change it: {error}"
        ) from error


def _large_arrays(root: Any) -> dict[int, Any]:
    """Return the large arrays and tensors in a loader, or in a list or dict of loaders, by `id`.

    Used as the memo of `deepcopy`, which then takes each of them as its own copy.
    """
    large: dict[int, Any] = {}
    queue, seen = [(root, 0)], {id(root)}
    while queue:
        value, depth = queue.pop(0)
        if isinstance(value, (Tensor, np.ndarray)):
            if value.nbytes >= _SHARED_BYTES:
                large[id(value)] = value
        elif depth < _MAX_DEPTH:
            for child in islice(_children(value), _MAX_CHILDREN):
                if id(child) not in seen:
                    seen.add(id(child))
                    queue.append((child, depth + 1))
    return large


def _children(value: Any) -> Iterable[Any]:
    if isinstance(value, (list, tuple)):
        return value
    if isinstance(value, dict):
        return value.values()
    has_attributes = hasattr(value, "__dict__") and not isinstance(value, type)
    return vars(value).values() if has_attributes else ()
