"""Messages between two ranks whose large tensors go from device memory to device memory.

Both ranks must start such transfers in the same order, or each waits for the other. The order
cannot be fixed beforehand without delays, since activations and gradients become ready at different
times. So one of the two ranks, the *deciding* one, decides: it starts the next transfer that is
ready in either direction, and tells the other rank by a small note through the mailbox. The other
rank follows these notes, and announces its own messages by notes.

A pipeline's neighbours form a path. If the ranks of every pair agree on an order, no cycle of ranks
that wait for each other can arise on it.
"""

from __future__ import annotations

import queue
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from functools import partial
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_dlres.core.comm.abandoned_threads import abandon
from lightning_dlres.core.comm.device_transfers import DeviceTransfers
from lightning_dlres.core.comm.mailbox import (
    FAILED_CLOSE_SECONDS,
    Channel,
    Item,
    Key,
    Mailbox,
)
from lightning_dlres.core.errors import PeerLostError, ProtocolError
from lightning_dlres.core.wire import payload
from lightning_dlres.core.wire.tree import map_tensors

# Bytes of the message by which both ranks try a new link.
_TRIAL_BYTES = 1 << 16
# Content of a note that tells the other rank to send the first of the messages it has announced.
_SEND_NEXT = None


class Transfers(Protocol):
    """Interface of `DeviceTransfers` to a link; see there."""

    def computed(self) -> Callable[[], None]:
        """Return a function that waits for the tensors of the calling thread."""

    def send(self, tensors: Sequence[Tensor]) -> None:
        """Send tensors."""

    def receive(self, sizes: Sequence[int]) -> list[Tensor]:
        """Return received tensors."""

    def adopt(self, tensor: Tensor) -> Tensor:
        """Return a received tensor for the calling thread's computation."""

    def close(self) -> None:
        """Free what the transfers use."""


class DirectLink:
    """Link to one rank, for one channel in each direction of a mailbox.

    After `open`, `Mailbox.send` and `Mailbox.receive` use the link for these channels.

    Args:
        mailbox: This rank's mailbox.
        peer: The other rank.
        transfers: Transfers to and from the other rank.
        sends: Channel on which this rank sends, and the other one receives.
        receives: Channel on which this rank receives.
        decides: True on one of the two ranks, which decides the order of transfers.

    Attributes:
        items: Messages that have arrived, and the error that ended the link, if any.
    """

    def __init__(
        self,
        mailbox: Mailbox,
        peer: int,
        transfers: Transfers,
        *,
        sends: Channel,
        receives: Channel,
        decides: bool,
    ) -> None:
        self._mailbox, self._peer, self._transfers = mailbox, peer, transfers
        self._sends, self._receives, self._decides = sends, receives, decides
        self.items: queue.SimpleQueue[Item] = _Arrivals(transfers)
        self._failure: BaseException | None = None
        # Messages that the device may still compute; and those announced to a deciding rank.
        self._outgoing: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._announced: deque[list[Tensor]] = deque()
        # Guards `_announced`, and `_has_ended`: True after the last message of this rank.
        self._lock = threading.Lock()
        self._has_ended = False
        # Transfers in the agreed order.
        self._due: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._threads = [
            threading.Thread(target=self._run, args=(steps,), name=f"{name}-{peer}", daemon=True)
            for name, steps in (("announce", self._outgoing), ("transfer", self._due))
        ]

    def open(self) -> None:
        """Use the link from now on; called by both ranks."""
        for thread in self._threads:
            thread.start()
        self._mailbox.attach(self._peer, self._sends, self._receives, self)
        self._mailbox.connect(self._peer, Channel.DIRECT)
        self._mailbox.subscribe(self._peer, Channel.DIRECT, self._on_note)

    def try_out(self, device: torch.device) -> None:
        """Send a message in each direction and check it; called by both ranks.

        Raises:
            PeerTimeoutError: If no message arrives.
            ProtocolError: If other bytes arrive.
        """
        pattern = (torch.arange(_TRIAL_BYTES) % 251).to(torch.uint8).to(device)
        self._mailbox.send(self._peer, self._sends, ("trial",), pattern)
        with self._mailbox.explaining(
            "NCCL may be unable to connect these GPUs. Use gpu_transfers='host'."
        ):
            received = self._mailbox.receive(
                self._peer, self._receives, ("trial",), "the first transfer between GPUs"
            )
        if not torch.equal(received, pattern):
            raise ProtocolError(
                f"{self._mailbox.names[self._peer]} sent a known message by NCCL, and other bytes "
                "arrived. Use gpu_transfers='host'."
            )

    def put(self, key: Key, header: bytes, large: list[Tensor]) -> None:
        """Queue a message; for the arguments and errors see `SendingEnd`."""
        if self._failure is not None:
            name = self._mailbox.names[self._peer]
            raise PeerLostError(f"{name} cannot be reached: {self._failure}") from self._failure
        self._outgoing.put(partial(self._announce, self._transfers.computed(), key, header, large))

    def close(self, orderly: bool) -> None:
        """End the threads when all messages of this rank have left; called by both ranks.

        Args:
            orderly: True if no rank has failed. This rank has then got all messages to it.
        """
        self._outgoing.put(None)
        if not orderly:
            self._due.put(None)
        for thread in self._threads:
            thread.join(self._mailbox.timeout if orderly else FAILED_CLOSE_SECONDS)
        stuck = [thread for thread in self._threads if thread.is_alive()]
        abandon(stuck)
        if orderly and not stuck:
            self._transfers.close()

    def _announce(
        self, wait: Callable[[], None], key: Key, header: bytes, large: list[Tensor]
    ) -> None:
        wait()
        if self._decides:
            self._due.put(partial(self._send, key, header, large))
        else:
            with self._lock:
                self._announced.append(large)
            self._note(key, header)

    def _on_note(self, item: Item) -> None:
        """Handle a note of the other rank, or the error that ended the connection."""
        if isinstance(item, BaseException):
            self._fail(item)
            return
        key, content = item
        if content is _SEND_NEXT:
            with self._lock:
                self._due.put(partial(self._transfers.send, self._announced.popleft()))
                self._end_if_idle()
        else:
            self._due.put(partial(self._receive, key, content.numpy().tobytes()))

    def _send(self, key: Key, header: bytes, large: list[Tensor]) -> None:
        self._note(key, header)
        self._transfers.send(large)

    def _receive(self, key: Key, header_bytes: bytes) -> None:
        if self._decides:
            self._note(key, _SEND_NEXT)
        header = payload.decode_header(header_bytes, self._mailbox.names[self._peer])
        buffers = self._transfers.receive(payload.large_sizes(header))
        self.items.put((key, payload.decode(header, buffers)))

    def _note(self, key: Key, header: bytes | None) -> None:
        content = (
            _SEND_NEXT if header is None else torch.frombuffer(bytearray(header), dtype=torch.uint8)
        )
        self._mailbox.send(self._peer, Channel.DIRECT, key, content)

    def _run(self, steps: queue.SimpleQueue[Callable[[], None] | None]) -> None:
        try:
            while (step := steps.get()) is not None:
                step()
                # Free the message. Otherwise it stays in memory until the next one comes.
                del step
            if steps is self._outgoing:
                with self._lock:
                    self._has_ended = True
                    self._end_if_idle()
        except Exception as error:
            # Any error: `Mailbox.receive` must raise it instead of waiting for an ended thread.
            self._fail(error)

    def _end_if_idle(self) -> None:
        """End the thread of the transfers after this rank's last message; called with the lock."""
        if self._has_ended and not self._announced:
            self._due.put(None)

    def _fail(self, error: BaseException) -> None:
        if self._failure is None:
            self._failure = error
        self.items.put(error)


class _Arrivals(queue.SimpleQueue[Item]):
    """Messages that have arrived; the thread that gets one may compute with it."""

    def __init__(self, transfers: Transfers) -> None:
        super().__init__()
        self._transfers = transfers

    def get(self, block: bool = True, timeout: float | None = None) -> Item:
        item = super().get(block, timeout)
        if isinstance(item, BaseException):
            return item
        key, tree = item
        return key, map_tensors(self._transfers.adopt, tree)


def open_direct_links(
    mailbox: Mailbox,
    pairs: Sequence[tuple[int, int]],
    device: torch.device,
    *,
    forward: Channel,
    backward: Channel,
    backend: str,
) -> list[DirectLink]:
    """Open and try out the links of this rank; called by all ranks.

    Args:
        mailbox: This rank's mailbox.
        pairs: Ranks of each link. The pairs must form paths, and be in the order of each path.
        device: This rank's device.
        forward: Channel of messages from the first rank of a pair to the second.
        backward: Channel of messages from the second to the first.
        backend: Backend of torch.distributed for the transfers, such as "nccl".

    Raises:
        PeerError: If a link does not work.
    """
    links = []
    for first, second in pairs:
        # Torch needs all ranks to make a group. Those outside of it need no such backend, and get a
        # placeholder of another class.
        timeout = timedelta(seconds=mailbox.timeout)
        group = dist.new_group([first, second], backend=backend, timeout=timeout)
        if not isinstance(group, dist.ProcessGroup):
            continue
        decides = mailbox.rank == first
        peer = second if decides else first
        link = DirectLink(
            mailbox,
            peer,
            DeviceTransfers(group, peer, device),
            sends=forward if decides else backward,
            receives=backward if decides else forward,
            decides=decides,
        )
        link.open()
        link.try_out(device)
        links.append(link)
    return links


def direct_pairs(
    pairs: Sequence[tuple[int, int]], gpus: Mapping[int, tuple[float, float]]
) -> list[tuple[int, int]]:
    """Return the pairs of ranks that NCCL can link.

    Args:
        pairs: Pairs of ranks.
        gpus: Of each rank that has NCCL and a GPU: an identifier of the GPU, and NCCL's version.
            NCCL takes neither two ranks on one GPU nor two versions.
    """
    return [
        (a, b)
        for a, b in pairs
        if a in gpus and b in gpus and gpus[a][0] != gpus[b][0] and gpus[a][1] == gpus[b][1]
    ]
