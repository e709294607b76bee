"""Messages between two endpoints.

Every message has two frames: a msgpack header (kind, sequence, checksum, length of the payload,
small details) and the raw payload. A large payload is therefore never copied into another buffer.
Nothing is ever unpickled.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, TypeVar

import msgspec

from lightning_dlres.core.errors import ProtocolError
from lightning_dlres.core.wire.checksum import checksum_of
from lightning_dlres.core.wire.decoding import from_msgpack

Buffer = bytes | bytearray | memoryview
T = TypeVar("T")
_Unsigned = Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]
# Longest `kind`, in characters, and longest details, in bytes: headers of unknown senders are
# decoded, too.
_Kind = Annotated[str, msgspec.Meta(max_length=64)]
_Details = Annotated[bytes, msgspec.Meta(max_length=64 << 10)]


class MessageHeader(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """First frame of a message. Its length and checksum reveal damage before the payload is used.

    The checksum is that of the payload, followed by the details.
    """

    kind: _Kind
    sequence: _Unsigned
    checksum: _Unsigned
    length: _Unsigned
    details: _Details = b""


@dataclass(frozen=True)
class Message:
    """One received message.

    Attributes:
        kind: Name of the message's type.
        sequence: Sequence number that the sender gave.
        payload: Raw bytes; a view of ZeroMQ's memory if the endpoint does not copy.
        peer: Name of the sender.
        connection: Id of the connection: ZeroMQ's file descriptor. Later connections may reuse it.
        details: Small part of the message beside the payload.
    """

    kind: str
    sequence: int
    payload: bytes | memoryview
    peer: str
    connection: int
    details: bytes = b""

    def decode(self, expected: type[T]) -> T:
        """Return the payload, decoded from msgpack into a typed struct.

        Raises:
            ProtocolError: If the payload is not of the expected type.
        """
        return self._decoded(self.payload, expected, "payload")

    def decode_details(self, expected: type[T]) -> T:
        """Return the details, decoded from msgpack into a typed struct.

        Raises:
            ProtocolError: If the details are not of the expected type.
        """
        return self._decoded(self.details, expected, "message's details")

    def _decoded(self, data: Buffer, expected: type[T], part: str) -> T:
        try:
            return from_msgpack(data, expected)
        except msgspec.MsgspecError as error:
            raise protocol_error(
                self.peer, f"a {self.kind!r} {part} ({error})", f"a {expected.__name__}"
            ) from error


def pack(
    kind: str,
    sequence: int,
    payload: Buffer,
    *,
    details: bytes = b"",
    payload_checksum: int | None = None,
) -> list[Buffer]:
    """Return the two frames of a message.

    Args:
        kind, sequence, payload, details: See `Message`.
        payload_checksum: Checksum of the payload, if it is known.
    """
    checksum = checksum_of(payload) if payload_checksum is None else payload_checksum
    checksum = checksum_of(details, checksum)
    header = MessageHeader(kind, sequence, checksum, memoryview(payload).nbytes, details)
    return [msgspec.msgpack.encode(header), payload]


def unpack(frames: Sequence[bytes | memoryview], peer: str, connection: int = 0) -> Message:
    """Return the message of two frames; `peer` is the name of its sender.

    Raises:
        ProtocolError: If the frames are not a header and the payload that it describes.
    """
    if len(frames) != 2:
        count = "1 frame" if len(frames) == 1 else f"{len(frames)} frames"
        raise protocol_error(peer, count, "2 frames: a header and a payload")
    try:
        header = from_msgpack(frames[0], MessageHeader)
    except msgspec.MsgspecError as error:
        raise protocol_error(peer, f"an unreadable header ({error})", "a message header") from error
    payload = frames[1]
    if len(payload) != header.length:
        raise protocol_error(
            peer, f"{len(payload)} bytes", f"{header.length} bytes of {header.kind!r}"
        )
    if checksum_of(header.details, checksum_of(payload)) != header.checksum:
        raise protocol_error(
            peer, f"a damaged {header.kind!r} payload", f"one with the checksum {header.checksum:x}"
        )
    return Message(header.kind, header.sequence, payload, peer, connection, header.details)


def protocol_error(peer: str, got: str, expected: str) -> ProtocolError:
    """Return the error for bytes that break the protocol.

    In its message, `got` follows "sent", and `expected` follows "expected".
    """
    return ProtocolError(
        f"{peer} sent {got}, expected {expected}. Check that both sides run the same version."
    )
