"""Messages between two ranks: trees of tensors over torch.distributed, with a key and a deadline.

A send returns at once. A small message on the CPU leaves from the calling thread. A thread per
destination and channel sends all others: large ones, those on another device, and those behind
messages that have not left yet. A thread per source and channel receives. So activations and
gradients travel while the stage computes. (`SocketMailbox` has other threads, and the same rules.)
Every message carries a key, and the receiver names the key that it expects. Another key is an
error, so data never reaches the wrong micro-batch.
"""

from __future__ import annotations

import queue
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from enum import IntEnum
from itertools import count
from typing import Protocol, TypeAlias
from weakref import WeakKeyDictionary

import torch.distributed as dist
from torch import Tensor

from lightning_dlres.core.comm import channel_ends
from lightning_dlres.core.comm.abandoned_threads import abandon
from lightning_dlres.core.comm.channel_ends import (
    LONGER_THAN_ANY_RUN,
    ChannelLink,
    ChannelReceiver,
    ChannelSender,
)
from lightning_dlres.core.comm.collectives import wait_for_reason
from lightning_dlres.core.errors import PeerLostError, PeerTimeoutError, ProtocolError
from lightning_dlres.core.trace import Tracer
from lightning_dlres.core.wire import payload
from lightning_dlres.core.wire.tree import Tree

# Numbers of the mailboxes that are made over a group. Each mailbox has tags of its own.
_numbers: WeakKeyDictionary[dist.ProcessGroup, Iterator[int]] = WeakKeyDictionary()
# The first tag: above those of user code, and those that gloo gives to collectives.
_FIRST_TAG = 1 << 28
# Number of tags of a mailbox: more than the number of its channels.
_TAGS = 64

# Identifies a message on its channel. The key of a micro-batch's activations and gradients is
# (micro-batch, number of the pass through the pipeline).
Key: TypeAlias = channel_ends.Key
# A received message, or the error that ended the connection.
Item: TypeAlias = channel_ends.Item

# Pause between two calls of `check` while waiting, in seconds.
_POLL_SECONDS = 0.05
# Seconds that `close` waits for the threads to end after a failure.
FAILED_CLOSE_SECONDS = 0.5
# Seconds of waiting after which the text given to `explaining` is printed.
_EXPLAIN_SECONDS = 5.0
# Seconds to wait, after a connection broke, for `check` to raise the reason.
MESSAGE_REASON_SECONDS = 1.0


class Channel(IntEnum):
    """Kind of a message. Messages of one kind between two ranks arrive in order.

    The number is part of gloo's tag. `SocketMailbox` sends it, so it must differ from its
    `Control`.

    Attributes:
        BATCH: Pipeline: batch that rank 0 has read, or signals for all ranks.
        STEP: Pipeline: start of a pass, with the sizes of its micro-batches.
        ACTIVATION: Pipeline: activations for the next stage.
        GRADIENT: Pipeline: gradients of activations for the stage before.
        OUTPUT: Pipeline: output of the pipelined module.
        RECORD: Pipeline: loss and logs of a step.
        STATE: Weights and optimizer states, also for checkpoints.
        OBJECT: Any tree; only tests send it.
        PROBE: Measurement of a pipeline's links.
        GRADIENT_SYNC: Gradient synchronisation: payloads of gradients and of their sums.
        SYNC_REPORT: Gradient synchronisation: report of a rank to the coordinator.
        SYNC_PLAN: Gradient synchronisation: plan of the coordinator for a rank.
        SYNC_PROBE: Gradient synchronisation: measurement of links, and exchange of measured times.
        DIRECT: Notes of a `DirectLink`.
    """

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
    DIRECT = 24


# Bytes of the receiver's buffer on channels without padding. Their messages differ in size, and the
# zeros that would pad them to one size take time on a slow link. (Gloo writes a short transfer to
# the start of a longer buffer.)
_BUFFER_BYTES = {
    Channel.GRADIENT_SYNC: 512 << 10,
    Channel.SYNC_REPORT: payload.FIRST_FRAME_BYTES,
    Channel.SYNC_PLAN: payload.FIRST_FRAME_BYTES,
    # As for payloads, whose transfers it measures.
    Channel.SYNC_PROBE: 512 << 10,
}


class SendingEnd(Protocol):
    """End of a channel that sends to one rank."""

    def put(self, key: Key, header: bytes, large: list[Tensor]) -> None:
        """Send a message, or queue it behind earlier ones.

        Args:
            key: Key of the message.
            header: Header of its payload.
            large: Large tensors of its payload, flat uint8.

        Raises:
            PeerLostError: If an earlier send to this rank failed.
        """


class ReceivingEnd(Protocol):
    """End of a channel that receives from one rank.

    Attributes:
        items: Messages that have arrived, and the error that ended the connection, if any.
    """

    items: queue.SimpleQueue[Item]


class TwoEnds(SendingEnd, ReceivingEnd, Protocol):
    """Ends of a channel to a rank and of one from it, in one object."""


class Mailbox:
    """Sender and receiver of one rank's messages.

    Args:
        group: Gloo process group over all ranks, which may serve collectives and other mailboxes,
            too. All ranks make their mailboxes over a group in the same order.
        rank: This rank.
        names: Names of all ranks in errors.
        timeout: Deadline of `receive` in seconds.
        check: Called while waiting; raises if a rank is known to have failed.
        tracer: Records a span for every transfer.

    Attributes:
        rank: This rank.
        names: Names of all ranks in errors. They may be changed in place; errors of channels that
            are open keep the old ones.
        timeout: Deadline of `receive` in seconds; may be changed.
        check: As the argument.
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
        self._first_tag = _FIRST_TAG + _TAGS * next(_numbers.setdefault(group, count()))
        self._tracer = tracer
        self._explanation = ""
        # Ends of the channels by the other rank and the channel. Two threads may send the first
        # messages on a channel at once. With a sending end each, the messages could overtake one
        # another, and the receiver would end at the first goodbye of two. Hence the lock.
        self._sending_lock = threading.Lock()
        self._sending_ends: dict[tuple[int, Channel], SendingEnd] = {}
        self._receiving_ends: dict[tuple[int, Channel], ReceivingEnd] = {}
        # Ends whose threads `close` must join. A `SocketMailbox` has none.
        self._senders: list[ChannelSender] = []
        self._receivers: list[ChannelReceiver] = []

    def send(self, destination: int, channel: Channel, key: Key, tree: Tree) -> None:
        """Send a tree, without waiting; its tensors must not be written to afterwards.

        Args:
            destination: Rank of the receiver.
            channel: Channel of the message.
            key: Key that the receiver expects.
            tree: Nested containers of tensors, numbers and strings; see `tree` in `core/wire`.

        Raises:
            PeerLostError: If an earlier send to this rank failed.
            ConfigError: If the tree holds a value that cannot be sent.
            ProtocolError: If a tensor in it is sparse, nested or quantized, or on the meta device.
        """
        self._sending_end(destination, channel).put(key, *payload.encode(tree, key))

    def _sending_end(self, destination: int, channel: Channel) -> SendingEnd:
        with self._sending_lock:
            end = self._sending_ends.get((destination, channel))
            if end is None:
                end = self._new_sending_end(destination, channel)
                self._sending_ends[destination, channel] = end
            return end

    def _new_sending_end(self, destination: int, channel: Channel) -> SendingEnd:
        sender = ChannelSender(self._link(destination, channel))
        self._senders.append(sender)
        return sender

    def _new_receiving_end(
        self, source: int, channel: Channel, handle: Callable[[Item], None] | None = None
    ) -> ReceivingEnd:
        """Return a new end. If `handle` is given, it gets each item, and `items` stays empty."""
        receiver = ChannelReceiver(self._link(source, channel), handle)
        self._receivers.append(receiver)
        return receiver

    def _link(self, rank: int, channel: Channel) -> ChannelLink:
        return ChannelLink(
            group=self._group,
            rank=rank,
            name=self.names[rank],
            channel=channel.name,
            tag=self._first_tag + channel,
            buffer_bytes=_BUFFER_BYTES.get(channel, 0),
            tracer=self._tracer,
        )

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
        end = self._receiving_ends.get((source, channel))
        if end is None:
            end = self._receiving_ends[source, channel] = self._new_receiving_end(source, channel)
        own_name, peer = self.names[self.rank], self.names[source]
        start = time.monotonic()
        explain_at, deadline = start + _EXPLAIN_SECONDS, start + self.timeout
        while True:
            try:
                item = end.items.get(timeout=_POLL_SECONDS)
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
                        f"The user code of {peer} may be stuck. If it is only slow, raise the "
                        "strategy's timeout."
                    )
                    raise PeerTimeoutError(
                        f"{own_name} waited {self.timeout:g} s for {what} from {peer}, and no "
                        f"message came. {self._explanation or advice}"
                    ) from None
        if isinstance(item, BaseException):
            wait_for_reason(self.check, MESSAGE_REASON_SECONDS)
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
        """Pass all messages on a channel to a function, instead of returning them from `receive`.

        Args:
            source: Rank of the sender.
            channel: Channel of the messages.
            handle: Called from the thread that receives, with each (key, tree), in order, and with
                the error that ends the connection, if any. It must not raise.
        """
        self._receiving_ends[source, channel] = self._new_receiving_end(source, channel, handle)

    def attach(self, peer: int, sends: Channel, receives: Channel, ends: TwoEnds) -> None:
        """Use these ends for two channels from now on; no message has been sent on them before.

        Args:
            peer: The other rank, which does the same with the channels swapped.
            sends: Channel to the other rank.
            receives: Channel from the other rank.
            ends: Both ends. Who attaches them closes them.
        """
        with self._sending_lock:
            self._sending_ends[peer, sends] = ends
        self._receiving_ends[peer, receives] = ends

    def connect(self, destination: int, channel: Channel) -> None:
        """Prepare to send on a channel that the destination has subscribed to.

        Call it even if this rank might never send. The destination receives until a goodbye comes,
        and `close` sends one only on channels with a sending end.
        """
        self._sending_end(destination, channel)

    @contextmanager
    def explaining(self, explanation: str) -> Iterator[None]:
        """Context manager in which a long `receive` prints a likely reason to stderr after a few
        seconds. If the wait times out, the error has it, too."""
        before, self._explanation = self._explanation, explanation
        try:
            yield
        finally:
            self._explanation = before

    def broadcast(self, source: int, channel: Channel, key: Key, tree: Tree, what: str) -> Tree:
        """Return the source's tree on all ranks; called by all of them.

        Copies are sent, so that the source may write to its tree at once. For the other arguments
        see `receive`.

        Args:
            source: Rank of the source.
            tree: Tree to send; ignored on all ranks but the source.
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
                self._sending_end(rank, channel).put(key, header, copies)

    def close(self, orderly: bool) -> None:
        """Send the queued messages and a goodbye on every channel, and end the threads.

        It waits for the threads until the deadline, and then abandons those that still run.

        Args:
            orderly: True if all ranks close their mailbox now; the deadline is `timeout`. False
                after a failure: a peer may be gone, so the deadline is `FAILED_CLOSE_SECONDS`.
        """
        for sender in self._senders:
            sender.finish()
        threads = [sender.thread for sender in self._senders]
        threads += [receiver.thread for receiver in self._receivers]
        deadline = time.monotonic() + (self.timeout if orderly else FAILED_CLOSE_SECONDS)
        for thread in threads:
            thread.join(max(deadline - time.monotonic(), 0.0))
        abandon([thread for thread in threads if thread.is_alive()])
        self._sending_ends.clear()
        self._receiving_ends.clear()
        self._senders.clear()
        self._receivers.clear()


def message_group() -> dist.ProcessGroup:
    """Return a gloo group of all ranks for mailboxes and small collectives; all call it together.

    It is the default group if that can serve: each gloo group has a thread that wakes up a hundred
    times a second, which takes 3 to 4 ms of a processor's second.
    """
    group = (
        dist.group.WORLD
        if dist.get_backend() == dist.Backend.GLOO
        else dist.new_group(backend="gloo", timeout=LONGER_THAN_ANY_RUN)
    )
    assert isinstance(group, dist.ProcessGroup)
    return group


def release_group(group: dist.ProcessGroup) -> None:
    """Destroy a result of `message_group`, unless it is the default group, or all groups were
    destroyed before."""
    if dist.is_initialized() and group is not dist.group.WORLD:
        dist.destroy_process_group(group)
