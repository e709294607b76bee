"""Messages as frames; errors about a received message name its sender.

Every message has two frames: a msgpack header (kind, sequence, CRC-32 and length of the payload)
and the raw payload. A large payload is therefore never copied into another buffer. Nothing is
ever unpickled.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, TypeVar

import msgspec

from lightning_dlres.core.errors import ProtocolError
from lightning_dlres.core.wire.decoding import from_msgpack

Buffer = bytes | bytearray | memoryview
T = TypeVar("T")
_Unsigned = Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]
# The header of an unknown sender is decoded, so the length of its kind must have a limit.
_Kind = Annotated[str, msgspec.Meta(max_length=64)]


class FrameHeader(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """First frame of a message; it describes the second, so that damage is detected before use."""

    kind: _Kind
    sequence: _Unsigned
    crc32: _Unsigned
    length: _Unsigned


@dataclass(frozen=True)
class Message:
    """One received message.

    Attributes:
        kind: Name of the message's type.
        sequence: Sequence number that the sender gave.
        payload: Raw bytes.
        peer: Name of the sender.
        connection: Id of the TCP connection: ZeroMQ's file descriptor. Later connections may reuse
            it.
    """

    kind: str
    sequence: int
    payload: bytes
    peer: str
    connection: int

    def decode(self, expected: type[T]) -> T:
        """Return the payload, decoded from msgpack into a typed struct.

        Raises:
            ProtocolError: If the payload is not of the expected type.
        """
        try:
            return from_msgpack(self.payload, expected)
        except msgspec.MsgspecError as error:
            raise broken(
                self.peer, f"a {self.kind!r} payload ({error})", f"a {expected.__name__}"
            ) from error


def pack(kind: str, sequence: int, payload: Buffer) -> list[Buffer]:
    """Return the two frames of a message."""
    header = FrameHeader(kind, sequence, zlib.crc32(payload), memoryview(payload).nbytes)
    return [msgspec.msgpack.encode(header), payload]


def unpack(frames: Sequence[bytes], peer: str, connection: int = 0) -> Message:
    """Return the message of two frames.

    Raises:
        ProtocolError: If the frames are not a header and the payload that it describes.
    """
    if len(frames) != 2:
        raise broken(peer, f"{len(frames)} frames", "a header and a payload")
    try:
        header = from_msgpack(frames[0], FrameHeader)
    except msgspec.MsgspecError as error:
        raise broken(peer, f"an unreadable header ({error})", "a message header") from error
    payload = frames[1]
    if len(payload) != header.length:
        raise broken(peer, f"{len(payload)} bytes", f"{header.length} bytes of {header.kind!r}")
    if zlib.crc32(payload) != header.crc32:
        raise broken(peer, f"a damaged {header.kind!r} payload", f"CRC-32 {header.crc32:08x}")
    return Message(header.kind, header.sequence, payload, peer, connection)


def broken(peer: str, got: str, expected: str) -> ProtocolError:
    """Return the error for bytes that break the protocol."""
    return ProtocolError(
        f"{peer} sent {got}, expected {expected}. Check that both sides run the same version."
    )
