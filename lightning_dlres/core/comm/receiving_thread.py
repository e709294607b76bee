"""Thread that receives the messages of all ranks for a mailbox over ZeroMQ.

A message has a small frame and, if it has large tensors, a second frame with their bytes. The small
frame holds a prefix and the header of a payload. The prefix is the channel, and a sequence number
that counts the messages from one rank to another. A gap in the numbers reveals messages that were
lost with a broken connection.
"""

from __future__ import annotations

import queue
import struct
import threading
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import IntEnum

import numpy as np
import torch
import zmq

from lightning_dlres.core.comm.mailbox import Channel, Item
from lightning_dlres.core.comm.rank_sockets import RankSockets
from lightning_dlres.core.errors import PeerLostError, ProtocolError
from lightning_dlres.core.trace import Tracer
from lightning_dlres.core.wire import payload

# Start of a message: its channel (or a `Control`), and its sequence number.
PREFIX = struct.Struct("<QQ")
_CHANNEL_NAMES = {int(channel): channel.name.lower() for channel in Channel}
# Longest wait for a message, in seconds. `add` and `end` interrupt the wait.
_WAIT_SECONDS = 1.0


class Control(IntEnum):
    """Kind of a message that has only a prefix, with this number instead of a channel's.

    HELLO is the first message to each rank, and GOODBYE the last one.
    """

    HELLO = 0
    GOODBYE = 1


class SocketReceiver:
    """End of a channel that receives from one rank.

    Args:
        handle: Called with each item; None collects them in `items`.

    Attributes:
        items: Messages that have arrived, and the error that ended the connection, if any.
        handle: Function that gets each item.
    """

    def __init__(self, handle: Callable[[Item], None] | None = None) -> None:
        self.items: queue.SimpleQueue[Item] = queue.SimpleQueue()
        self.handle = handle or self.items.put


@dataclass
class _Source:
    """Another rank, as the receiving thread knows it.

    Attributes:
        next_sequence: Sequence number of its next message.
        has_ended: True after a goodbye or a failure.
        receivers: Receiver of each channel that has one.
        early: Frames of the messages on each other channel, in order.
    """

    next_sequence: int = 0
    has_ended: bool = False
    receivers: dict[int, SocketReceiver] = field(default_factory=dict)
    early: dict[int, list[list[zmq.Frame]]] = field(default_factory=lambda: defaultdict(list))


class ReceivingThread:
    """Thread that receives the messages of all ranks.

    Args:
        sockets: Sockets of this rank.
        names: Names of all ranks.
        others: The other ranks.
        tracer: Records a span for every message.

    Attributes:
        all_heard: Event that is set once the HELLO of every other rank has arrived.
        failures: Errors that ended the connections to ranks, by rank.
    """

    def __init__(
        self, sockets: RankSockets, names: list[str], others: list[int], tracer: Tracer
    ) -> None:
        self._sockets, self._names, self._tracer = sockets, names, tracer
        self.all_heard = threading.Event()
        self.failures: dict[int, BaseException] = {}
        self._unheard = set(others)
        if not others:
            self.all_heard.set()
        # Only the thread uses the sources. It takes new receivers from the queue. After an error
        # has ended the thread, `add` does both, under the lock.
        self._sources = {rank: _Source() for rank in others}
        self._added: queue.SimpleQueue[tuple[int, int, SocketReceiver]] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._has_failed = False
        # Argument of `end`; None before.
        self._is_orderly: bool | None = None
        self._thread = threading.Thread(target=self._run, name="receive-sockets", daemon=True)
        self._thread.start()

    def unheard(self) -> list[int]:
        """Return the ranks whose HELLO has not arrived."""
        return sorted(self._unheard)

    def add(self, source: int, channel: int, receiver: SocketReceiver) -> None:
        """Give the messages on a channel to a receiver, also those that have arrived already."""
        self._added.put((source, channel, receiver))
        with self._lock:
            if self._has_failed:
                self._take_receivers()
                return
        self._sockets.interrupt()

    def end(self, orderly: bool) -> threading.Thread:
        """Tell the thread to end, and return it without waiting for its end.

        Args:
            orderly: True lets it end when all ranks have said goodbye, and False at once.
        """
        self._is_orderly = orderly
        self._sockets.interrupt()
        return self._thread

    def _run(self) -> None:
        try:
            while not self._is_finished():
                self._take_receivers()
                message = self._sockets.next_message(_WAIT_SECONDS)
                if message is not None:
                    self._handle(*message)
                    # Free the message. Otherwise it stays in memory until the next one comes.
                    del message
                    continue
                for rank in self._sockets.closed_ranks():
                    self._fail(rank, PeerLostError("the connection was closed by the peer"))
        except Exception as error:
            # Any error: `Mailbox.receive` must raise it instead of waiting for an ended thread.
            for rank in self._sources:
                self._fail(rank, error)
            with self._lock:
                self._has_failed = True
                self._take_receivers()

    def _is_finished(self) -> bool:
        if self._is_orderly is None:
            return False
        return not self._is_orderly or all(source.has_ended for source in self._sources.values())

    def _take_receivers(self) -> None:
        while not self._added.empty():
            rank, channel, receiver = self._added.get()
            source, failure = self._sources[rank], self.failures.get(rank)
            source.receivers[channel] = receiver
            for frames in source.early.pop(channel, []):
                self._deliver(rank, channel, receiver, frames)
            # `failure` is from before these messages. If one of them is broken, `_deliver` has
            # already given the new failure to the receiver.
            if failure is not None:
                receiver.handle(failure)

    def _handle(self, rank: int, frames: list[zmq.Frame]) -> None:
        source = self._sources[rank]
        if source.has_ended:
            return
        start = frames[0].bytes[: PREFIX.size] if frames else b""
        if len(start) < PREFIX.size:
            self._fail(rank, self._malformed(rank, "a message without its prefix"))
            return
        channel, sequence = PREFIX.unpack(start)
        if sequence != source.next_sequence:
            text = f"message {sequence}, expected message {source.next_sequence}"
            lost = (
                "A broken connection may have lost messages. Check the network between the hosts."
            )
            self._fail(rank, ProtocolError(f"{self._names[rank]} sent {text}. {lost}"))
            return
        source.next_sequence += 1
        if channel == Control.HELLO:
            self._unheard.discard(rank)
            if not self._unheard:
                self.all_heard.set()
        elif channel == Control.GOODBYE:
            source.has_ended = True
        elif channel not in _CHANNEL_NAMES:
            self._fail(rank, self._malformed(rank, f"a message on the unknown channel {channel}"))
        elif channel in source.receivers:
            self._deliver(rank, channel, source.receivers[channel], frames)
        else:
            source.early[channel].append(frames)

    def _deliver(
        self, rank: int, channel: int, receiver: SocketReceiver, frames: list[zmq.Frame]
    ) -> None:
        try:
            with self._tracer.span(f"receive {_CHANNEL_NAMES[channel]}", "transfer", peer=rank):
                item = self._decoded(rank, frames)
        except Exception as error:
            # Any error: the tree may be of classes that this process cannot build.
            if self._sources[rank].has_ended:
                # An early message from before the end. `_fail` would do nothing.
                receiver.handle(error)
            else:
                self._fail(rank, error)
            return
        receiver.handle(item)

    def _decoded(self, rank: int, frames: list[zmq.Frame]) -> Item:
        name = self._names[rank]
        header = payload.decode_header(frames[0].buffer[PREFIX.size :], name)
        sizes = payload.large_sizes(header)
        data = frames[1].buffer if len(frames) > 1 else memoryview(b"")
        if sum(sizes) != len(data):
            text = f"{len(data)} bytes of tensors, and a header that says {sum(sizes)}"
            raise self._malformed(rank, text)
        large, offset = [], 0
        for size in sizes:
            # A copy: ZeroMQ's memory is not aligned, and may be shared by several messages.
            piece = np.empty(size, np.uint8)
            piece[:] = np.frombuffer(data, np.uint8, size, offset)
            large.append(torch.from_numpy(piece))
            offset += size
        return header.key, payload.decode(header, large)

    def _malformed(self, rank: int, got: str) -> ProtocolError:
        return ProtocolError(
            f"{self._names[rank]} sent {got}. Check that all ranks run the same version."
        )

    def _fail(self, rank: int, error: BaseException) -> None:
        """Ignore further messages of a rank, and give the error to its receivers.

        It does nothing after a goodbye or an earlier failure.
        """
        source = self._sources[rank]
        if source.has_ended:
            return
        source.has_ended = True
        self.failures[rank] = error
        for receiver in source.receivers.values():
            receiver.handle(error)
