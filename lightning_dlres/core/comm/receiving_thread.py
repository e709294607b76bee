"""Thread that receives the messages of all ranks for a mailbox over ZeroMQ.

A message has a small frame and, if it has large tensors, a frame with their bytes. The small one
begins with the channel and a number, which counts the messages to a rank. A missing number reveals
messages that were lost with a broken connection. The header of a payload follows.
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

# Start of a message: its channel, and its number among the messages to this rank.
PREFIX = struct.Struct("<QQ")
_CHANNELS = {int(channel): channel.name.lower() for channel in Channel}
# Longest wait for a message, in seconds.
_WAIT_SECONDS = 1.0


class Control(IntEnum):
    """Number of a message without content, in the place of a channel's."""

    HELLO = 0
    GOODBYE = 1


class SocketReceiver:
    """End of a channel that receives from one rank.

    Args:
        handle: Called with each item; None collects them in `items`.
    """

    def __init__(self, handle: Callable[[Item], None] | None = None) -> None:
        self.items: queue.SimpleQueue[Item] = queue.SimpleQueue()
        self.handle = handle or self.items.put


@dataclass
class _Source:
    """Another rank, as the receiving thread knows it.

    Attributes:
        next: Number of the next message.
        has_ended: True after a goodbye or a failure.
        receivers: Ends of the channels that this rank has asked for.
        early: Messages on other channels, in order.
    """

    next: int = 0
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
        all_heard: Set once all ranks are connected.
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
        # How `end` was called; None before.
        self._is_orderly: bool | None = None
        self._thread = threading.Thread(target=self._run, name="receive-sockets", daemon=True)
        self._thread.start()

    def unheard(self) -> list[int]:
        """Return the ranks that are not connected."""
        return sorted(self._unheard)

    def add(self, source: int, channel: int, receiver: SocketReceiver) -> None:
        """Give the messages on a channel to a receiver."""
        self._added.put((source, channel, receiver))
        with self._lock:
            if self._has_failed:
                self._take_receivers()
                return
        self._sockets.interrupt()

    def end(self, orderly: bool) -> threading.Thread:
        """End the thread, if `orderly` when all ranks have said goodbye; return the thread."""
        self._is_orderly = orderly
        self._sockets.interrupt()
        return self._thread

    def _run(self) -> None:
        try:
            while not self._is_finished():
                self._take_receivers()
                message = self._sockets.next_message(_WAIT_SECONDS)
                if message is not None:
                    self._take(*message)
                    # Free the message. Otherwise it stays in memory until the next one comes.
                    del message
                    continue
                for rank in self._sockets.closed_ranks():
                    self._fail(rank, PeerLostError("the connection was closed by the peer"))
        except Exception as error:
            # Any error: `receive` must raise it, and not wait for a thread that has ended.
            for rank in self._sources:
                self._fail(rank, error)
            with self._lock:
                self._has_failed = True
                self._take_receivers()

    def _is_finished(self) -> bool:
        if self._is_orderly is None:
            return False
        return not self._is_orderly or all(one.has_ended for one in self._sources.values())

    def _take_receivers(self) -> None:
        while not self._added.empty():
            rank, channel, receiver = self._added.get()
            source, failure = self._sources[rank], self.failures.get(rank)
            source.receivers[channel] = receiver
            for frames in source.early.pop(channel, []):
                self._deliver(rank, channel, receiver, frames)
            # A new failure, by one of these messages, was handed to all receivers.
            if failure is not None:
                receiver.handle(failure)

    def _take(self, rank: int, frames: list[zmq.Frame]) -> None:
        source = self._sources[rank]
        if source.has_ended:
            return
        start = frames[0].bytes[: PREFIX.size] if frames else b""
        if len(start) < PREFIX.size:
            self._fail(rank, self._malformed(rank, "a message without its prefix"))
            return
        channel, number = PREFIX.unpack(start)
        if number != source.next:
            text = f"message {number} in the place of {source.next}"
            self._fail(rank, self._malformed(rank, text))
            return
        source.next += 1
        if channel == Control.HELLO:
            self._unheard.discard(rank)
            if not self._unheard:
                self.all_heard.set()
        elif channel == Control.GOODBYE:
            source.has_ended = True
        elif channel not in _CHANNELS:
            self._fail(rank, self._malformed(rank, f"a message on the unknown channel {channel}"))
        elif channel in source.receivers:
            self._deliver(rank, channel, source.receivers[channel], frames)
        else:
            source.early[channel].append(frames)

    def _deliver(
        self, rank: int, channel: int, receiver: SocketReceiver, frames: list[zmq.Frame]
    ) -> None:
        try:
            with self._tracer.span(f"receive {_CHANNELS[channel]}", "transfer", peer=rank):
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
            raise self._malformed(rank, f"{len(data)} bytes where the header says {sum(sizes)}")
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
        """End the connection to a rank with an error, unless it has ended."""
        source = self._sources[rank]
        if source.has_ended:
            return
        source.has_ended = True
        self.failures[rank] = error
        for receiver in source.receivers.values():
            receiver.handle(error)
