"""Wait between two looks at messages that ZeroMQ still sends.

ZeroMQ gives no signal when a message is gone. Short waits take processor time, and long ones leave
the link without messages. A wait therefore grows while nothing moves.
"""

from __future__ import annotations

# First and longest wait, in seconds. A link of 4 Gbit/s takes the longest wait to send the bytes in
# flight (2 MiB), so it does not run empty. A faster link sends a message during the first wait, so
# the waits stay short.
_LEAST_SECONDS, _MOST_SECONDS = 0.001, 0.004


class SendingWait:
    """Wait for room in the window of a sender.

    Attributes:
        seconds: The next wait.
    """

    def __init__(self) -> None:
        self.seconds = _LEAST_SECONDS

    def note(self, *, has_moved: bool) -> None:
        """Note a look: `has_moved` says that a message was gone, or another one could be sent."""
        self.seconds = _LEAST_SECONDS if has_moved else min(2 * self.seconds, _MOST_SECONDS)
