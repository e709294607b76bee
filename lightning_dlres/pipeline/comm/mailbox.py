"""Messages between ranks: trees of tensors over torch.distributed, each on a named channel, each
with a deadline.

Sends return at once; what is large, or on another device, or comes faster than it leaves, is sent
by a thread per destination and channel. Receives are drained by a thread per source and channel, so
that activations and gradients travel while the stage computes. Every message carries a key; a
message other than the expected one is an error, never data for the wrong micro-batch.
"""

from __future__ import annotations

import queue
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_dlres.core.errors import PeerError, PeerLostError, PeerTimeoutError, ProtocolError
from lightning_dlres.core.trace import Tracer
from lightning_dlres.core.wire import payload
from lightning_dlres.core.wire.tree import Tree
from lightning_dlres.pipeline.comm import packing
from lightning_dlres.pipeline.comm.abandoned_threads import leave_behind

Key = tuple[str | int, ...]

_POLL_SECONDS = 0.05
_LAST_WORDS_SECONDS = 0.5
_EXPLAIN_SECONDS = 5.0
_REASON_SECONDS = 1.0
_KEPT_BYTES = 256 << 10  # of sent messages on a channel; little beside what a stage holds


class Channel(IntEnum):
    """What a message is about; its number is the tag on the wire."""

    BATCH = 11
    STEP = 12
    ACTIVATION = 13
    GRADIENT = 14
    OUTPUT = 15
    RECORD = 16
    STATE = 17
    OBJECT = 18
    PROBE = 19


class Mailbox:
    """All messages of one rank.

    Args:
        group: a gloo process group over all ranks, used by nobody else, with a timeout longer than
            any run (the deadlines are kept here, so that they can name what was waited for).
        rank: this rank.
        names: what each rank is called in errors.
        timeout: seconds that `receive` waits.
        check: called while waiting; raises if some rank is known to have failed.
        tracer: gets a span for every transfer.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        rank: int,
        names: list[str],
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
        """Hand a tree over for sending; its tensors must not be written to afterwards.

        Raises:
            PeerLostError: an earlier send to this rank failed.
            ConfigError: the tree holds something that cannot travel.
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
            what: completes "waited for ...", for instance "the activations of micro-batch 3".

        Raises:
            PeerTimeoutError: nothing came within the timeout.
            PeerLostError: the connection broke, or another rank failed.
            ProtocolError: another message came.
        """
        inbox = self._inboxes.get((source, channel))
        if inbox is None:
            inbox = self._inboxes[source, channel] = _Inbox(
                self._group, source, channel, self.names[source], self._tracer
            )
        me, peer = self.names[self.rank], self.names[source]
        start = time.monotonic()
        explain_at, deadline = start + _EXPLAIN_SECONDS, start + self.timeout
        while True:
            try:
                item = inbox.items.get(timeout=_POLL_SECONDS)
                break
            except queue.Empty:
                self.check()
                reason = self._explanation
                if reason and time.monotonic() > explain_at:
                    explain_at = float("inf")
                    sys.stderr.write(f"dlres: {me} waits for {what} from {peer}. {reason}\n")
                    sys.stderr.flush()
                if time.monotonic() > deadline:
                    stuck = (
                        "Is it stuck in user code? If it is only slow, raise the strategy's "
                        "timeout."
                    )
                    raise PeerTimeoutError(
                        f"{me} waited {self.timeout:g} s for {what} from {peer}, and nothing came. "
                        f"{reason or stuck}"
                    ) from None
        if isinstance(item, BaseException):
            self._prefer_the_cause()
            raise PeerLostError(f"{me} lost {peer} while it waited for {what}: {item}") from item
        got, tree = item
        if got != key:
            raise ProtocolError(
                f"{me} expected message {key} ({what}) from {peer} and got {got}: the ranks are "
                "out of step."
            )
        return tree

    @contextmanager
    def explaining(self, reason: str) -> Iterator[None]:
        """Context manager that names the likely reason of a long wait, first on stderr while it
        lasts, then in the error."""
        before, self._explanation = self._explanation, reason
        try:
            yield
        finally:
            self._explanation = before

    def broadcast(self, source: int, channel: Channel, key: Key, tree: Tree, what: str) -> Tree:
        """Return the source's tree on all ranks; called by all of them. What is sent is a copy, so
        that the source may write to its tree at once."""
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
        """End the threads, which every rank does; a rank that failed may be gone, and what waits
        for it is left behind."""
        for outbox in self._outboxes.values():
            outbox.finish()
        senders = [outbox.thread for outbox in self._outboxes.values()]
        threads = [*senders, *(inbox.thread for inbox in self._inboxes.values())]
        deadline = time.monotonic() + (self.timeout if orderly else _LAST_WORDS_SECONDS)
        for thread in threads:
            thread.join(max(deadline - time.monotonic(), 0.0))
        leave_behind([thread for thread in threads if thread.is_alive()])
        self._outboxes.clear()
        self._inboxes.clear()

    def _prefer_the_cause(self) -> None:
        # A peer that gives up says why on another path, and breaks the connection when all have
        # heard it: the reason is the better message.
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
    """Sends in order: small messages from the calling thread, since gloo's `send` does not block
    and a thread takes longer to wake than to send; all others in a thread of its own.

    torch does not tell whether a send is complete, only waits for it. What the calling thread has
    sent is therefore kept until there is too much of it; then the thread waits for it all.
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
        self._items: queue.SimpleQueue[_Message | None] = queue.SimpleQueue()
        # Frame, works and bytes are the thread's while it has messages, else the caller's.
        self._lock = threading.Lock()
        self._with_thread = 0
        self._frame = packing.FIRST_FRAME_BYTES
        self._under_way: list[tuple[dist.Work, Tensor]] = []
        self._bytes_under_way = 0
        self._failure: BaseException | None = None
        self.thread = threading.Thread(
            target=self._run, name=f"send-{channel.name}-{destination}", daemon=True
        )
        self.thread.start()

    def put(self, key: Key, header: bytes, large: list[Tensor]) -> None:
        if self._failure is not None:
            raise PeerLostError(
                f"{self._peer} cannot be reached: {self._failure}"
            ) from self._failure
        message = _Message(key, header, large)
        with self._lock:
            if not self._with_thread and self._may_leave_at_once(message):
                # A failure shows at the next message, as the thread's does.
                with self._noting_failure(), self._traced(message):
                    self._write(message.header, message.large)
                return
            self._with_thread += 1
        self._items.put(message)

    def finish(self) -> None:
        self._items.put(None)

    def _may_leave_at_once(self, message: _Message) -> bool:
        room = self._bytes_under_way + self._frame <= _KEPT_BYTES
        return room and packing.fits(message.header, message.large, self._frame)

    def _run(self) -> None:
        with self._noting_failure():
            while (message := self._items.get()) is not None:
                self._settle()
                with self._traced(message):
                    self._write(message.header, message.large)
                    self._settle()
                del message  # the next one may be long in coming
                with self._lock:
                    self._with_thread -= 1
            self._settle()
            self._write(b"", [])
            self._settle()

    @contextmanager
    def _noting_failure(self) -> Iterator[None]:
        try:
            yield
        except (RuntimeError, ValueError, PeerError) as error:
            self._failure = error

    def _traced(self, message: _Message) -> AbstractContextManager[None]:
        name, key = f"send {self._channel.name.lower()}", str(message.key)
        return self._tracer.span(name, "transfer", key=key, peer=self._destination)

    def _write(self, header: bytes, large: list[Tensor]) -> None:
        transfers, self._frame = packing.pack(header, large, self._frame)
        for transfer in transfers:
            work = self._group.send([transfer], self._destination, int(self._channel))
            self._under_way.append((work, transfer))
            self._bytes_under_way += transfer.numel()

    def _settle(self) -> None:
        """Wait until everything has left."""
        for work, _ in self._under_way:
            work.wait()
        self._under_way.clear()
        self._bytes_under_way = 0


class _Inbox:
    """Receives in order, in a thread of its own; ends when the peer says goodbye or breaks."""

    def __init__(
        self, group: dist.ProcessGroup, source: int, channel: Channel, peer: str, tracer: Tracer
    ) -> None:
        self._group, self._source, self._channel = group, source, channel
        self._peer, self._tracer = peer, tracer
        self._frame = packing.FIRST_FRAME_BYTES
        self.items: queue.SimpleQueue[tuple[Key, Tree] | BaseException] = queue.SimpleQueue()
        self.thread = threading.Thread(
            target=self._run, name=f"receive-{channel.name}-{source}", daemon=True
        )
        self.thread.start()

    def _run(self) -> None:
        try:
            while (message := self._receive()) is not None:
                self.items.put(message)
                del message  # whoever takes it decides how long it lives
        except Exception as error:
            # Whatever it is, the waiting thread must learn of it, not wait for a dead one.
            self.items.put(error)

    def _receive(self) -> tuple[Key, Tree] | None:
        packed = self._read(torch.empty(self._frame, dtype=torch.uint8))
        end, size = packing.sizes(packed)
        if not size:
            return None
        with self._tracer.span(
            f"receive {self._channel.name.lower()}", "transfer", peer=self._source
        ):
            if end > len(packed):
                first, packed = packed, torch.empty(end, dtype=torch.uint8)
                packed[: len(first)] = first
                self._read(packed[len(first) :])
            self._frame = packing.frame_after(end)
            header = packing.header_of(packed, size, self._peer)
            large = packing.packed_tensors(packed, end, size, header) or [
                self._read(torch.empty(length, dtype=torch.uint8))
                for length in payload.large_sizes(header)
            ]
            return header.key, payload.decode(header, large)

    def _read(self, buffer: Tensor) -> Tensor:
        self._group.recv([buffer], self._source, int(self._channel)).wait()
        return buffer


def wait_for(
    work: Any,
    what: str,
    timeout: float,
    check: Callable[[], None],
    meanwhile: Callable[[], None] | None = None,
) -> None:
    """Wait for a collective, but not longer than `timeout` seconds, and not when a rank is known to
    have failed; `meanwhile` is called again and again."""
    deadline, pause = time.monotonic() + timeout, 5e-5
    while not work.is_completed():
        if time.monotonic() > deadline:
            raise PeerTimeoutError(f"waited {timeout:g} s for {what}, and not all ranks came.")
        try:
            check()
        except PeerError:
            # The rank that failed may have come here first: what it sent then still counts.
            if not _completes(work, _LAST_WORDS_SECONDS):
                raise
            break
        if meanwhile is not None:
            meanwhile()
            continue
        time.sleep(pause)
        pause = min(pause * 1.5, 2e-3)
    try:
        work.wait()
    except RuntimeError as error:
        raise PeerLostError(f"A rank was lost while this one waited for {what}: {error}") from error


def _completes(work: Any, seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while not work.is_completed() and time.monotonic() < deadline:
        time.sleep(2e-3)
    return bool(work.is_completed())
