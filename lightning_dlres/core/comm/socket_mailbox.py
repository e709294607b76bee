"""Mailbox over ZeroMQ: messages leave from the calling thread, and one thread receives those of all
ranks. A message with a single large tensor is sent without copying the tensor."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch.distributed as dist
from torch import Tensor
from typing_extensions import override

from lightning_dlres.core.arrays import byte_array
from lightning_dlres.core.comm.abandoned_threads import abandon
from lightning_dlres.core.comm.channel_ends import ChannelLink
from lightning_dlres.core.comm.collectives import gather_bytes
from lightning_dlres.core.comm.mailbox import (
    FAILED_CLOSE_SECONDS,
    Channel,
    Item,
    Key,
    Mailbox,
    ReceivingEnd,
    SendingEnd,
)
from lightning_dlres.core.comm.rank_sockets import open_rank_sockets
from lightning_dlres.core.comm.receiving_thread import (
    PREFIX,
    Control,
    ReceivingThread,
    SocketReceiver,
)
from lightning_dlres.core.errors import PeerLostError, PeerTimeoutError
from lightning_dlres.core.trace import Tracer
from lightning_dlres.core.units import format_seconds

# Pause between two calls of `check`, in seconds.
_POLL_SECONDS = 0.05
# Longest wait of an orderly `close` for the last messages to leave, in seconds. The receivers still
# read them, so they leave soon.
_LINGER_SECONDS = 5.0


class SocketMailbox(Mailbox):
    """Sender and receiver of one rank's messages, over ZeroMQ.

    All ranks make theirs together. The constructor waits until all ranks are connected.

    Args:
        group: Gloo process group over all ranks, through which they exchange addresses and keys.
        rank: This rank.
        names: Names of all ranks in errors.
        timeout: Deadline of `receive`, and of the connections, in seconds.
        check: Called while waiting; raises if a rank is known to have failed.
        tracer: Records a span for every transfer.

    Raises:
        ConfigError: If other hosts cannot reach a rank.
        PeerError: If a rank is late or lost.
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
        super().__init__(group, rank, names, timeout=timeout, check=check, tracer=tracer)
        # Its connections are its own.
        self._first_tag = 0
        self._sockets = open_rank_sockets(group, timeout, check)
        others = [other for other in range(len(names)) if other != rank]
        self._sequences = {other: _Sequence() for other in others}
        self._receiving = ReceivingThread(self._sockets, names, others, tracer)
        try:
            for other in others:
                self._send(other, Control.HELLO, b"", [])
            self._wait_for_all()
            # A barrier. A rank that has not read this rank's HELLO limits its unread bytes, and
            # would cut off a large message.
            gather_bytes(b"", timeout, check, group)
        except BaseException:
            self.close(orderly=False)
            raise

    @override
    def _new_sending_end(self, destination: int, channel: Channel) -> SendingEnd:
        return _SocketSender(self._link(destination, channel), self._send)

    @override
    def _new_receiving_end(
        self, source: int, channel: Channel, handle: Callable[[Item], None] | None = None
    ) -> ReceivingEnd:
        receiver = SocketReceiver(handle)
        self._receiving.add(source, channel, receiver)
        return receiver

    @override
    def close(self, orderly: bool) -> None:
        if orderly:
            for other in self._sequences:
                with suppress(PeerLostError):
                    self._send(other, Control.GOODBYE, b"", [])
        thread = self._receiving.end(orderly)
        thread.join(self.timeout if orderly else FAILED_CLOSE_SECONDS)
        if thread.is_alive() and orderly:
            # Some rank has not said goodbye. Sockets that stay open would block a later garbage
            # collection of their context for ever.
            self._receiving.end(orderly=False)
            thread.join(FAILED_CLOSE_SECONDS)
        if thread.is_alive():
            # The thread still uses the sockets, so they stay open.
            abandon([thread])
        else:
            # After a failure, too, messages need some time to leave: the last ones may tell the
            # others the reason.
            self._sockets.close_after(_LINGER_SECONDS if orderly else FAILED_CLOSE_SECONDS)
        super().close(orderly)

    def _send(self, rank: int, channel: int, header: bytes, large: list[Tensor]) -> None:
        failure = self._receiving.failures.get(rank)
        if failure is not None:
            raise PeerLostError(f"{self.names[rank]} cannot be reached: {failure}") from failure
        sequence = self._sequences[rank]
        data = [byte_array(tensor.cpu()) for tensor in large]
        with sequence.lock:
            frames: list[Any] = [PREFIX.pack(channel, sequence.next) + header]
            sequence.next += 1
            if data:
                frames.append(data[0] if len(data) == 1 else np.concatenate(data))
            self._sockets.send_frames(rank, frames)

    def _wait_for_all(self) -> None:
        deadline = time.monotonic() + self.timeout
        while not self._receiving.all_heard.wait(_POLL_SECONDS):
            self.check()
            for failure in self._receiving.failures.values():
                raise PeerLostError(str(failure)) from failure
            if time.monotonic() > deadline:
                missing = " and ".join(self.names[rank] for rank in self._receiving.unheard())
                raise PeerTimeoutError(
                    f"{self.names[self.rank]} waited {format_seconds(self.timeout)} for a "
                    f"connection from {missing}. Check that no firewall is between the hosts."
                )


@dataclass
class _Sequence:
    """Sequence number of the next message to a rank.

    A sender holds the lock until its message is sent, so that messages leave in their order.
    """

    next: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)


class _SocketSender:
    """End of a channel that sends to one rank."""

    def __init__(
        self, link: ChannelLink, send: Callable[[int, int, bytes, list[Tensor]], None]
    ) -> None:
        self._link, self._send = link, send

    def put(self, key: Key, header: bytes, large: list[Tensor]) -> None:
        with self._link.span("send", key=str(key)):
            self._send(self._link.rank, self._link.tag, header, large)
