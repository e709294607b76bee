"""Ends of a mailbox's channels: a thread that sends to one rank, and one that receives from it."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_dlres.core.errors import PeerError, PeerLostError
from lightning_dlres.core.trace import Tracer
from lightning_dlres.core.wire import payload
from lightning_dlres.core.wire.tree import Tree

# `mailbox` explains both types, and exports them.
Key = tuple[str | int, ...]
Item = tuple[Key, Tree] | BaseException

# Timeout of gloo's transfers, and of groups for messages. The mailbox has a shorter one, and its
# error names the rank that did not answer; gloo's error would name none.
LONGER_THAN_ANY_RUN = timedelta(days=365)
# Largest total size of the messages that a sender holds in memory because gloo may still read them.
# Small beside a stage's activations.
_UNFINISHED_BYTES = 256 << 10
# The same on a channel of unpadded frames. Enough for the compressed gradients of most steps, so
# that their messages need not wake the sender's thread.
_UNFINISHED_UNPADDED_BYTES = 2 << 20


@dataclass(frozen=True, kw_only=True)
class ChannelLink:
    """A channel between this rank and another one.

    Attributes:
        group: Gloo process group.
        rank: The other rank.
        name: The other rank's name in errors.
        channel: Name of the channel.
        tag: Tag of the channel's transfers.
        buffer_bytes: Size in bytes of the receiver's buffer, if the sender's frames are as short as
            their messages. 0 if messages are padded to the frame size that both ends derive from
            the message before; see `payload`.
        tracer: Records a span for every message.
    """

    group: dist.ProcessGroup
    rank: int
    name: str
    channel: str
    tag: int
    buffer_bytes: int
    tracer: Tracer

    @property
    def is_padded(self) -> bool:
        """True if a message is padded to the size of the frame that the receiver expects."""
        return not self.buffer_bytes

    def span(self, verb: str, **args: str | int) -> AbstractContextManager[None]:
        """Context manager that records the span of a message; `verb` is "send" or "receive"."""
        return self.tracer.span(
            f"{verb} {self.channel.lower()}", "transfer", peer=self.rank, **args
        )


@dataclass(frozen=True)
class _Message:
    key: Key
    header: bytes
    large: list[Tensor]


class ChannelSender:
    """Sends messages to one rank on one channel, in order.

    The calling thread sends small messages itself: gloo's `send` does not block, and waking a
    thread takes longer than sending. The sender's own thread sends all others.

    Torch cannot tell if a send is complete; it can only wait for it. So the sender holds the
    tensors that calling threads have sent, up to `_UNFINISHED_BYTES`. A message beyond that limit
    goes to the sender's thread, which first waits for all earlier sends.

    Args:
        link: The channel to the rank.

    Attributes:
        thread: Thread of the sender; it ends after `finish`, or with the first error.
    """

    def __init__(self, link: ChannelLink) -> None:
        self._link = link
        self._queue: queue.SimpleQueue[_Message | None] = queue.SimpleQueue()
        # The lock guards `_queued` and `_has_ended`. `_queued` counts the messages in the queue and
        # in the thread. While it is not zero, only the thread uses `_frame_bytes` and
        # `_unfinished*`. Otherwise only callers do, under the lock. After `finish` no caller does,
        # so the thread may send the goodbye.
        self._lock = threading.Lock()
        self._queued = 0
        self._has_ended = False
        self._frame_bytes = link.buffer_bytes or payload.FIRST_FRAME_BYTES
        self._unfinished_limit = _UNFINISHED_BYTES if link.is_padded else _UNFINISHED_UNPADDED_BYTES
        self._unfinished: list[tuple[dist.Work, Tensor]] = []
        self._unfinished_bytes = 0
        self._failure: BaseException | None = None
        self.thread = threading.Thread(
            target=self._run, name=f"send-{link.channel}-{link.rank}", daemon=True
        )
        self.thread.start()

    def put(self, key: Key, header: bytes, large: list[Tensor]) -> None:
        """Send a message, or queue it behind earlier ones; after `finish`, drop it.

        For the arguments see `SendingEnd`.

        Raises:
            PeerLostError: If an earlier send failed.
        """
        if self._failure is not None:
            raise PeerLostError(
                f"{self._link.name} cannot be reached: {self._failure}"
            ) from self._failure
        message = _Message(key, header, large)
        with self._lock:
            if self._has_ended:
                # The receiver ends at the goodbye, so this send would never complete. For example,
                # a report on a message of the last step may come so late.
                return
            if not self._queued and self._can_send_now(message):
                # A failure is raised by the next `put`, as if the thread had sent the message.
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
        if self._unfinished_bytes + self._frame_bytes > self._unfinished_limit:
            return False
        return payload.fits_frame(message.header, message.large, self._frame_bytes)

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
            header, large, self._frame_bytes, is_padded=self._link.is_padded
        )
        if self._link.is_padded:
            self._frame_bytes = next_frame_bytes
        for transfer in transfers:
            work = self._link.group.send([transfer], self._link.rank, self._link.tag)
            self._unfinished.append((work, transfer))
            self._unfinished_bytes += transfer.numel()

    def _wait_sent(self) -> None:
        """Wait until all transfers are complete, and free their memory."""
        for work, _ in self._unfinished:
            work.wait(LONGER_THAN_ANY_RUN)
        self._unfinished.clear()
        self._unfinished_bytes = 0


class ChannelReceiver:
    """Receives messages from one rank on one channel, in order, in a thread of its own.

    Args:
        link: The channel from the rank.
        handle: Called from the thread with each item; None collects them in `items`.

    Attributes:
        items: Messages that have arrived, and the error that ended the connection, if any.
        thread: Thread of the receiver; it ends when the peer says goodbye, or with an error.
    """

    def __init__(self, link: ChannelLink, handle: Callable[[Item], None] | None = None) -> None:
        self._link = link
        self._frame_bytes = payload.FIRST_FRAME_BYTES
        # Buffer of all unpadded frames, and the read into it that has been started.
        self._buffer = torch.empty(link.buffer_bytes, dtype=torch.uint8)
        self._started_read: dist.Work | None = None
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
            # Any error: `Mailbox.receive` must raise it instead of waiting for an ended thread.
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
            if self._link.is_padded:
                self._frame_bytes = payload.next_frame_bytes(packed_bytes)
            header = payload.decode_frame_header(packed, header_bytes, self._link.name)
            large = payload.unpack_tensors(packed, packed_bytes, header_bytes, header) or [
                self._read(torch.empty(length, dtype=torch.uint8))
                for length in payload.large_sizes(header)
            ]
            tree = payload.decode(header, large)
        if not self._link.is_padded:
            # The tensors are copies, so the buffer is free. With a read already started, gloo sends
            # the next message without asking for a buffer first, while this one is handled.
            self._started_read = self._start_read(self._buffer)
        return header.key, tree

    def _read_frame(self) -> Tensor:
        """Return the next frame."""
        if self._link.is_padded:
            return self._read(torch.empty(self._frame_bytes, dtype=torch.uint8))
        if self._started_read is None:
            return self._read(self._buffer)
        self._started_read.wait(LONGER_THAN_ANY_RUN)
        self._started_read = None
        return self._buffer

    def _read(self, buffer: Tensor) -> Tensor:
        self._start_read(buffer).wait(LONGER_THAN_ANY_RUN)
        return buffer

    def _start_read(self, buffer: Tensor) -> dist.Work:
        return self._link.group.recv([buffer], self._link.rank, self._link.tag)
