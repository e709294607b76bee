"""The bytes as they are: what a tensor is handed to when nothing would make it smaller."""

from __future__ import annotations

import torch
from torch import Tensor

from lightning_dlres.codecs.base import Codec, Encoded, register
from lightning_dlres.codecs.layout import dense_bytes, is_dense
from lightning_dlres.core.errors import ProtocolError
from lightning_dlres.kernels.copying import put_away


@register
class Raw(Codec):
    """Copies."""

    name = "raw"
    is_lossless = True

    def bound(self, tensor: Tensor) -> int:
        return tensor.numel() * tensor.element_size()

    def encode(self, tensor: Tensor, out: Tensor | None = None) -> Encoded:
        return copied(tensor, *dense_bytes(tensor), out)

    def decode(self, encoded: Encoded, out: Tensor | None = None) -> Tensor:
        result, target = target_of(encoded, out)
        if encoded.nbytes != target.numel():
            raise ProtocolError(
                f"raw data: got {encoded.nbytes} bytes, expected {target.numel()} for "
                f"{encoded.dtype} of {tuple(encoded.shape)}."
            )
        target.copy_(encoded.payload)
        return result


def copied(tensor: Tensor, source: Tensor, stride: tuple[int, ...], out: Tensor | None) -> Encoded:
    """Return a tensor as this codec does; `source` and `stride` are what `dense_bytes` says."""
    count = source.numel()
    data = put_away(torch.empty_like(source) if out is None else out[:count], source)
    return Encoded(Raw.name, tensor.dtype, tensor.shape, stride, data, count)


def target_of(encoded: Encoded, out: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return the tensor that decoding returns, and its memory as uint8[count * width].

    Raises:
        ProtocolError: `out` is of another dtype, shape or stride, or these strides are of no tensor
            that fills its memory.
    """
    if not is_dense(encoded.shape, encoded.stride):
        raise ProtocolError(
            f"decoding: got the strides {encoded.stride} for {tuple(encoded.shape)}, expected "
            "those of a tensor that fills its memory."
        )
    if out is None:
        out = torch.empty_strided(
            encoded.shape, encoded.stride, dtype=encoded.dtype, device=encoded.data.device
        )
    found = (out.dtype, tuple(out.shape), out.stride())
    expected = (encoded.dtype, tuple(encoded.shape), encoded.stride)
    if found != expected:
        raise ProtocolError(f"decoding: got a tensor of {found} to write to, expected {expected}.")
    return out, dense_bytes(out)[0]
