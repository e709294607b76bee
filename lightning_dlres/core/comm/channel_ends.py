"""Ends of a mailbox's channels: a thread that sends to one rank, and one that receives from it."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_dlres.core.errors import PeerError, PeerLostError
from lightning_dlres.core.trace import Tracer
from lightning_dlres.core.wire import payload
from lightning_dlres.core.wire.tree import Tree

Key = tuple[str | int, ...]
Item = tuple[Key, Tree] | BaseException

# Most bytes that a sender keeps in memory of messages whose sends may be unfinished. Small beside
# a stage's activations.
_UNFINISHED_BYTES = 256 << 10
# The same for short frames: as many gradients as a step has, so that no thread wakes up for them.
_UNFINISHED_SHORT_FRAMES = 2 << 20


@dataclass(frozen=True, kw_only=True)
class ChannelLink:
    """A channel between this rank and another one.

    Attributes:
        group: Gloo process group.
        rank: The other rank.
        name: The other rank's name in errors.
        channel: Name of the channel.
        tag: Tag of the channel's transfers.
        short_frame: Bytes of the receiver's frames if the sender's frames are as short as their
            messages; 0 for frames of one size on both sides.
        tracer: Records a span for every message.
    """

    group: dist.ProcessGroup
    rank: int
    name: str
    channel: str
    tag: int
    short_frame: int
    tracer: Tracer

    def span(self, verb: str, **args: str | int) -> AbstractContextManager[None]:
        """Context manager that records a message that is sent or received."""
        return self.tracer.span(
            f"{verb} {self.channel.lower()}", "transfer", peer=self.rank, **args
        )


@dataclass(frozen=True)
class _Message:
    key: Key
    header: bytes
    large: list[Tensor]


class ChannelSender:
    """The messages to one rank on one channel, sent in order.

    Small messages are sent by the calling thread: gloo's `send` does not block, and waking a thread
    takes longer than sending. All others are sent by a thread of the outbox.

    Torch cannot tell if a send is complete; it can only wait for it. So the tensors that the
    calling thread has sent are kept in memory, up to `_UNFINISHED_BYTES`. The next message then
    goes to the thread, which waits for all sends.

    Args:
        link: The channel to the rank.
    """

    def __init__(self, link: ChannelLink) -> None:
        self._link = link
        self._queue: queue.SimpleQueue[_Message | None] = queue.SimpleQueue()
        # The lock guards `_queued`, the number of messages handed to the thread. While it is not
        # zero, only the thread uses `_frame_bytes` and `_unfinished*`; else only the caller does.
        self._lock = threading.Lock()
        self._queued = 0
        self._has_ended = False
        self._frame_bytes = link.short_frame or payload.FIRST_FRAME_BYTES
        self._room = _UNFINISHED_SHORT_FRAMES if link.short_frame else _UNFINISHED_BYTES
        self._unfinished: list[tuple[dist.Work, Tensor]] = []
        self._unfinished_bytes = 0
        self._failure: BaseException | None = None
        self.thread = threading.Thread(
            target=self._run, name=f"send-{link.channel}-{link.rank}", daemon=True
        )
        self.thread.start()

    def put(self, key: Key, header: bytes, large: list[Tensor]) -> None:
        """Send a message, or queue it behind earlier ones."""
        if self._failure is not None:
            raise PeerLostError(
                f"{self._link.name} cannot be reached: {self._failure}"
            ) from self._failure
        message = _Message(key, header, large)
        with self._lock:
            if self._has_ended:
                # The receiver ends at the goodbye, so this would wait for it for ever. Such is a
                # report on a message of the last step.
                return
            if not self._queued and self._can_send_now(message):
                # The next `put` raises a failure, as it does for sends of the thread.
                with self._recording_failure(), self._link.span("send", key=str(message.key)):
                    self._write(message.header, message.large)
                return
            self._queued += 1
            self._queue.put(message)

    def finish(self) -> None:
        """Send a goodbye after all messages, and end the thread; drop later messages."""
        with self._lock:
            self._has_ended = True
        self._queue.put(None)

    def _can_send_now(self, message: _Message) -> bool:
        has_room = self._unfinished_bytes + self._frame_bytes <= self._room
        return has_room and payload.fits_frame(message.header, message.large, self._frame_bytes)

    def _run(self) -> None:
        with self._recording_failure():
            while (message := self._queue.get()) is not None:
                self._wait_sent()
                with self._link.span("send", key=str(message.key)):
                    self._write(message.header, message.large)
                    self._wait_sent()
                # Free the message. Otherwise it stays in memory until the next one comes.
                del message
                with self._lock:
                    self._queued -= 1
            self._wait_sent()
            self._write(b"", [])
            self._wait_sent()

    @contextmanager
    def _recording_failure(self) -> Iterator[None]:
        """Context manager that saves an error, which the next `put` raises."""
        try:
            yield
        except (RuntimeError, ValueError, PeerError) as error:
            self._failure = error

    def _write(self, header: bytes, large: list[Tensor]) -> None:
        """Start the transfers of a message."""
        transfers, next_frame_bytes = payload.pack(
            header, large, self._frame_bytes, is_padded=not self._link.short_frame
        )
        if not self._link.short_frame:
            self._frame_bytes = next_frame_bytes
        for transfer in transfers:
            work = self._link.group.send([transfer], self._link.rank, self._link.tag)
            self._unfinished.append((work, transfer))
            self._unfinished_bytes += transfer.numel()

    def _wait_sent(self) -> None:
        """Wait until all transfers have left."""
        for work, _ in self._unfinished:
            work.wait()
        self._unfinished.clear()
        self._unfinished_bytes = 0


class ChannelReceiver:
    """The messages from one rank on one channel, received in order by a thread.

    The thread ends when the peer says goodbye or the connection breaks.

    Args:
        link: The channel from the rank.
        handle: Called with each item; None collects them in `items`.
    """

    def __init__(self, link: ChannelLink, handle: Callable[[Item], None] | None = None) -> None:
        self._link = link
        self._frame_bytes = payload.FIRST_FRAME_BYTES
        # Buffer of all short frames, and the transfer into it that has been started.
        self._frame = torch.empty(link.short_frame, dtype=torch.uint8)
        self._started: dist.Work | None = None
        self.items: queue.SimpleQueue[Item] = queue.SimpleQueue()
        self._handle = handle or self.items.put
        self.thread = threading.Thread(
            target=self._run, name=f"receive-{link.channel}-{link.rank}", daemon=True
        )
        self.thread.start()

    def _run(self) -> None:
        try:
            while (message := self._receive()) is not None:
                self._handle(message)
                # Free the message. Otherwise it stays in memory until the next one comes, even if
                # `receive` has returned it and its reader is done.
                del message
        except Exception as error:
            # Any error: `receive` must raise it, and not wait for a thread that has ended.
            self._handle(error)

    def _receive(self) -> tuple[Key, Tree] | None:
        """Return the next message; None for a goodbye."""
        packed = self._read_frame()
        packed_bytes, header_bytes = payload.read_prefix(packed)
        if not header_bytes:
            return None
        with self._link.span("receive"):
            if packed_bytes > packed.numel():
                first, packed = packed, torch.empty(packed_bytes, dtype=torch.uint8)
                packed[: len(first)] = first
                self._read(packed[len(first) :])
            if not self._link.short_frame:
                self._frame_bytes = payload.next_frame_bytes(packed_bytes)
            header = payload.decode_frame_header(packed, header_bytes, self._link.name)
            large = payload.unpack_tensors(packed, packed_bytes, header_bytes, header) or [
                self._read(torch.empty(length, dtype=torch.uint8))
                for length in payload.large_sizes(header)
            ]
            tree = payload.decode(header, large)
        if self._link.short_frame:
            # The tensors are copies, so the buffer is free. The next message leaves its sender
            # without a request while this one is handled.
            self._started = self._start_read(self._frame)
        return header.key, tree

    def _read_frame(self) -> Tensor:
        """Return the next frame."""
        if self._started is not None:
            self._started.wait()
            self._started = None
            return self._frame
        if self._link.short_frame:
            return self._read(self._frame)
        return self._read(torch.empty(self._frame_bytes, dtype=torch.uint8))

    def _read(self, buffer: Tensor) -> Tensor:
        self._start_read(buffer).wait()
        return buffer

    def _start_read(self, buffer: Tensor) -> dist.Work:
        return self._link.group.recv([buffer], self._link.rank, self._link.tag)
