"""Which bytes of its storage a tensor needs, and how it is made again of a copy of them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

# Of a storage of which a tensor needs less than this part, no more than that moves.
_MOST = 0.5


@dataclass(frozen=True)
class Span:
    """Bytes `start` to `stop` of a storage."""

    start: int
    stop: int

    @property
    def nbytes(self) -> int:
        return self.stop - self.start

    def of(self, tensor: Tensor) -> Tensor:
        """Return these bytes of the tensor's storage: uint8[nbytes], a view."""
        flat = torch.empty(0, dtype=torch.uint8, device=tensor.device)
        return flat.set_(tensor.untyped_storage(), self.start, (self.nbytes,), (1,))


@dataclass(frozen=True)
class View:
    """A tensor but for its storage."""

    dtype: torch.dtype
    shape: torch.Size
    stride: tuple[int, ...]
    offset: int

    def on(self, data: Tensor, span: Span) -> Tensor:
        """Return the tensor over a copy of the span's bytes, uint8[nbytes] at the start of its
        storage."""
        item = self.dtype.itemsize
        tensor = torch.empty(0, dtype=self.dtype, device=data.device)
        start = (self.offset * item - span.start + data.storage_offset()) // item
        return tensor.set_(data.untyped_storage(), start, self.shape, self.stride)


def view_of(tensor: Tensor) -> View:
    """Return what is not the tensor's storage."""
    return View(tensor.dtype, tensor.shape, tensor.stride(), int(tensor.storage_offset()))


def span_of(tensor: Tensor) -> Span:
    """Return the bytes that move if the tensor does: all of its storage, or only what it needs
    where that is much less. An expanded tensor needs no more than what it was expanded from."""
    item, last = tensor.element_size(), 0
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        last += (size - 1) * stride
    start = int(tensor.storage_offset()) * item
    own = Span(start, start + (last + 1) * item)
    whole = Span(0, tensor.untyped_storage().nbytes())
    return whole if own.nbytes >= _MOST * whole.nbytes else own
