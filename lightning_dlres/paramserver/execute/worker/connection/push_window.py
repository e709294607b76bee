"""Window of a worker's pushes to one server: how far it may be ahead of the other workers.

Workers that send to one server at once get uneven parts of its link, and each key waits for the
last worker. If one worker has sent all its keys early, the values of the last ones go out late,
when the link carries no pushes any more. So a worker sends a few keys ahead of the answers, and
then waits for them. It does not wait for a worker that still computes: without an answer for twice
the longest interval of late, it sends the rest.

Values wait for the link that the server sends them over. On a slow one they come long after the
pushes that they answer. The server's notices of merged keys come earlier, and a worker that counts
these as answers sends fewer keys ahead, also of those to other servers (see `PushLead`).
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable

import zmq

from lightning_dlres.paramserver.execute.riders import MessageRoom
from lightning_dlres.paramserver.execute.worker.state.push_lead import PushLead
from lightning_dlres.paramserver.execute.worker.state.push_log import LogEntry

# Bytes of pushes that ZeroMQ holds at a time. With more, workers that push at different times would
# send their keys in different orders.
_IN_FLIGHT_BYTES = 2 << 20
# Bytes of pushes without an answer; further ones for each second of a round trip, as many as a link
# of 4 Gbit/s carries.
_UNANSWERED_BYTES, _BYTES_PER_SECOND = 1 << 20, 500e6
# The same while values come this many seconds after their notices: fewer bytes, and further ones
# for the pushes of so many seconds at the rate of late.
_LEAST_DELAY, _UNMERGED_BYTES, _UNMERGED_SECONDS = 0.05, 512 << 10, 0.04
# Bounds of the wait for an answer in seconds, and its length in longest intervals of two answers.
_LEAST_WAIT, _LONGEST_WAIT, _INTERVALS = 0.02, 0.25, 2
# Part of the longest interval that is kept with each answer, so that an old one is forgotten.
_KEPT = 0.95
# Part of the bytes, seconds and delays of earlier answers that is kept with each answer.
_RECENT = 0.9


class PushQueue:
    """Pushes to one server that are still to be sent, in the order in which backward made them.

    All workers have the same order, so keys are merged one after the other, and values go out while
    pushes come in. The order of first use in forward would differ between workers: each could only
    choose among the gradients that it has by then.
    """

    def __init__(self) -> None:
        # Heap of (order, key, number), and the entries by key and number.
        self._places: list[tuple[int, int, int]] = []
        self._entries: dict[tuple[int, int], LogEntry] = {}

    def __bool__(self) -> bool:
        return bool(self._places)

    def add(self, entry: LogEntry) -> None:
        """Add an entry, which may replace that of a predecessor."""
        if (entry.key, entry.number) not in self._entries:
            heapq.heappush(self._places, (entry.order, entry.key, entry.number))
        self._entries[entry.key, entry.number] = entry

    @property
    def first(self) -> LogEntry:
        """The next entry to be sent."""
        return self._entries[self._places[0][1:]]

    def pop(self) -> list[LogEntry]:
        """Remove and return the next entries, of different keys, which go out in one message."""
        room, chosen = MessageRoom(), dict[int, LogEntry]()
        while self._places and self.first.key not in chosen:
            if not room.take(len(self.first.payload), len(self.first.details)):
                break
            entry = self._entries.pop(heapq.heappop(self._places)[1:])
            chosen[entry.key] = entry
        return list(chosen.values())


class PushWindow:
    """Window of pushes to one server.

    Args:
        is_synchronous: True if answers need the pushes of all workers. Otherwise ZeroMQ's memory is
            the only bound.
        lead: Pushes to all servers.
        server: Index of the server.
        wake: Ends the wait of the thread that sends these pushes.
    """

    def __init__(
        self, *, is_synchronous: bool, lead: PushLead, server: int, wake: Callable[[], None]
    ) -> None:
        self._is_synchronous = is_synchronous
        self._lead, self._server, self._wake = lead, server, wake
        self._in_flight: deque[tuple[zmq.MessageTracker, int]] = deque()
        self._in_flight_bytes = 0
        # By key: bytes of pushes without an answer.
        self._unanswered: dict[int, int] = {}
        self._unanswered_bytes = 0
        # By key: clock at the notice, until the value comes.
        self._noticed: dict[int, float] = {}
        # Seconds from notices to values of late; 0 without notices.
        self._delay = 0.0
        # Bytes of answered pushes, and the time that they took; older ones count less.
        self._recent_bytes = self._recent_seconds = 0.0
        # Clock at the last answer, or at the first push after all were answered.
        self._last = 0.0
        self._interval = _LONGEST_WAIT / _INTERVALS
        self._round_trip = float("inf")

    def note_round_trip(self, seconds: float) -> None:
        """Note the time from a request to its answer."""
        self._round_trip = min(self._round_trip, seconds)

    def collect(self) -> bool:
        """Forget the pushes that ZeroMQ has handed on; return True if there were any."""
        has_moved = False
        while self._in_flight and self._in_flight[0][0].done:
            self._in_flight_bytes -= self._in_flight.popleft()[1]
            has_moved = True
        return has_moved

    def sent(
        self, entry: LogEntry, tracker: zmq.MessageTracker, now: float, *, is_awaited: bool
    ) -> None:
        """Note a push; `is_awaited` says that an answer will come."""
        key, nbytes = entry.key, len(entry.payload)
        self._in_flight.append((tracker, nbytes))
        self._in_flight_bytes += nbytes
        if not (is_awaited and self._is_synchronous):
            return
        if not self._unanswered:
            self._last = now
        self._unanswered_bytes += nbytes - self._unanswered.get(key, 0)
        self._unanswered[key] = nbytes
        self._lead.sent(self._server, key, entry.position)

    def answered(self, key: int, now: float) -> None:
        """Note that a key's value has arrived, or that it was merged."""
        delay = now - self._noticed.pop(key, now)
        self._delay = _RECENT * self._delay + (1 - _RECENT) * delay
        self._take_answer(key, now)

    def merged(self, key: int, now: float) -> None:
        """Note that a notice has come: the key's latest pushes of all workers are merged."""
        if key in self._unanswered:
            self._noticed[key] = now
        self._take_answer(key, now)

    def _take_answer(self, key: int, now: float) -> None:
        nbytes = self._unanswered.pop(key, 0)
        self._lead.answered(self._server, key, now)
        if nbytes:
            self._recent_bytes = _RECENT * self._recent_bytes + nbytes
            self._recent_seconds = _RECENT * self._recent_seconds + now - self._last
            self._unanswered_bytes -= nbytes
            # Answers come in bursts, so a mean would be too short.
            self._interval = max(_KEPT * self._interval, min(now - self._last, _LONGEST_WAIT))
            self._last = now

    def is_full(self, now: float, position: int) -> bool:
        """Return True if no push at a position may be sent now."""
        return self._in_flight_bytes >= _IN_FLIGHT_BYTES or self.wait(now, position) > 0

    def wait(self, now: float, position: int) -> float:
        """Return the seconds for which the push at a position waits for an answer at most; 0 if it
        does not."""
        room, last = _UNANSWERED_BYTES + self._round_trip * _BYTES_PER_SECOND, self._last
        is_far = False
        if self._delay >= _LEAST_DELAY:
            rate = self._recent_bytes / max(self._recent_seconds, 1e-9)
            room = min(room, _UNMERGED_BYTES + (self._round_trip + _UNMERGED_SECONDS) * rate)
            is_far = self._lead.is_far(self._server, position, self._wake)
        if is_far:
            last = max(last, self._lead.last)
        elif self._unanswered_bytes < room:
            return 0.0
        longest = min(max(_INTERVALS * self._interval, _LEAST_WAIT), _LONGEST_WAIT)
        return max(last + longest - now, 0.0)
