"""Copies of tensors and arrays that keep what their originals share: memory.

An attribute may be a view of another one, such as the NumPy array of a counter's tensor. A write
through one of them must then show in the other, also if both are copies.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

# Addresses of copies differ from those of originals by a multiple of this, the largest alignment of
# a dtype.
_ALIGNMENT = 16


class _Extent(NamedTuple):
    """Addresses of the elements of a tensor or array: from `start` to before `end`."""

    start: int
    end: int
    original: Any


def copies_in_shared_memory(originals: Iterable[Any]) -> dict[int, Any]:
    """Return a copy of each tensor and array that shares memory with another one, by its id.

    Copies share memory as their originals do.

    Args:
        originals: Tensors and arrays, each once. Only arrays of plain numbers, and dense tensors on
            the CPU without a gradient are looked at.
    """
    extents = sorted(filter(None, map(_extent_of, originals)), key=lambda extent: extent[:2])
    copies: dict[int, Any] = {}
    group: list[_Extent] = []
    end = 0
    for extent in [*extents, None]:
        if group and (extent is None or extent.start >= end):
            if len(group) > 1:
                copies |= _copies_of(group, end)
            group = []
        if extent is not None:
            end = max(end, extent.end) if group else extent.end
            group.append(extent)
    return copies


def _copies_of(group: list[_Extent], end: int) -> dict[int, Any]:
    """Return the copies of a group, whose extents overlap and are in order."""
    start = group[0].start // _ALIGNMENT * _ALIGNMENT
    memory = np.empty(end - start + _ALIGNMENT, np.uint8)
    memory = memory[-_address(memory) % _ALIGNMENT :]
    for extent in group:
        # Each element lies in the extent of an original, which keeps its memory alive.
        ctypes.memmove(
            _address(memory) + extent.start - start, extent.start, extent.end - extent.start
        )
    return {id(e.original): _view_of(memory, e.original, start) for e in group}


def _view_of(memory: Any, original: Any, start: int) -> Any:
    """Return a tensor or array like the original, in a copy of the memory from address `start`."""
    if isinstance(original, np.ndarray):
        offset = _address(original) - start
        view = np.ndarray(original.shape, original.dtype, memory, offset, original.strides)
        view.flags.writeable = original.flags.writeable
        return view
    offset = original.data_ptr() - start
    data = torch.from_numpy(memory)[offset:]
    data = data[: len(data) // original.itemsize * original.itemsize]
    return data.view(original.dtype).as_strided(original.shape, original.stride())


def _extent_of(original: Any) -> _Extent | None:
    """Return the extent of a tensor or array; None for one that is not looked at."""
    if isinstance(original, Tensor):
        is_plain = (
            original.layout is torch.strided
            and original.device.type == "cpu"
            and not original.requires_grad
            and not original.is_quantized
            and not (original.is_neg() or original.is_conj())
        )
        if not is_plain or not original.numel():
            return None
        start, size = original.data_ptr(), original.itemsize
        strides = [stride * size for stride in original.stride()]
    else:
        if original.dtype.hasobject or not original.size:
            return None
        start, size = _address(original), original.itemsize
        strides = list(original.strides)
    steps = [(n - 1) * stride for n, stride in zip(original.shape, strides, strict=True)]
    below = sum(step for step in steps if step < 0)
    above = sum(step for step in steps if step > 0)
    return _Extent(start + below, start + above + size, original)


def _address(array: Any) -> int:
    return int(array.__array_interface__["data"][0])
