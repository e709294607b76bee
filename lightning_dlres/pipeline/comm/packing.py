"""How a message lies on the wire between two ranks: small ones whole, in one transfer.

A transfer needs a buffer of its very size on the other side, and a message's size is known from its
header. Asking for the header first costs a round trip and two more wake-ups for every micro-batch.
Messages on a channel are mostly as large as the one before, so both sides take that for the size of
the next *frame*: what is smaller is padded, what is larger goes on in a second transfer.
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
PACKED_BYTES = 1 << 20  # larger tensors travel on their own, without a copy
_ALIGNMENT = 64
_PREFIX = struct.Struct("<QQ")  # bytes in frames, of which header


def pack(header: bytes, large: Sequence[Tensor], frame: int) -> tuple[list[Tensor], int]:
    """Lay out a message.

    Args:
        header: the payload's header; empty to say goodbye.
        large: its large tensors, flat uint8.
        frame: bytes of the channel's next frame.

    Returns:
        What is transferred one after the other, flat uint8 tensors on the CPU, and the size of the
        frame after this one.
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
    return transfers, frame_after(end)


def fits(header: bytes, large: Sequence[Tensor], frame: int) -> bool:
    """Return whether the message is one transfer, of the channel's next frame alone, and lies in
    the CPU's memory already."""
    offsets, end = _offsets(len(header), [tensor.numel() for tensor in large])
    in_frame = end <= frame and len(offsets) == len(large)
    return in_frame and all(tensor.device.type == "cpu" for tensor in large)


def sizes(frame: Tensor) -> tuple[int, int]:
    """Return how many bytes of the message are in frames, and how many of these are header; none of
    a goodbye."""
    end, header = _PREFIX.unpack_from(frame.numpy().data)
    return end, header


def header_of(packed: Tensor, size: int, peer: str) -> payload.PayloadHeader:
    """Return the header of a message whose frames have come.

    Raises:
        ProtocolError: it cannot be read; the message names `peer`.
    """
    return payload.decode_header(packed.numpy()[_PREFIX.size : _PREFIX.size + size].data, peer)


def packed_tensors(
    packed: Tensor, end: int, size: int, header: payload.PayloadHeader
) -> list[Tensor]:
    """Return the large tensors that are in the frames; none if these travel on their own.

    They are copies: what shares a frame would keep all of it alive, would be saved with all of it,
    and torch's `set_rng_state` takes the start of the storage for the start of the tensor.

    Raises:
        ProtocolError: the frames are not as long as the header says.
    """
    lengths = payload.large_sizes(header)
    offsets, expected = _offsets(size, lengths)
    if expected != end:
        raise ProtocolError(f"got a message of {end} bytes, expected {expected} from its header.")
    return [packed[o : o + length].clone() for o, length in zip(offsets, lengths, strict=False)]


def frame_after(end: int) -> int:
    """Return the size of the frame after a message with so many bytes in frames."""
    # Rounded, so that a longer step number does not make it another one.
    rounded = -(-end // FIRST_FRAME_BYTES) * FIRST_FRAME_BYTES
    return min(max(rounded, FIRST_FRAME_BYTES), PACKED_BYTES)


def _offsets(header: int, lengths: Sequence[int]) -> tuple[list[int], int]:
    """Return where in the frames large tensors begin (nothing if they travel on their own), and
    where the frames' content ends."""
    end = _PREFIX.size + header
    offsets = []
    for offset, length in _places(end, lengths):
        offsets.append(offset)
        if offset + length > PACKED_BYTES:
            return [], end
    return offsets, offsets[-1] + lengths[-1] if offsets else end


def _places(end: int, lengths: Sequence[int]) -> Iterator[tuple[int, int]]:
    for length in lengths:
        offset = -(-end // _ALIGNMENT) * _ALIGNMENT
        yield offset, length
        end = offset + length
