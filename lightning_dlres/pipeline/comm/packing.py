"""Layout of a message on the wire between two ranks: a small message is one transfer.

A transfer needs a buffer of exactly its size on the receiving side, and only the header of a
message tells its size. Sending the header first would cost a round trip and two more wake-ups of
threads for every micro-batch. Most messages on a channel are as large as the one before. So both
sides take the size of the last message for that of the next *frame*. A smaller message is padded,
and a larger one continues in a second transfer.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from lightning_dlres.core.errors import ProtocolError
from lightning_dlres.core.wire import payload

FIRST_FRAME_BYTES = 2048
# Messages up to this size are packed into frames, which copies their tensors. Tensors of larger
# ones have transfers of their own, without a copy.
PACKED_BYTES = 1 << 20
# Offsets of tensors in a frame are multiples of this, in bytes.
_ALIGNMENT = 64
# Start of every frame: bytes of the message in frames, and bytes of its header.
_PREFIX = struct.Struct("<QQ")


def pack(header: bytes, large: Sequence[Tensor], frame: int) -> tuple[list[Tensor], int]:
    """Lay out a message.

    Args:
        header: Header of the payload; empty for a goodbye.
        large: Large tensors of the payload, flat uint8.
        frame: Bytes of the channel's next frame.

    Returns:
        The transfers in order (flat uint8 tensors on the CPU), and the bytes of the frame after
        this one.
    """
    offsets, end = _offsets(len(header), [tensor.numel() for tensor in large])
    # NumPy's slices take a fraction of the time of torch's.
    packed = np.zeros(max(end, frame), np.uint8)
    start = _PREFIX.pack(end, len(header)) + header
    packed[: len(start)] = np.frombuffer(start, np.uint8)
    for tensor, offset in zip(large, offsets, strict=False):
        packed[offset : offset + tensor.numel()] = tensor.cpu().numpy()
    whole = torch.from_numpy(packed)
    transfers = [whole[:frame]] if end <= frame else [whole[:frame], whole[frame:]]
    if not offsets:
        transfers += [tensor.cpu() for tensor in large]
    return transfers, next_frame_bytes(end)


def fits_frame(header: bytes, large: Sequence[Tensor], frame: int) -> bool:
    """Return True if the message is a single transfer (the channel's next frame), and its tensors
    are on the CPU."""
    offsets, end = _offsets(len(header), [tensor.numel() for tensor in large])
    in_frame = end <= frame and len(offsets) == len(large)
    return in_frame and all(tensor.device.type == "cpu" for tensor in large)


def read_prefix(frame: Tensor) -> tuple[int, int]:
    """Return the bytes of the message in frames, and the bytes of its header. A header of zero
    bytes is a goodbye."""
    end, header_bytes = _PREFIX.unpack_from(frame.numpy().data)
    return end, header_bytes


def decode_header(packed: Tensor, header_bytes: int, peer: str) -> payload.PayloadHeader:
    """Return the header of a message whose frames have been received.

    Raises:
        ProtocolError: If it cannot be decoded; the message names `peer`.
    """
    data = packed.numpy()[_PREFIX.size : _PREFIX.size + header_bytes].data
    return payload.decode_header(data, peer)


def unpack_tensors(
    packed: Tensor, end: int, header_bytes: int, header: payload.PayloadHeader
) -> list[Tensor]:
    """Return the large tensors in the frames; an empty list if they have transfers of their own.

    They are copies. A tensor that shares storage with a frame would keep all of it in memory, and
    would be saved with all of it. Also torch's `set_rng_state` reads from the start of the storage
    instead of the start of the tensor.

    Raises:
        ProtocolError: If the frames are not as long as the header says.
    """
    lengths = payload.large_sizes(header)
    offsets, expected = _offsets(header_bytes, lengths)
    if expected != end:
        raise ProtocolError(
            f"A message must have the {expected} bytes that its header says, got {end}."
        )
    return [packed[o : o + length].clone() for o, length in zip(offsets, lengths, strict=False)]


def next_frame_bytes(end: int) -> int:
    """Return the bytes of the frame after a message with `end` bytes in frames."""
    # Rounded, so that a step number with one more digit does not change the size.
    rounded = -(-end // FIRST_FRAME_BYTES) * FIRST_FRAME_BYTES
    return min(max(rounded, FIRST_FRAME_BYTES), PACKED_BYTES)


def _offsets(header_bytes: int, lengths: Sequence[int]) -> tuple[list[int], int]:
    """Return the offsets of the large tensors in the frames, and the end of the frames' content.

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
    """Yield offset and length of each tensor, of those that follow each other from `end` on."""
    for length in lengths:
        offset = -(-end // _ALIGNMENT) * _ALIGNMENT
        yield offset, length
        end = offset + length
