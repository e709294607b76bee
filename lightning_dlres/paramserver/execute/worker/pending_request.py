"""Request of a worker that has no answer yet, and the time at which it is sent again."""

from __future__ import annotations

import math
from dataclasses import dataclass

from lightning_dlres.core.wire.message import Buffer, Message
from lightning_dlres.paramserver import protocol

# Requests whose answers are large: a slow link may need seconds for each.
_LARGE_ANSWERS = (protocol.CONTENT, protocol.STATE)
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
    """

    kind: str
    details: bytes
    payload: Buffer = b""
    sent: float = -math.inf
    tries: int = 0
    answer: Message | None = None

    def is_due(self, now: float, retry_seconds: float, last_answer: float) -> bool:
        """Return True if the request must be sent, or sent again.

        A large answer may be in the queue behind others that arrive. To ask again would send it
        twice, over a link that is slow already.

        Args:
            now: Clock.
            retry_seconds: Time without an answer after which a message is sent again.
            last_answer: Clock at the server's last answer to any request.
        """
        if self.kind not in _LARGE_ANSWERS or not self.tries:
            return now - self.sent >= retry_seconds
        return now - max(self.sent, last_answer) >= backoff(retry_seconds, self.tries - 1)
