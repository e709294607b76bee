"""Which bytes of its storage a tensor needs, and how it is made again of a copy of them."""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
from torch import Tensor

# Of a storage of which a tensor needs less than this part, no more than that moves.
_MOST = 0.5


class ByteSpan(NamedTuple):
    """Bytes `start` to `stop` of a storage."""

    start: int
    stop: int

    @property
    def nbytes(self) -> int:
        return self.stop - self.start

    def of(self, tensor: Tensor, shift: int = 0) -> Tensor:
        """Return these bytes of the tensor's storage: uint8[nbytes], a view.

        Args:
            tensor: over the storage, or a copy of a part of it.
            shift: the place in the storage of the copy's first byte.
        """
        flat = torch.empty(0, dtype=torch.uint8, device=tensor.device)
        return flat.set_(tensor.untyped_storage(), self.start - shift, (self.nbytes,), (1,))


class View(NamedTuple):
    """A tensor but for its storage.

    Attributes:
        start: its first byte's place in the storage.
    """

    dtype: torch.dtype
    shape: torch.Size
    stride: tuple[int, ...]
    start: int

    def on(self, data: Tensor, span: ByteSpan) -> Tensor:
        """Return the tensor over a copy of the span's bytes, uint8[nbytes]."""
        tensor = torch.empty(0, dtype=self.dtype, device=data.device)
        start = (self.start - span.start + data.storage_offset()) // self.dtype.itemsize
        return tensor.set_(data.untyped_storage(), start, self.shape, self.stride)


def view_of(tensor: Tensor, shift: int = 0) -> View:
    """Return what is not the tensor's storage; see `ByteSpan.of`."""
    start = int(tensor.storage_offset()) * tensor.element_size() + shift
    return View(tensor.dtype, tensor.shape, tensor.stride(), start)


def span_of(tensor: Tensor, nbytes: int | None = None, shift: int = 0) -> ByteSpan:
    """Return the bytes that move if the tensor does: all of its storage, or only what it needs
    where that is much less. An expanded tensor needs no more than what it was expanded from.

    Args:
        tensor: see `ByteSpan.of`.
        nbytes: bytes of the storage; None: of the tensor's own.
        shift: see `ByteSpan.of`.
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
    if needed >= _MOST * whole:
        return ByteSpan(0, whole)
    start = int(tensor.storage_offset()) * item + shift
    return ByteSpan(start, start + needed)


@functools.cache
def dtype_name(dtype: torch.dtype) -> str:
    """Return the name that plans and profiles have for a type of elements."""
    return str(dtype).removeprefix("torch.")
