"""Wire format of a tree of tensors.

A payload begins with a msgpack header: version, key, structure, small tensors, and a description of
each tensor (codec, dtype, shape, size in bytes, `requires_grad`). Large tensors follow as separate
byte strings. The receiver can read them into their final memory without a copy.

Between two ranks a small payload is one transfer. The receiver needs a buffer of exactly the
transfer's size, but only the message's header tells that size. Sending the header first would cost
a round trip and two more wake-ups of threads for every micro-batch. Most messages on a channel are
as large as the one before. So both sides derive the size of the next *frame*, the first transfer of
a message, from the last message. A smaller message is padded, and a larger one continues in a
second transfer. (ZeroMQ's frames, in `endpoint`, are something else.)

A message with an empty header is a *goodbye*: the sender will send nothing more.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator, Sequence

import msgspec
import numpy as np
import torch
from torch import Tensor
from torch.nn import Parameter

from lightning_dlres.core.errors import ConfigError, ProtocolError
from lightning_dlres.core.wire.decoding import from_msgpack
from lightning_dlres.core.wire.tree import Structure, Tree, flatten, unflatten

VERSION = 1
# Largest tensor, in bytes, that travels in the header.
INLINE_BYTES = 4096
# Only codec of tensors in a payload: their bytes, unchanged.
RAW = "raw"
# Bytes of a channel's first frame, and the unit to which the later frames' sizes are rounded.
FIRST_FRAME_BYTES = 2048
# Largest packed message, in bytes. Packing copies the tensors behind the header. The tensors of a
# larger message have transfers of their own, without a copy.
PACKED_BYTES = 1 << 20
# Offsets of tensors in a frame are multiples of this, in bytes.
_ALIGNMENT = 64
# Start of every frame: bytes of the packed message (with this prefix), and bytes of its header.
_PREFIX = struct.Struct("<QQ")


class TensorHeader(msgspec.Struct, array_like=True, frozen=True):
    """Description of one tensor of a payload; `nbytes` is its size in bytes."""

    codec: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int
    requires_grad: bool


class PayloadHeader(msgspec.Struct, array_like=True, frozen=True):
    """Header of a payload; `key` identifies the message in the protocol."""

    version: int
    key: tuple[str | int, ...]
    structure: Structure
    tensors: tuple[TensorHeader, ...]
    inline: bytes


_ENCODER = msgspec.msgpack.Encoder()


def encode(tree: Tree, key: tuple[str | int, ...]) -> tuple[bytes, list[Tensor]]:
    """Return the encoded header, and the large tensors as uint8[n] on their devices.

    Raises:
        ConfigError: If the tree holds an object that cannot be sent; see `tree` and `as_bytes`.
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
            f"A batch or output cannot be sent to another rank: {error}. Use only tensors, arrays, "
            "numbers and ordinary strings in it."
        ) from error


def decode_header(data: bytes | bytearray | memoryview, peer: str) -> PayloadHeader:
    """Return the decoded and checked header.

    Raises:
        ProtocolError: If the bytes are not a header of this version. The message names `peer`.
    """
    try:
        header = from_msgpack(data, PayloadHeader)
    except msgspec.MsgspecError as error:
        raise ProtocolError(
            f"{peer} sent a header that cannot be decoded ({error}). Check that all ranks run the "
            "same version."
        ) from None
    if header.version != VERSION or not all(_is_known(t) for t in header.tensors):
        raise ProtocolError(
            f"{peer} sent a payload of another version or codec. Check that all ranks run the same "
            "version."
        )
    inline = sum(t.nbytes for t in header.tensors if t.nbytes <= INLINE_BYTES)
    if inline != len(header.inline) or not all(_is_consistent(t) for t in header.tensors):
        raise ProtocolError(
            f"{peer} sent a header whose sizes, shapes and dtypes disagree. Check that all ranks "
            "run the same version."
        )
    return header


def large_sizes(header: PayloadHeader) -> list[int]:
    """Return the sizes in bytes of the large tensors, which follow the header."""
    return [t.nbytes for t in header.tensors if t.nbytes > INLINE_BYTES]


def decode(header: PayloadHeader, large: list[Tensor]) -> Tree:
    """Return the tree, with the `requires_grad` of the sender's tensors.

    Args:
        header: Decoded header.
        large: The large tensors as uint8[n], in order.

    Raises:
        ProtocolError: If this process cannot build the tree that the header describes.
    """
    try:
        tensors = _tensors(header, large)
    except (RuntimeError, TypeError, ValueError) as error:
        raise ProtocolError(f"A received tensor cannot be built on this rank: {error}.") from error
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
        is_flat = dtype is torch.uint8 and len(entry.shape) == 1
        tensor = data if is_flat else data.view(dtype).view(entry.shape)
        tensors.append(tensor.requires_grad_() if entry.requires_grad else tensor)
    return tensors


def _refuse_attributes(tensors: list[Tensor]) -> None:
    """Refuse tensors of user-defined classes that have attributes, such as an image size.

    The attributes would be lost. A subclass without attributes arrives as a plain tensor.
    """
    for tensor in tensors:
        kind = type(tensor)
        if kind in (Tensor, Parameter) or tensor.is_nested:
            # `as_bytes` refuses nested tensors of every class, and names a fix.
            continue
        if getattr(tensor, "__dict__", None):
            raise ConfigError(
                f"A {kind.__module__}.{kind.__qualname__} cannot be sent to another rank: its "
                f"attributes {sorted(vars(tensor))} would be lost. Send a dict with them and with "
                "tensor.as_subclass(torch.Tensor)."
            )


def _is_known(entry: TensorHeader) -> bool:
    return entry.codec == RAW and isinstance(getattr(torch, entry.dtype, None), torch.dtype)


def _is_consistent(entry: TensorHeader) -> bool:
    dtype: torch.dtype = getattr(torch, entry.dtype)
    has_valid_shape = min(entry.shape, default=0) >= 0
    if entry.requires_grad and not (dtype.is_floating_point or dtype.is_complex):
        return False
    return has_valid_shape and math.prod(entry.shape) * dtype.itemsize == entry.nbytes


def as_bytes(tensor: Tensor) -> Tensor:
    """Return the contents of a tensor as uint8[n], a view if the tensor is contiguous.

    Raises:
        ConfigError: If the tensor is sparse, nested or quantized, or on the meta device.
    """
    require_dense(tensor)
    if tensor.device.type == "meta":
        raise _without_bytes("A tensor on the meta device", "Make it on a device with memory")
    if tensor.dtype is torch.uint8 and tensor.dim() == 1 and tensor.is_contiguous():
        # Every torch operation releases the interpreter's lock, and then waits for other threads.
        return tensor
    data = tensor.detach().resolve_conj().resolve_neg().contiguous()
    if not data.numel():
        return torch.empty(0, dtype=torch.uint8)
    # A tensor of one element is contiguous with any stride, but a view as bytes needs stride 1.
    return data.as_strided((data.numel(),), (1,)).view(torch.uint8)


def require_dense(tensor: Tensor) -> None:
    """Check that a tensor's values can be sent, and cut by samples.

    Raises:
        ConfigError: If the tensor is sparse, nested or quantized.
    """
    if tensor.is_quantized:
        raise _without_bytes("A quantized tensor", "Call .dequantize() on it")
    if tensor.is_nested:
        raise _without_bytes("A nested tensor", "Pad it with torch.nested.to_padded_tensor")
    if tensor.layout is not torch.strided:
        raise _without_bytes(f"A tensor of layout {tensor.layout}", "Call .to_dense() on it")


def _without_bytes(kind: str, fix: str) -> ConfigError:
    """Return the error for a tensor that has no plain bytes."""
    return ConfigError(
        f"{kind} cannot be sent to another rank: it has no plain bytes. {fix} in the dataset or "
        "its collate function if a batch holds it, else in the layer that returns it."
    )


def pack(
    header: bytes, large: Sequence[Tensor], frame_bytes: int, *, is_padded: bool = True
) -> tuple[list[Tensor], int]:
    """Return the transfers of a message, and the size of the channel's frame after it.

    Args:
        header: Header of the payload; empty for a goodbye.
        large: Large tensors of the payload, flat uint8.
        frame_bytes: Size of the channel's next frame, in bytes.
        is_padded: Pad a smaller message to `frame_bytes`.

    Returns:
        The transfers in order (flat uint8 tensors on the CPU), and the size in bytes of the frame
        after this one.
    """
    offsets, end = _offsets(len(header), [tensor.numel() for tensor in large])
    # NumPy's slices take a fraction of the time of torch's. Not `zeros`: it would write all of the
    # message twice.
    packed = np.empty(max(end, frame_bytes) if is_padded else end, np.uint8)
    start = _PREFIX.pack(end, len(header)) + header
    packed[: len(start)] = np.frombuffer(start, np.uint8)
    written = len(start)
    # Without offsets the tensors are not packed, but follow as transfers of their own.
    for tensor, offset in zip(large, offsets, strict=False):
        packed[written:offset] = 0
        written = offset + tensor.numel()
        packed[offset:written] = tensor.cpu().numpy()
    packed[written:] = 0
    whole = torch.from_numpy(packed)
    transfers = [whole[:frame_bytes]]
    if end > frame_bytes:
        transfers.append(whole[frame_bytes:])
    if not offsets:
        transfers += [tensor.cpu() for tensor in large]
    return transfers, next_frame_bytes(end)


def fits_frame(header: bytes, large: Sequence[Tensor], frame_bytes: int) -> bool:
    """Return True if a message is a single transfer of `frame_bytes`, with all tensors on the CPU.

    The sender may then send it at once, without waiting for a copy from a GPU.
    """
    offsets, end = _offsets(len(header), [tensor.numel() for tensor in large])
    in_frame = end <= frame_bytes and len(offsets) == len(large)
    return in_frame and all(tensor.device.type == "cpu" for tensor in large)


def read_prefix(frame: Tensor) -> tuple[int, int]:
    """Return the bytes of the packed message, and the bytes of its header (0 for a goodbye)."""
    end, header_bytes = _PREFIX.unpack_from(frame.numpy().data)
    return end, header_bytes


def decode_frame_header(packed: Tensor, header_bytes: int, peer: str) -> PayloadHeader:
    """Return the header of a packed message that has been received.

    Raises:
        ProtocolError: If it cannot be decoded; the message names `peer`.
    """
    data = packed.numpy()[_PREFIX.size : _PREFIX.size + header_bytes].data
    return decode_header(data, peer)


def unpack_tensors(
    packed: Tensor, end: int, header_bytes: int, header: PayloadHeader
) -> list[Tensor]:
    """Return the large tensors of a packed message; none if they have transfers of their own.

    They are copies. A tensor that shares storage with a frame would keep the whole frame in memory,
    and a checkpoint of it would contain the whole frame. Also torch's `set_rng_state` reads from
    the start of the storage instead of the start of the tensor.

    Raises:
        ProtocolError: If the packed message is not as long as its header says.
    """
    lengths = large_sizes(header)
    offsets, expected = _offsets(header_bytes, lengths)
    if expected != end:
        raise ProtocolError(
            f"A message must have the {expected} bytes that its header says, got {end}. Check that "
            "all ranks run the same version."
        )
    return [
        packed[offset : offset + length].clone()
        for offset, length in zip(offsets, lengths, strict=False)
    ]


def next_frame_bytes(end: int) -> int:
    """Return the size in bytes of the frame after a packed message of `end` bytes."""
    # Rounded, so that a step number with one more digit does not change the size.
    rounded = -(-end // FIRST_FRAME_BYTES) * FIRST_FRAME_BYTES
    return min(max(rounded, FIRST_FRAME_BYTES), PACKED_BYTES)


def _offsets(header_bytes: int, lengths: Sequence[int]) -> tuple[list[int], int]:
    """Return the offsets of the large tensors in the packed message, and its size in bytes.

    There are no offsets if the tensors have transfers of their own.
    """
    end = _PREFIX.size + header_bytes
    offsets = []
    for offset, length in _aligned_offsets(end, lengths):
        offsets.append(offset)
        if offset + length > PACKED_BYTES:
            return [], end
    return offsets, offsets[-1] + lengths[-1] if offsets else end


def _aligned_offsets(end: int, lengths: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Yield the aligned offset and the length of each tensor, if they are packed from `end` on."""
    for length in lengths:
        offset = -(-end // _ALIGNMENT) * _ALIGNMENT
        yield offset, length
        end = offset + length
