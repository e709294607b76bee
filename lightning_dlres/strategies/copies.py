"""A copy of the user's loader to read from beside training: a stream can be read only once, and a
dataset may draw from a generator of its own."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
from torch import Tensor

from lightning_dlres.core.errors import DlresError

_LARGE = 1 << 20
_DEPTH = 4


class NoCopyError(DlresError):
    """The loader holds what cannot be copied."""


def a_copy(loader: Any) -> Any:
    """Return a copy; large arrays and tensors are shared with the original.

    Raises:
        NoCopyError: it holds something that cannot be copied, such as an open file.
    """
    shared: dict[int, Any] = {}
    _note_large(loader, shared, _DEPTH)
    try:
        return copy.deepcopy(loader, shared)
    except Exception as error:
        raise NoCopyError(
            f"the data cannot be copied, and reading it twice may change it: {error}"
        ) from error


def _note_large(value: Any, shared: dict[int, Any], depth: int) -> None:
    if isinstance(value, (Tensor, np.ndarray)):
        if value.nbytes >= _LARGE:
            shared[id(value)] = value
    elif depth:
        inner = (
            value if isinstance(value, (list, tuple)) else vars(value) if _has_vars(value) else {}
        )
        for child in inner.values() if isinstance(inner, dict) else inner[:100]:
            _note_large(child, shared, depth - 1)


def _has_vars(value: Any) -> bool:
    return hasattr(value, "__dict__") and not isinstance(value, type)
