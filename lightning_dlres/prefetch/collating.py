"""Items of a batch put together as `torch.utils.data.default_collate` does it, in one thread.

Torch copies large tensors with all of its threads. Beside threads that read ahead these wait for
each other, spinning, for many times as long as the copy takes.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import default_collate


def collated(items: Any) -> Any:
    """Return what `default_collate` returns for a list or tuple of items."""
    if not items:
        return default_collate(items)
    first = items[0]
    if all(type(item) is Tensor for item in items):
        return _stacked(items) if _is_plain(items) else default_collate(items)
    if type(first) in (tuple, list) and _are_alike(items):
        return [collated(column) for column in zip(*items, strict=True)]
    if type(first) is dict and all(
        type(item) is dict and first.keys() == item.keys() for item in items
    ):
        return {key: collated([item[key] for item in items]) for key in first}
    return default_collate(items)


def _are_alike(items: Any) -> bool:
    return all(type(item) is type(items[0]) and len(item) == len(items[0]) for item in items)


def _is_plain(tensors: Any) -> bool:
    """Return whether NumPy knows these tensors, and they fit together."""
    first = tensors[0]
    return all(
        tensor.shape == first.shape
        and tensor.dtype is first.dtype
        and tensor.layout is torch.strided
        and tensor.device.type == "cpu"
        and not tensor.requires_grad
        and not tensor.is_neg()
        and not tensor.is_conj()
        and not tensor.is_quantized
        for tensor in tensors
    )


def _stacked(tensors: Any) -> Tensor:
    first: Tensor = tensors[0]
    stacked = torch.empty((len(tensors), *first.shape), dtype=first.dtype)
    try:
        np.stack([tensor.numpy() for tensor in tensors], out=stacked.numpy())
    except (TypeError, RuntimeError):
        # A kind of number that NumPy does not have.
        return torch.stack(list(tensors))
    return stacked
