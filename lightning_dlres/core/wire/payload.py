"""The wire format of a tree of tensors: one for pipeline, parameter server and gradient
synchronisation.

A payload is a header (msgpack: version, key, structure, and for every tensor codec, dtype, shape,
size in bytes and whether it asks for a gradient) followed by small tensors in line and large
tensors as byte strings of their own, so that those land in their final memory without a copy.
"""

from __future__ import annotations

import math

import msgspec
import torch
from torch import Tensor
from torch.nn import Parameter

from lightning_dlres.core.errors import ConfigError, ProtocolError
from lightning_dlres.core.wire.decoding import from_msgpack
from lightning_dlres.core.wire.tree import Structure, Tree, flatten, unflatten

VERSION = 1
INLINE_BYTES = 4096
RAW = "raw"


class TensorHeader(msgspec.Struct, array_like=True, frozen=True):
    """One tensor of a payload: how it is coded and what it becomes."""

    codec: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int
    requires_grad: bool


class PayloadHeader(msgspec.Struct, array_like=True, frozen=True):
    """What travels before the tensors. `key` says which message of the protocol this is."""

    version: int
    key: tuple[str | int, ...]
    structure: Structure
    tensors: tuple[TensorHeader, ...]
    inline: bytes


_ENCODER = msgspec.msgpack.Encoder()


def encode(tree: Tree, key: tuple[str | int, ...]) -> tuple[bytes, list[Tensor]]:
    """Return the header and the large tensors as flat uint8 tensors, on the device where they are.

    Raises:
        ConfigError: the tree holds something that cannot travel (see `core.tree`).
    """
    structure, tensors = flatten(tree)
    _refuse_attributes(tensors)
    headers, inline, large = [], bytearray(), []
    for tensor in tensors:
        data = as_bytes(tensor)
        dtype = str(tensor.dtype).removeprefix("torch.")
        headers.append(
            TensorHeader(RAW, dtype, tuple(tensor.shape), data.numel(), tensor.requires_grad)
        )
        if data.numel() <= INLINE_BYTES:
            inline += data.cpu().numpy().tobytes()
        else:
            large.append(data)
    header = PayloadHeader(VERSION, key, structure, tuple(headers), bytes(inline))
    try:
        return _ENCODER.encode(header), large
    except (msgspec.MsgspecError, TypeError, ValueError) as error:
        raise ConfigError(
            f"A batch or output cannot be sent to another rank: {error}. Expected tensors, arrays, "
            "numbers and ordinary strings in it."
        ) from error


def decode_header(data: bytes | bytearray | memoryview, peer: str) -> PayloadHeader:
    """Return the header.

    Raises:
        ProtocolError: the bytes are no header of this version; the message names `peer`.
    """
    try:
        header = from_msgpack(data, PayloadHeader)
    except msgspec.MsgspecError as error:
        raise ProtocolError(
            f"{peer} sent a header that cannot be read ({error}): do all ranks run one version?"
        ) from None
    if header.version != VERSION or not all(_is_known(t) for t in header.tensors):
        raise ProtocolError(
            f"{peer} sent a payload of another version or codec: do all ranks run one version?"
        )
    inline = sum(t.nbytes for t in header.tensors if t.nbytes <= INLINE_BYTES)
    if inline != len(header.inline) or not all(_is_consistent(t) for t in header.tensors):
        raise ProtocolError(f"{peer} sent a header that contradicts itself.")
    return header


def large_sizes(header: PayloadHeader) -> list[int]:
    """Return the sizes in bytes of the tensors that follow the header on their own."""
    return [t.nbytes for t in header.tensors if t.nbytes > INLINE_BYTES]


def decode(header: PayloadHeader, large: list[Tensor]) -> Tree:
    """Return the tree; `large` are the flat uint8 tensors that followed. `requires_grad` is set as
    it was sent.

    Raises:
        ProtocolError: the header does not describe a tree that can be built here.
    """
    try:
        tensors = _tensors(header, large)
    except (RuntimeError, TypeError, ValueError) as error:
        raise ProtocolError(f"A tensor arrived that cannot be made here: {error}.") from error
    return unflatten(header.structure, tensors)


def _tensors(header: PayloadHeader, large: list[Tensor]) -> list[Tensor]:
    offset, position, tensors = 0, 0, []
    for entry in header.tensors:
        if entry.nbytes > INLINE_BYTES:
            data, position = large[position], position + 1
        elif entry.nbytes:
            piece = bytearray(header.inline[offset : offset + entry.nbytes])
            data, offset = torch.frombuffer(piece, dtype=torch.uint8), offset + entry.nbytes
        else:
            data = torch.empty(0, dtype=torch.uint8)
        dtype: torch.dtype = getattr(torch, entry.dtype)
        tensor = data.view(dtype).view(entry.shape)
        tensors.append(tensor.requires_grad_() if entry.requires_grad else tensor)
    return tensors


def _refuse_attributes(tensors: list[Tensor]) -> None:
    """Refuse tensors of classes of users that know more than their values, such as boxes that know
    the size of their image; what is only of another class arrives as a plain tensor."""
    for tensor in tensors:
        kind = type(tensor)
        if kind not in (Tensor, Parameter) and getattr(tensor, "__dict__", None):
            raise ConfigError(
                f"A {kind.__module__}.{kind.__qualname__} cannot be sent to another rank: its "
                f"attributes {sorted(vars(tensor))} would be lost. Send them beside "
                "tensor.as_subclass(torch.Tensor)."
            )


def _is_known(entry: TensorHeader) -> bool:
    return entry.codec == RAW and isinstance(getattr(torch, entry.dtype, None), torch.dtype)


def _is_consistent(entry: TensorHeader) -> bool:
    dtype: torch.dtype = getattr(torch, entry.dtype)
    fits = min(entry.shape, default=0) >= 0
    if entry.requires_grad and not (dtype.is_floating_point or dtype.is_complex):
        return False
    return fits and math.prod(entry.shape) * dtype.itemsize == entry.nbytes


def as_bytes(tensor: Tensor) -> Tensor:
    """Return the contents of a tensor as a flat uint8 tensor, a view where that is possible.

    Raises:
        ProtocolError: the tensor is sparse, nested or quantized, or has no contents.
    """
    if tensor.is_quantized:
        raise ProtocolError("A quantized tensor cannot be sent; dequantize it.")
    if tensor.layout is not torch.strided or tensor.is_nested:
        kind = "nested tensor" if tensor.is_nested else f"tensor of layout {tensor.layout}"
        raise ProtocolError(f"A {kind} cannot be sent; send it dense.")
    if tensor.device.type == "meta":
        raise ProtocolError("A tensor on the meta device cannot be sent: it has no contents.")
    data = tensor.detach().resolve_conj().resolve_neg().contiguous()
    if not data.numel():
        return torch.empty(0, dtype=torch.uint8)
    # One element counts as contiguous at any stride, but can be seen as bytes at stride 1 only.
    return data.as_strided((data.numel(),), (1,)).view(torch.uint8)
