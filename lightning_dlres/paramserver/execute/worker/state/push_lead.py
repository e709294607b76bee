"""Lead of a worker's pushes to one server over those to the others.

A server that merges keys faster than the others sends more values. If its host has a worker, these
leave over the same link as the worker's pushes, which then come late to the other servers. They
merge still more slowly, and the first server ends its part of a step long before them. So all links
of a worker go through its pushes side by side: none is more than a few keys ahead of the first push
to another server that has no answer.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable

# Bytes of pushes by which a link may be ahead: some of its own, and those to each other server.
_OWN_BYTES, _OTHER_BYTES = 0.5 * (1 << 20), 1.5 * (1 << 20)


class PushLead:
    """Pushes to all servers that have no answer; its callers hold a lock.

    Args:
        servers: Number of servers.
    """

    def __init__(self, servers: int) -> None:
        # By server: keys of the pushes without an answer, in the order in which they were sent, and
        # their positions in bytes.
        self._positions: list[OrderedDict[int, int]] = [OrderedDict() for _ in range(servers)]
        self._most = _OWN_BYTES + _OTHER_BYTES * (servers - 1)
        # By server: what wakes a link that waits for the answers of other servers.
        self._waiting: dict[int, Callable[[], None]] = {}
        # Clock at the last answer of a server.
        self.last = 0.0

    def sent(self, server: int, key: int, position: int) -> None:
        """Note a push, and the bytes of all pushes before it."""
        self._positions[server][key] = position
        self._positions[server].move_to_end(key)

    def answered(self, server: int, key: int, now: float) -> None:
        """Note that a key was merged, or that its value has come."""
        if self._positions[server].pop(key, None) is None:
            return
        self.last = now
        waiting, self._waiting = self._waiting, {}
        for wake in waiting.values():
            wake()

    def is_far(self, server: int, position: int, wake: Callable[[], None]) -> bool:
        """Return True if a push to a server is too far ahead; `wake` is called after an answer."""
        others = (one for index, one in enumerate(self._positions) if index != server)
        firsts = [next(iter(one.values())) for one in others if one]
        if not firsts or position - min(firsts) <= self._most:
            return False
        self._waiting[server] = wake
        return True
