"""Two ranks' sockets in one process, and the thread that receives for the first of them."""

from __future__ import annotations

import queue
from contextlib import ExitStack

from lightning_dlres.core.comm.mailbox import Channel, Item
from lightning_dlres.core.comm.rank_sockets import RankSockets
from lightning_dlres.core.comm.receiving_thread import PREFIX, ReceivingThread, SocketReceiver
from lightning_dlres.core.trace import Tracer
from lightning_dlres.core.wire import payload
from lightning_dlres.core.wire.keys import CurveKeys

CHANNEL = Channel.GRADIENT_SYNC
TOKENS = (b"token of rank 0", b"token of rank 1")


class TwoRanks:
    """Rank 0, which receives, and rank 1, which sends.

    Args:
        stack: Stack that ends the thread and closes the sockets.
        is_encrypted: True for CURVE keys, as between hosts.

    Attributes:
        keys: Keys of both ranks.
        sockets: Sockets of both ranks.
        receiving: Thread of rank 0.
        items: Messages from rank 1 to rank 0.
    """

    def __init__(self, stack: ExitStack, *, is_encrypted: bool = False) -> None:
        self.keys = [CurveKeys.generate() for _ in range(2)]
        self.sockets = [
            RankSockets(
                {TOKENS[1 - rank]: 1 - rank},
                bind="127.0.0.1",
                keys=self.keys[rank] if is_encrypted else None,
                allowed=[self.keys[1 - rank].public] if is_encrypted else (),
            )
            for rank in range(2)
        ]
        for rank in range(2):
            stack.callback(self.sockets[rank].close_after, 0.0)
        self.connect(1, 0)
        self.receiving = ReceivingThread(self.sockets[0], ["rank 0", "rank 1"], [1], Tracer())
        stack.callback(self.end)
        self.items: queue.SimpleQueue[Item] = queue.SimpleQueue()
        self.receiving.add(1, CHANNEL, SocketReceiver(self.items.put))
        self._number = 0

    def connect(self, rank: int, other: int) -> None:
        """Connect the sending socket of a rank to the other rank."""
        server = self.sockets[other].address
        self.sockets[rank].connect(other, server, TOKENS[rank], self.keys[other].public)

    def send(self, tree: object, *, channel: int = CHANNEL, number: int | None = None) -> None:
        """Send a tree from rank 1 to rank 0.

        Args:
            tree: Content of the message.
            channel: Channel of the message.
            number: Number of the message, from which later ones count on; None for the next one.
        """
        header, large = payload.encode(tree, ("key",))
        number = self._number if number is None else number
        self._number = number + 1
        frames = [PREFIX.pack(channel, number) + header, *[one.numpy() for one in large]]
        self.sockets[1].send_frames(0, frames)

    def end(self) -> None:
        """End the thread of rank 0."""
        thread = self.receiving.end(orderly=False)
        thread.join(20.0)
        assert not thread.is_alive()
