"""Collation like that of `torch.utils.data.default_collate`, but in one thread.

Torch copies large tensors with all of its threads. Beside threads that read ahead, these spin and
wait for each other many times as long as the copy takes.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import default_collate

from lightning_dlres.prefetch.storage.local_reads import BufferPool

# Least size, in bytes, of a tensor whose memory is reused. The allocator itself keeps smaller
# blocks for the next tensor. Larger ones it may return to the system, and fault in again page by
# page.
_MIN_REUSED_BYTES = 1 << 20
# Free buffers to keep: batches are made one after the other, and a few are in use at a time.
_MAX_FREE_BUFFERS = 4


class Collator:
    """Collate function that reuses the memory of earlier batches for large tensors.

    The page faults of new memory take several times as long as the copy into it.
    """

    def __init__(self) -> None:
        self._buffers = BufferPool(_MAX_FREE_BUFFERS)

    def __call__(self, items: Any) -> Any:
        """Return what `default_collate` returns for a list or tuple of items."""
        if not items:
            return default_collate(items)
        first = items[0]
        if all(type(item) is Tensor for item in items):
            return self._stack(items) if _is_plain(items) else default_collate(items)
        if type(first) in (tuple, list) and _are_alike(items):
            return [self(column) for column in zip(*items, strict=True)]
        if type(first) is dict and all(
            type(item) is dict and first.keys() == item.keys() for item in items
        ):
            return {key: self([item[key] for item in items]) for key in first}
        return default_collate(items)

    def _stack(self, tensors: Any) -> Tensor:
        try:
            arrays = [tensor.numpy() for tensor in tensors]
        except TypeError:
            # NumPy has no such dtype, bfloat16 for instance.
            return torch.stack(list(tensors))
        stacked = self._empty((len(tensors), *tensors[0].shape), tensors[0].dtype)
        np.stack(arrays, out=stacked.numpy())
        return stacked

    def _empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        nbytes = math.prod(shape) * dtype.itemsize
        if nbytes < _MIN_REUSED_BYTES:
            return torch.empty(shape, dtype=dtype)
        return torch.from_numpy(self._buffers.get(nbytes)).view(dtype).view(shape)


def _are_alike(items: Any) -> bool:
    return all(type(item) is type(items[0]) and len(item) == len(items[0]) for item in items)


def _is_plain(tensors: Any) -> bool:
    """Return true if NumPy can stack these tensors as they are."""
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
