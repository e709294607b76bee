"""Batches in page-locked memory, from which a GPU copies asynchronously."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch


def pin_batch(value: Any) -> Any:
    """Return a batch with its tensors in page-locked memory.

    As in a DataLoader, this covers tensors in mappings, lists and tuples, and objects with a method
    `pin_memory`. Anything else stays as it is.
    """
    if isinstance(value, torch.Tensor):
        return value.pin_memory()
    if hasattr(value, "pin_memory"):
        return value.pin_memory()
    if isinstance(value, (str, bytes)):
        return value
    if isinstance(value, Mapping):
        items = {key: pin_batch(item) for key, item in value.items()}
        return items if type(value) is dict else type(value)(items)  # type: ignore[call-arg]
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*map(pin_batch, value))
    if type(value) in (list, tuple):
        return type(value)(map(pin_batch, value))
    return value
