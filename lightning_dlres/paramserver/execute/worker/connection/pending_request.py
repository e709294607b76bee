"""Requests of a worker that have no answer yet, and the times at which they are sent again."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass

import zmq

from lightning_dlres.core.wire.message import Buffer, Message
from lightning_dlres.paramserver import protocol

# Requests that are large, or have large answers: a slow link may need seconds for each.
_LARGE = (protocol.CONTENT, protocol.STATE, protocol.LOAD)
# Large requests without an answer at a time.
_MAX_LARGE = 8
# Largest factor by which the time between two queries of one thing grows.
_MAX_BACKOFF = 8


def backoff(retry_seconds: float, queries: int) -> float:
    """Return the seconds to wait after so many queries before the next one."""
    return retry_seconds * min(1 << min(queries, _MAX_BACKOFF), _MAX_BACKOFF)


@dataclass
class PendingRequest:
    """Request that is sent until its answer arrives.

    Attributes:
        kind, details, payload: The message.
        sent: Clock when it was last sent; -inf before.
        tries: How often it was sent.
        answer: Its answer; None before.
        tracker: ZeroMQ's use of the payload; None if it was not sent, or is copied.
    """

    kind: str
    details: bytes
    payload: Buffer = b""
    sent: float = -math.inf
    tries: int = 0
    answer: Message | None = None
    tracker: zmq.MessageTracker | None = None

    @property
    def is_large(self) -> bool:
        """True if the request is large, or has a large answer."""
        return self.kind in _LARGE

    def is_due(self, now: float, retry_seconds: float, last_answer: float) -> bool:
        """Return True if the request must be sent, or sent again.

        A large answer may be in the queue behind others that arrive, and a large request in that of
        this process. To ask again would send it twice, over a link that is slow already.

        Args:
            now: Clock.
            retry_seconds: Time without an answer after which a message is sent again.
            last_answer: Clock at the server's last answer to any request.
        """
        if not self.is_large or not self.tries:
            return now - self.sent >= retry_seconds
        if self.tracker is not None:
            if self.tracker.done:
                self.tracker = None
            # Its time begins when it has left.
            self.sent = now
            return False
        return now - max(self.sent, last_answer) >= backoff(retry_seconds, self.tries - 1)


class PendingRequests:
    """Requests to one server that have no answer yet, by sequence number."""

    def __init__(self) -> None:
        # A restarted server answers large requests only after smaller ones, which must not wait for
        # their turn behind them.
        self._small: dict[int, PendingRequest] = {}
        self._large: dict[int, PendingRequest] = {}

    def __bool__(self) -> bool:
        return bool(self._small or self._large)

    def __iter__(self) -> Iterator[tuple[int, PendingRequest]]:
        """Yield the requests that may be sent now, with their numbers."""
        yield from self._small.items()
        # There may be thousands.
        yield from itertools.islice(self._large.items(), _MAX_LARGE)

    def add(self, sequence: int, pending: PendingRequest) -> None:
        """Add a request."""
        (self._large if pending.is_large else self._small)[sequence] = pending

    def get(self, sequence: int) -> PendingRequest | None:
        """Return the request of a number; None if it was answered, or never made."""
        return self._small.get(sequence) or self._large.get(sequence)

    def remove(self, sequence: int) -> None:
        """Remove a request that was answered."""
        self._small.pop(sequence, None)
        self._large.pop(sequence, None)
