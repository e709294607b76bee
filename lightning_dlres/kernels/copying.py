"""Copies that bypass the processor's cache, for data that is not read again soon.

An ordinary store first reads the cache line that it fills. A copy then moves three bytes over the
memory bus for each byte copied. A store past the cache saves the extra read: it moves two.
"""

from __future__ import annotations

import ctypes
from functools import cache
from typing import Any

import torch
from numba import types
from torch import Tensor

from lightning_dlres.core.arrays import address_of
from lightning_dlres.core.compiled import compiled_for_addresses
from lightning_dlres.kernels.x86 import finish_stores, has_avx2, store_past_cache

# Smallest copy in bytes that bypasses the cache. Smaller ones fit the cache, where an ordinary copy
# is as fast.
_LEAST_BYTES = 1 << 20
# Size of a cache line.
_LINE_BYTES = 64


def copy_past_cache(target: Tensor, source: Tensor) -> Tensor:
    """Copy uint8[n] to uint8[n], on any devices; return the target.

    If torch computes with several threads, their ordinary copy is faster and is used.
    """
    if not _can_stream(target, source, source.numel()):
        return target.copy_(source)
    _copy(target.data_ptr(), source.data_ptr(), source.numel())
    # Autograd must notice the change of a saved tensor, as after `copy_`.
    torch.autograd.graph.increment_version(target)
    return target


def _can_stream(target: Tensor, source: Tensor, count: int) -> bool:
    """Return True if `_copy` supports this copy and is likely to be faster than torch's."""
    # The version counter must be incremented, and an inference tensor has none.
    if count < _LEAST_BYTES or target.numel() != count or target.is_inference():
        return False
    if torch.get_num_threads() > 1 or target.is_cuda or source.is_cuda or not has_avx2():
        return False
    for tensor in (target, source):
        if tensor.dtype != torch.uint8 or not tensor.is_contiguous():
            return False
        address_of(tensor)
    # The two must not overlap.
    return abs(target.data_ptr() - source.data_ptr()) >= count


def _copy(target: int, source: int, count: int) -> None:
    """Copy bytes between addresses: whole, aligned cache lines of the target past the cache."""
    head = min(-target % _LINE_BYTES, count)
    body = (count - head) // _LINE_BYTES * _LINE_BYTES
    tail = head + body
    ctypes.memmove(target, source, head)
    _streamer()(target + head, source + head, body)
    ctypes.memmove(target + tail, source + tail, count - tail)


@cache
def _streamer() -> Any:
    """Return the compiled loop, which takes addresses and releases the interpreter's lock."""
    return compiled_for_addresses(_stream, types.void(types.int64, types.int64, types.int64))


def _stream(target: int, source: int, count: int) -> None:
    for offset in range(0, count, _LINE_BYTES):
        store_past_cache(target, source, offset)
        store_past_cache(target, source, offset + 32)
    finish_stores()
