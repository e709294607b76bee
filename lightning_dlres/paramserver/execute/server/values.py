"""Queue of the values that a server sends to each worker, earliest needed first.

Only a few messages are handed to ZeroMQ at a time. The others wait as indices of keys, so a worker
that reads slowly costs no memory, and a value is as new as possible when it is sent.
"""

from __future__ import annotations

import heapq
from collections import deque
from dataclasses import dataclass, field

import msgspec
import numpy as np
import zmq
from numpy.typing import NDArray

from lightning_dlres.core.errors import PeerError
from lightning_dlres.core.wire.server import Server
from lightning_dlres.paramserver import protocol
from lightning_dlres.paramserver.execute.riders import MessageRoom, rider
from lightning_dlres.paramserver.execute.sending_waits import SendingWait
from lightning_dlres.paramserver.execute.server.key_state import KeyState
from lightning_dlres.paramserver.execute.server.shard import Shard

# Bytes that ZeroMQ holds for one worker at a time.
_IN_FLIGHT_BYTES = 2 << 20
# Bytes of a reply in a message's details.
_REPLY_BYTES = 64


@dataclass(frozen=True)
class _Sent:
    """Value that was handed to ZeroMQ."""

    tracker: zmq.MessageTracker
    key: int
    number: int
    nbytes: int


@dataclass
class _Queue:
    """Values for one worker.

    Attributes:
        keys: Heap of the indices of keys whose values wait. Smaller ones are needed earlier.
        numbers: Number that the worker has asked for, by these keys.
        in_flight: Values that ZeroMQ may still hold, in the order of sending.
        nbytes: Bytes of `in_flight`.
    """

    keys: list[int] = field(default_factory=list)
    numbers: dict[int, int] = field(default_factory=dict)
    in_flight: deque[_Sent] = field(default_factory=deque)
    nbytes: int = 0

    def is_sending(self, key: int, number: int) -> bool:
        """Return True if ZeroMQ still sends a value that is as new as a number."""
        return any(
            sent.key == key and sent.number >= number and not sent.tracker.done
            for sent in self.in_flight
        )


class ValueQueue:
    """Sender of values; only for the server's thread.

    Args:
        server: The server's socket.
        shard: Keys of the server.

    Attributes:
        wait: Time until the next `advance`, if values wait to be sent.
    """

    def __init__(self, server: Server, shard: Shard) -> None:
        self._server, self._shard = server, shard
        self.wait = SendingWait()
        self._queues = [_Queue() for _ in shard.members.by_index]

    @property
    def is_empty(self) -> bool:
        """True if no value waits to be sent."""
        return not any(queue.keys for queue in self._queues)

    def add(self, worker: int, key: int, number: int) -> None:
        """Add a value; it is sent once, however often it is added before it has left.

        A worker behind a slow link asks again for a value that is on its way.
        """
        queue = self._queues[worker]
        if queue.is_sending(key, number):
            return
        if key not in queue.numbers:
            heapq.heappush(queue.keys, key)
        queue.numbers[key] = number

    def forget(self, worker: int) -> None:
        """Discard what waits for a worker, since its process was replaced."""
        self._queues[worker] = _Queue()

    def advance(self) -> None:
        """Send values, as many as may be in flight."""
        has_moved = False
        for worker, queue in enumerate(self._queues):
            while queue.in_flight and queue.in_flight[0].tracker.done:
                queue.nbytes -= queue.in_flight.popleft().nbytes
                has_moved = True
            while queue.keys and queue.nbytes < _IN_FLIGHT_BYTES:
                has_moved = True
                if not self._send(worker, queue, self._next(queue)):
                    self.forget(worker)
                    break
        self.wait.note(has_moved=has_moved)

    def _next(self, queue: _Queue) -> list[tuple[KeyState, int]]:
        """Remove and return the keys of the next message, the largest one first, with the numbers
        that the worker has asked for."""
        room, chosen = MessageRoom(), []
        while queue.keys and room.take(self._shard.states[queue.keys[0]].key.nbytes, _REPLY_BYTES):
            key = heapq.heappop(queue.keys)
            chosen.append((self._shard.states[key], queue.numbers.pop(key)))
        return sorted(chosen, key=lambda one: one[0].key.nbytes, reverse=True)

    def _send(self, worker: int, queue: _Queue, chosen: list[tuple[KeyState, int]]) -> bool:
        """Send the values of keys; return False if the worker is not connected."""
        member, (state, number) = self._shard.members.by_index[worker], chosen[0]
        reply, payload = self._value(worker, state, number)
        small = [self._value(worker, *state_and_number) for state_and_number in chosen[1:]]
        riders = [rider(msgspec.msgpack.encode(part), value.data) for part, value in small]
        is_latest = reply.number == state.applied[worker]
        try:
            tracker = self._server.send_tracked(
                member.peer,
                protocol.VALUE,
                payload.data,
                sequence=0,
                details=msgspec.msgpack.encode(msgspec.structs.replace(reply, riders=riders)),
                payload_checksum=state.checksum() if is_latest else None,
            )
        except PeerError:
            # The worker asks again when it is back, or when it reads again.
            return False
        if is_latest:
            state.note_sent(tracker)
        for part, value in [(reply, payload), *small]:
            queue.in_flight.append(_Sent(tracker, part.key, part.number, value.nbytes))
            queue.nbytes += value.nbytes
            member.pulled_bytes += value.nbytes
        return True

    def _value(
        self, worker: int, state: KeyState, number: int
    ) -> tuple[protocol.KeyReply, NDArray[np.uint8]]:
        """Return the reply and the value of a key for a worker that has asked for a number."""
        latest = state.applied[worker]
        is_previous = number == latest - 1 and state.has_previous
        reply = protocol.KeyReply(
            key=state.key.index,
            number=number if is_previous else latest,
            durable=self._shard.durable(state, worker),
            norm=0.0 if is_previous else state.applied_norm,
        )
        # The next push overwrites the previous value, so ZeroMQ gets a copy of it.
        return reply, state.previous().copy() if is_previous else state.payload()
