"""Riders: small keys whose payloads travel in the message of another key.

Half of a model's parameters may be biases and norms of a few KiB, and each message costs both
sides processor time. So a message has one payload of any size in a frame of its own. The payloads
of small keys are in its details.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import msgspec

from lightning_dlres.core.errors import ProtocolError
from lightning_dlres.core.wire.decoding import from_msgpack
from lightning_dlres.paramserver import protocol

# Largest payload of a rider, and most bytes of the details of a message with riders. A message's
# details may have 64 KiB.
_MOST_BYTES, _ROOM_BYTES = 16 << 10, 32 << 10


class MessageRoom:
    """Room of one message for keys: at most one large payload, and small ones."""

    def __init__(self) -> None:
        self._count, self._left, self._has_large = 0, _ROOM_BYTES, False

    def take(self, payload_bytes: int, details_bytes: int) -> bool:
        """Return True if a key fits, and take its room; the first one always fits."""
        is_large = payload_bytes > _MOST_BYTES
        needed = details_bytes if is_large else details_bytes + payload_bytes
        is_full = (self._has_large and is_large) or needed > self._left
        if self._count and (is_full or self._count > protocol.MOST_RIDERS):
            return False
        self._count, self._left = self._count + 1, self._left - needed
        self._has_large = self._has_large or is_large
        return True


def rider(details: bytes, payload: memoryview) -> protocol.Rider:
    """Return a rider; its payload is copied."""
    return protocol.Rider(details=details, data=bytes(payload))


def push_details(details: bytes, riders: Sequence[tuple[bytes, memoryview]], sender: int) -> bytes:
    """Return the details of a push, as one of this process, also if a predecessor made it.

    Args:
        details: Details of the push in the log.
        riders: Details and payloads of its riders in the log.
        sender: Incarnation of this process.
    """
    push = from_msgpack(details, protocol.Push)
    if push.incarnation == sender and not riders:
        return details
    own = [rider(push_details(one, (), sender), payload) for one, payload in riders]
    return msgspec.msgpack.encode(msgspec.structs.replace(push, incarnation=sender, riders=own))


def pushes_with_riders(
    push: protocol.Push, payload: memoryview
) -> list[tuple[protocol.Push, memoryview]]:
    """Return the pushes of a message, with their payloads.

    Raises:
        ProtocolError: If a rider is not of the sender, or has riders.
        msgspec.MsgspecError: If it is malformed.
    """
    pushes, sender = [(push, payload)], (push.job, push.worker, push.incarnation)
    for one in push.riders:
        own = from_msgpack(one.details, protocol.Push)
        if (own.job, own.worker, own.incarnation) != sender or own.riders:
            raise ProtocolError(f"worker {push.worker} sent a rider that is not one of its own.")
        pushes.append((own, memoryview(one.data)))
    return pushes


def values_with_riders(
    reply: protocol.KeyReply, payload: memoryview
) -> Iterator[tuple[protocol.KeyReply, memoryview]]:
    """Yield the values of a message, with their replies.

    Raises:
        ProtocolError: If a rider is malformed.
    """
    yield reply, payload
    for one in reply.riders:
        try:
            yield from_msgpack(one.details, protocol.KeyReply), memoryview(one.data)
        except msgspec.MsgspecError as error:
            raise ProtocolError(f"a value with a malformed rider: {error}") from error
