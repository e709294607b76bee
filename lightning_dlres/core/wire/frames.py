"""Messages as frames: what is wrong with one that arrives is said with its sender's name.

Every message is two frames: a msgpack header (kind, sequence, CRC-32 and length of the payload) and
the raw payload, so that a large one is never copied into another. Nothing is ever unpickled.
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
# No kind is longer; a header is read before anything is known of its sender.
_Kind = Annotated[str, msgspec.Meta(max_length=64)]


class FrameHeader(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The first frame: what the second one is, so that damage is noticed before use."""

    kind: _Kind
    sequence: _Unsigned
    crc32: _Unsigned
    length: _Unsigned


@dataclass(frozen=True)
class Message:
    """One received message; `peer` is who sent it, `connection` the TCP connection it came by."""

    kind: str
    sequence: int
    payload: bytes
    peer: str
    connection: int

    def decode(self, expected: type[T]) -> T:
        """Return the payload, read as msgpack of a typed struct.

        Raises:
            ProtocolError: the payload is something else.
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
    """Return the message that two frames hold.

    Raises:
        ProtocolError: the frames are not a header and the payload that it describes.
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
    """Return the error for bytes that are not what they should be."""
    return ProtocolError(
        f"{peer} sent {got}, expected {expected}. Check that both sides run the same version."
    )
