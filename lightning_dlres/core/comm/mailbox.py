"""Messages between two ranks: trees of tensors over torch.distributed, with a key and a deadline.

A send returns at once. A small message on the CPU leaves from the calling thread. A thread per
destination and channel sends all others: large ones, those on another device, and those behind
messages that have not left yet. A thread per source and channel receives. So activations and
gradients travel while the stage computes. Every message carries a key, and the receiver names the
key that it expects. Another key is an error, so data never reaches the wrong micro-batch.
"""

from __future__ import annotations

import queue
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from datetime import timedelta
from enum import IntEnum

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_dlres.core.comm.abandoned_threads import abandon
from lightning_dlres.core.errors import PeerError, PeerLostError, PeerTimeoutError, ProtocolError
from lightning_dlres.core.trace import Tracer
from lightning_dlres.core.wire import payload
from lightning_dlres.core.wire.tree import Tree

# Timeout of a mailbox's gloo group. The mailbox has a shorter one, and its error names the rank
# that did not answer; gloo's error would name none.
LONGER_THAN_ANY_RUN = timedelta(days=365)

# Identifies a message on its channel. The key of a micro-batch is (micro-batch, number of the
# pass).
Key = tuple[str | int, ...]
# A received message, or the error that ended the connection.
Item = tuple[Key, Tree] | BaseException

# Pause between two calls of `check` while waiting.
_POLL_SECONDS = 0.05
# Seconds that `close` waits for the threads to end after a failure.
_FAILED_CLOSE_SECONDS = 0.5
# Seconds of waiting after which the text given to `explaining` is printed.
_EXPLAIN_SECONDS = 5.0
# Seconds to wait, after a connection broke, for `check` to raise the reason.
_REASON_SECONDS = 1.0
# Most bytes that an outbox keeps in memory of messages whose sends may be unfinished. Small beside
# a stage's activations.
_UNFINISHED_BYTES = 256 << 10


class Channel(IntEnum):
    """Kind of a message. The number is the tag of the transfer."""

    BATCH = 11
    STEP = 12
    ACTIVATION = 13
    GRADIENT = 14
    OUTPUT = 15
    RECORD = 16
    STATE = 17
    OBJECT = 18
    PROBE = 19
    GRADIENT_SYNC = 20
    SYNC_REPORT = 21
    SYNC_PLAN = 22
    SYNC_PROBE = 23


# Channels whose frames keep their first size. Their messages have different sizes, and frames of
# the largest size would be filled with zeros that take time on a slow link.
_FIXED_FRAMES = frozenset(
    (Channel.GRADIENT_SYNC, Channel.SYNC_REPORT, Channel.SYNC_PLAN, Channel.SYNC_PROBE)
)


class Mailbox:
    """Sender and receiver of one rank's messages.

    Args:
        group: Gloo process group over all ranks, for the mailbox alone. Its timeout must be longer
            than any run: the mailbox keeps the deadlines, so that errors can name the missing
            message.
        rank: This rank.
        names: Names of all ranks in errors.
        timeout: Deadline of `receive` in seconds.
        check: Called while waiting; raises if a rank is known to have failed.
        tracer: Records a span for every transfer.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        rank: int,
        names: list[str],
        *,
        timeout: float,
        check: Callable[[], None],
        tracer: Tracer,
    ) -> None:
        self.rank = rank
        self.names = names
        self.timeout = timeout
        self.check = check
        self._group = group
        self._tracer = tracer
        self._explanation = ""
        self._outboxes: dict[tuple[int, Channel], _Outbox] = {}
        self._inboxes: dict[tuple[int, Channel], _Inbox] = {}

    def send(self, destination: int, channel: Channel, key: Key, tree: Tree) -> None:
        """Send a tree, without waiting; its tensors must not be written to afterwards.

        Raises:
            PeerLostError: If an earlier send to this rank failed.
            ConfigError: If the tree holds a value that cannot be sent.
        """
        self._outbox(destination, channel).put(key, *payload.encode(tree, key))

    def _outbox(self, destination: int, channel: Channel) -> _Outbox:
        outbox = self._outboxes.get((destination, channel))
        if outbox is None:
            outbox = _Outbox(
                self._group, destination, channel, self.names[destination], self._tracer
            )
            self._outboxes[destination, channel] = outbox
        return outbox

    def receive(self, source: int, channel: Channel, key: Key, what: str) -> Tree:
        """Return the next tree on the channel.

        Args:
            source: Rank of the sender.
            channel: Channel of the message.
            key: Key that the message must have.
            what: Completes "waited for ..." in errors, such as "the activations of micro-batch 3".

        Raises:
            PeerTimeoutError: If no message arrives within the timeout.
            PeerLostError: If the connection breaks, or a rank has failed.
            ProtocolError: If a message with another key arrives.
        """
        inbox = self._inboxes.get((source, channel))
        if inbox is None:
            inbox = self._inboxes[source, channel] = _Inbox(
                self._group, source, channel, self.names[source], self._tracer
            )
        own_name, peer = self.names[self.rank], self.names[source]
        start = time.monotonic()
        explain_at, deadline = start + _EXPLAIN_SECONDS, start + self.timeout
        while True:
            try:
                item = inbox.items.get(timeout=_POLL_SECONDS)
                break
            except queue.Empty:
                self.check()
                if self._explanation and time.monotonic() > explain_at:
                    explain_at = float("inf")
                    sys.stderr.write(
                        f"dlres: {own_name} waits for {what} from {peer}. {self._explanation}\n"
                    )
                    sys.stderr.flush()
                if time.monotonic() > deadline:
                    advice = (
                        "Its user code may be stuck. If it is only slow, raise the strategy's "
                        "timeout."
                    )
                    raise PeerTimeoutError(
                        f"{own_name} waited {self.timeout:g} s for {what} from {peer}, and no "
                        f"message came. {self._explanation or advice}"
                    ) from None
        if isinstance(item, BaseException):
            self._wait_for_reason()
            raise PeerLostError(
                f"{own_name} lost {peer} while it waited for {what}: {item}"
            ) from item
        received_key, tree = item
        if received_key != key:
            raise ProtocolError(
                f"{own_name} expected message {key} ({what}) from {peer} and got {received_key}: "
                "the ranks are out of step."
            )
        return tree

    def subscribe(self, source: int, channel: Channel, handle: Callable[[Item], None]) -> None:
        """Pass all messages on a channel to a function, in the place of `receive`.

        Args:
            source: Rank of the sender.
            channel: Channel of the messages.
            handle: Called from the inbox's thread with each (key, tree), in order, and with the
                error that ends the connection, if any. It must not raise.
        """
        self._inboxes[source, channel] = _Inbox(
            self._group, source, channel, self.names[source], self._tracer, handle
        )

    def connect(self, destination: int, channel: Channel) -> None:
        """Prepare to send on a channel that the destination has subscribed to.

        `close` ends an inbox on the destination only if this rank has an outbox for it.
        """
        self._outbox(destination, channel)

    @contextmanager
    def explaining(self, explanation: str) -> Iterator[None]:
        """Context manager that gives a likely reason for a long wait: on stderr after a few
        seconds, and in the error of the timeout."""
        before, self._explanation = self._explanation, explanation
        try:
            yield
        finally:
            self._explanation = before

    def broadcast(self, source: int, channel: Channel, key: Key, tree: Tree, what: str) -> Tree:
        """Return the source's tree on all ranks; called by all of them.

        A copy is sent, so that the source may write to its tree at once. For the arguments see
        `receive`.
        """
        if self.rank != source:
            return self.receive(source, channel, key, what)
        self.send_copies([r for r in range(len(self.names)) if r != source], channel, key, tree)
        return tree

    def send_copies(self, ranks: Sequence[int], channel: Channel, key: Key, tree: Tree) -> None:
        """Send copies of the tree to some ranks; its tensors may be written to afterwards."""
        if ranks:
            header, large = payload.encode(tree, key)
            copies = [tensor.to("cpu", copy=True) for tensor in large]
            for rank in ranks:
                self._outbox(rank, channel).put(key, header, copies)

    def close(self, orderly: bool) -> None:
        """End the threads.

        Args:
            orderly: True if all ranks close their mailbox now. After a failure a peer may be gone,
                so threads that still wait for it are abandoned.
        """
        for outbox in self._outboxes.values():
            outbox.finish()
        senders = [outbox.thread for outbox in self._outboxes.values()]
        threads = [*senders, *(inbox.thread for inbox in self._inboxes.values())]
        deadline = time.monotonic() + (self.timeout if orderly else _FAILED_CLOSE_SECONDS)
        for thread in threads:
            thread.join(max(deadline - time.monotonic(), 0.0))
        abandon([thread for thread in threads if thread.is_alive()])
        self._outboxes.clear()
        self._inboxes.clear()

    def _wait_for_reason(self) -> None:
        """Wait briefly for `check` to raise the reason of a broken connection.

        A failing peer announces the reason to all ranks (see `liveness`) before its connection
        breaks. The reason is a better error than the broken connection.
        """
        deadline = time.monotonic() + _REASON_SECONDS
        while time.monotonic() < deadline:
            self.check()
            time.sleep(_POLL_SECONDS)


@dataclass(frozen=True)
class _Message:
    key: Key
    header: bytes
    large: list[Tensor]


class _Outbox:
    """The messages to one rank on one channel, sent in order.

    Small messages are sent by the calling thread: gloo's `send` does not block, and waking a thread
    takes longer than sending. All others are sent by a thread of the outbox.

    Torch cannot tell if a send is complete; it can only wait for it. So the tensors that the
    calling thread has sent are kept in memory, up to `_UNFINISHED_BYTES`. The next message then
    goes to the thread, which waits for all sends.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        destination: int,
        channel: Channel,
        peer: str,
        tracer: Tracer,
    ) -> None:
        self._group, self._destination, self._channel = group, destination, channel
        self._peer, self._tracer = peer, tracer
        self._queue: queue.SimpleQueue[_Message | None] = queue.SimpleQueue()
        # The lock guards `_queued`, the number of messages handed to the thread. While it is not
        # zero, only the thread uses `_frame_bytes` and `_unfinished*`; else only the caller does.
        self._lock = threading.Lock()
        self._queued = 0
        self._frame_bytes = payload.FIRST_FRAME_BYTES
        self._unfinished: list[tuple[dist.Work, Tensor]] = []
        self._unfinished_bytes = 0
        self._failure: BaseException | None = None
        self.thread = threading.Thread(
            target=self._run, name=f"send-{channel.name}-{destination}", daemon=True
        )
        self.thread.start()

    def put(self, key: Key, header: bytes, large: list[Tensor]) -> None:
        """Send a message, or queue it behind earlier ones."""
        if self._failure is not None:
            raise PeerLostError(
                f"{self._peer} cannot be reached: {self._failure}"
            ) from self._failure
        message = _Message(key, header, large)
        with self._lock:
            if not self._queued and self._can_send_now(message):
                # The next `put` raises a failure, as it does for sends of the thread.
                with self._recording_failure(), self._traced(message):
                    self._write(message.header, message.large)
                return
            self._queued += 1
        self._queue.put(message)

    def finish(self) -> None:
        """Send a goodbye after all messages, and end the thread."""
        self._queue.put(None)

    def _can_send_now(self, message: _Message) -> bool:
        has_room = self._unfinished_bytes + self._frame_bytes <= _UNFINISHED_BYTES
        return has_room and payload.fits_frame(message.header, message.large, self._frame_bytes)

    def _run(self) -> None:
        with self._recording_failure():
            while (message := self._queue.get()) is not None:
                self._wait_sent()
                with self._traced(message):
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

    def _traced(self, message: _Message) -> AbstractContextManager[None]:
        name, key = f"send {self._channel.name.lower()}", str(message.key)
        return self._tracer.span(name, "transfer", key=key, peer=self._destination)

    def _write(self, header: bytes, large: list[Tensor]) -> None:
        """Start the transfers of a message."""
        transfers, next_frame_bytes = payload.pack(header, large, self._frame_bytes)
        if self._channel not in _FIXED_FRAMES:
            self._frame_bytes = next_frame_bytes
        for transfer in transfers:
            work = self._group.send([transfer], self._destination, int(self._channel))
            self._unfinished.append((work, transfer))
            self._unfinished_bytes += transfer.numel()

    def _wait_sent(self) -> None:
        """Wait until all transfers have left."""
        for work, _ in self._unfinished:
            work.wait()
        self._unfinished.clear()
        self._unfinished_bytes = 0


class _Inbox:
    """The messages from one rank on one channel, received in order by a thread.

    The thread ends when the peer says goodbye or the connection breaks.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        source: int,
        channel: Channel,
        peer: str,
        tracer: Tracer,
        handle: Callable[[Item], None] | None = None,
    ) -> None:
        self._group, self._source, self._channel = group, source, channel
        self._peer, self._tracer = peer, tracer
        self._frame_bytes = payload.FIRST_FRAME_BYTES
        self.items: queue.SimpleQueue[Item] = queue.SimpleQueue()
        self._handle = handle or self.items.put
        self.thread = threading.Thread(
            target=self._run, name=f"receive-{channel.name}-{source}", daemon=True
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
        packed = self._read(torch.empty(self._frame_bytes, dtype=torch.uint8))
        packed_bytes, header_bytes = payload.read_prefix(packed)
        if not header_bytes:
            return None
        with self._tracer.span(
            f"receive {self._channel.name.lower()}", "transfer", peer=self._source
        ):
            if packed_bytes > len(packed):
                first, packed = packed, torch.empty(packed_bytes, dtype=torch.uint8)
                packed[: len(first)] = first
                self._read(packed[len(first) :])
            if self._channel not in _FIXED_FRAMES:
                self._frame_bytes = payload.next_frame_bytes(packed_bytes)
            header = payload.decode_frame_header(packed, header_bytes, self._peer)
            large = payload.unpack_tensors(packed, packed_bytes, header_bytes, header) or [
                self._read(torch.empty(length, dtype=torch.uint8))
                for length in payload.large_sizes(header)
            ]
            return header.key, payload.decode(header, large)

    def _read(self, buffer: Tensor) -> Tensor:
        self._group.recv([buffer], self._source, int(self._channel)).wait()
        return buffer
