"""Byte spans that tensors need of their storages, and views that are rebuilt from a copy."""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
from torch import Tensor

# A tensor that needs less than this share of its storage moves alone, without the rest.
_WHOLE_STORAGE_SHARE = 0.5


class ByteSpan(NamedTuple):
    """Bytes `start` to `stop` of a storage, `stop` excluded."""

    start: int
    stop: int

    @property
    def nbytes(self) -> int:
        return self.stop - self.start

    def of(self, tensor: Tensor, shift: int = 0) -> Tensor:
        """Return these bytes of the tensor's storage: uint8[nbytes], a view.

        Args:
            tensor: Tensor over the storage, or over a copy of a part of it.
            shift: Offset in the storage of the copy's first byte.
        """
        flat = torch.empty(0, dtype=torch.uint8, device=tensor.device)
        return flat.set_(tensor.untyped_storage(), self.start - shift, (self.nbytes,), (1,))


class View(NamedTuple):
    """Description of a tensor without its storage.

    Attributes:
        dtype: Element type.
        shape: Shape.
        stride: Strides, in elements.
        start: Offset in bytes of the first element in the storage.
    """

    dtype: torch.dtype
    shape: torch.Size
    stride: tuple[int, ...]
    start: int

    def on(self, data: Tensor, span: ByteSpan) -> Tensor:
        """Return the tensor over `data`, uint8[nbytes], a copy of the span's bytes."""
        tensor = torch.empty(0, dtype=self.dtype, device=data.device)
        start = (self.start - span.start + data.storage_offset()) // self.dtype.itemsize
        return tensor.set_(data.untyped_storage(), start, self.shape, self.stride)


def view_of(tensor: Tensor, shift: int = 0) -> View:
    """Return the view that describes a tensor; for `shift` see `ByteSpan.of`."""
    start = int(tensor.storage_offset()) * tensor.element_size() + shift
    return View(tensor.dtype, tensor.shape, tensor.stride(), start)


def span_of(tensor: Tensor, nbytes: int | None = None, shift: int = 0) -> ByteSpan:
    """Return the bytes that move with a tensor.

    This is the whole storage, or only the bytes that the tensor needs if these are much fewer. An
    expanded tensor needs no more bytes than the tensor that it was expanded from.

    Args:
        tensor: Tensor over the storage, or over a copy of a part of it.
        nbytes: Size of the storage; None: size of the tensor's present storage.
        shift: Offset in bytes, see `ByteSpan.of`.
    """
    item = tensor.element_size()
    whole = tensor.untyped_storage().nbytes() if nbytes is None else nbytes
    if tensor.is_contiguous():
        needed = tensor.numel() * item
    else:
        last = sum(
            (n - 1) * stride for n, stride in zip(tensor.shape, tensor.stride(), strict=True)
        )
        needed = (last + 1) * item
    if needed >= _WHOLE_STORAGE_SHARE * whole:
        return ByteSpan(0, whole)
    start = int(tensor.storage_offset()) * item + shift
    return ByteSpan(start, start + needed)


@functools.cache
def dtype_name(dtype: torch.dtype) -> str:
    """Return the name of a dtype in plans and profiles, such as "float32"."""
    return str(dtype).removeprefix("torch.")
