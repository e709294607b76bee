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

# Smallest size, in bytes, of an array or tensor that the copy shares with the original.
_SHARED_BYTES = 1 << 20
# Levels of references that are searched for large arrays. The usual levels are: a combined loader,
# its dict of lists, a loader, its dataset, the dataset's tuple, a tensor.
_MAX_DEPTH = 6
# Most elements of a container, or attributes of an object, that are searched. With the depth, this
# bounds the time of the search.
_MAX_CHILDREN = 100


class NoCopyError(DlresError):
    """Error of a loader that cannot be copied, because it holds an object such as an open file."""


def copy_loader(loader: Any) -> Any:
    """Return a copy of a loader that shares large arrays and tensors with the original.

    Raises:
        NoCopyError: If the loader holds an object that cannot be copied, such as an open file.
    """
    try:
        return copy.deepcopy(loader, _large_arrays(loader))
    except Exception as error:
        raise NoCopyError(
            f"the data cannot be copied, and reading the loader itself would change it: {error}"
        ) from error


def _large_arrays(root: Any) -> dict[int, Any]:
    """Return the large arrays and tensors in a loader, or in a list or dict of loaders, by `id`.

    `deepcopy` takes this dict as its memo. It regards each array in it as copied already, so that
    the copy shares the array.
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
    """Return the elements of a container, or the values of an object's attributes."""
    if isinstance(value, (list, tuple)):
        return value
    if isinstance(value, dict):
        return value.values()
    has_attributes = hasattr(value, "__dict__") and not isinstance(value, type)
    return vars(value).values() if has_attributes else ()
