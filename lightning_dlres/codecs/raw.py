"""Uncompressed bytes: the codec for tensors that no other codec makes smaller."""

from __future__ import annotations

import torch
from torch import Tensor

from lightning_dlres.codecs.base import Codec, Encoded, register
from lightning_dlres.codecs.layout import dense_bytes, is_dense
from lightning_dlres.core.errors import ProtocolError
from lightning_dlres.kernels.copying import copy_past_cache


@register
class Raw(Codec):
    """Codec that copies the bytes unchanged."""

    name = "raw"
    is_lossless = True

    def bound(self, tensor: Tensor) -> int:
        return tensor.numel() * tensor.element_size()

    def encode(self, tensor: Tensor, out: Tensor | None = None) -> Encoded:
        return encode_raw(tensor, *dense_bytes(tensor), out)

    def decode(self, encoded: Encoded, out: Tensor | None = None) -> Tensor:
        result, target = decode_target(encoded, out)
        if encoded.nbytes != target.numel():
            raise ProtocolError(
                f"raw data must have {target.numel()} bytes for {encoded.dtype} of "
                f"{tuple(encoded.shape)}, got {encoded.nbytes} bytes. Check that both sides run "
                "the same version."
            )
        target.copy_(encoded.payload)
        return result


def encode_raw(
    tensor: Tensor, source: Tensor, stride: tuple[int, ...], out: Tensor | None
) -> Encoded:
    """Return a tensor encoded by `Raw`; `source` and `stride` are its `dense_bytes`."""
    count = source.numel()
    data = copy_past_cache(torch.empty_like(source) if out is None else out[:count], source)
    return Encoded(
        codec=Raw.name,
        dtype=tensor.dtype,
        shape=tensor.shape,
        stride=stride,
        data=data,
        used=count,
    )


def decode_target(encoded: Encoded, out: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return the tensor into which to decode, and its memory as uint8[nbytes].

    The tensor is `out`, or a new one if `out` is None.

    Raises:
        ProtocolError: If `out` differs from the encoded tensor in dtype, shape or strides, or if
            the encoded strides leave gaps or overlap.
    """
    if not is_dense(encoded.shape, encoded.stride):
        raise ProtocolError(
            "strides of encoded data must leave no gaps and no overlaps, got "
            f"{encoded.stride} for {tuple(encoded.shape)}. Check that both sides run the same "
            "version."
        )
    if out is None:
        out = torch.empty_strided(
            encoded.shape, encoded.stride, dtype=encoded.dtype, device=encoded.data.device
        )
    given = (out.dtype, tuple(out.shape), out.stride())
    expected = (encoded.dtype, tuple(encoded.shape), encoded.stride)
    if given != expected:
        raise ProtocolError(
            f"out must have dtype, shape and strides {expected}, got {given}. Pass out=None."
        )
    return out, dense_bytes(out)[0]
