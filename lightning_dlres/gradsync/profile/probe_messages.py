"""Messages of a measurement between all ranks. An error names the rank that is late."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from lightning_dlres.core.comm.mailbox import Channel, Mailbox
from lightning_dlres.core.wire.tree import Tree

_WHAT = "the measurement of gradient synchronisation"


class ProbeMessages:
    """Messages between all ranks. All ranks call the same methods in the same order.

    Args:
        mailbox: Messages to the other ranks. Its timeout is the deadline of each message.
        among: Ranks that take part, numbered in their order; None: all ranks.
    """

    def __init__(self, mailbox: Mailbox, among: Sequence[int] | None = None) -> None:
        self._members = list(range(len(mailbox.names))) if among is None else list(among)
        self.rank, self.ranks = self._members.index(mailbox.rank), len(self._members)
        self.check, self.timeout = mailbox.check, mailbox.timeout
        self._mailbox, self._count = mailbox, 0

    def among(self, ranks: Sequence[int]) -> ProbeMessages:
        """Return the messages between some of the ranks, of which this rank is one."""
        return ProbeMessages(self._mailbox, [self._members[rank] for rank in ranks])

    def gather(self, values: Sequence[float]) -> list[list[float]]:
        """Return every rank's numbers, by rank. No rank returns before all have called this.

        Each rank sends to each other one, so every rank knows which one is late.

        Raises:
            PeerError: If a rank is late or lost.
        """
        self._count += 1
        key = "numbers", self._count
        others = [rank for rank in range(self.ranks) if rank != self.rank]
        for other in others:
            self._mailbox.send(self._members[other], Channel.SYNC_PROBE, key, list(values))
        gathered = {
            other: self._mailbox.receive(self._members[other], Channel.SYNC_PROBE, key, _WHAT)
            for other in others
        }
        gathered[self.rank] = list(values)
        return [gathered[rank] for rank in range(self.ranks)]

    def slowest(self, values: Sequence[float]) -> list[float]:
        """Return the largest of all ranks' numbers, position by position.

        Raises:
            PeerError: If a rank is late or lost.
        """
        return [max(column) for column in zip(*self.gather(values), strict=True)]

    def time(self, run: Callable[[], object], device: torch.device) -> float:
        """Return the seconds of a function that all ranks call at once, on the slowest rank.

        Args:
            run: Function to call.
            device: Device on which it works.

        Raises:
            PeerError: If a rank is late or lost.
        """
        # An error of a collective would not name a rank that is late; that of `gather` does.
        self.gather([])
        start = time.perf_counter()
        run()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return self.slowest([time.perf_counter() - start])[0]

    def share(self, tree: Tree) -> Tree:
        """Return the tree of rank 0 on all ranks.

        Raises:
            PeerError: If rank 0 is late or lost.
        """
        self._count += 1
        key = "shared", self._count
        source, channel = self._members[0], Channel.SYNC_PROBE
        if self.rank:
            return self._mailbox.receive(source, channel, key, _WHAT)
        self._mailbox.send_copies(self._members[1:], channel, key, tree)
        return tree

    def send(self, destination: int, payload: Tensor) -> None:
        """Send bytes, without waiting."""
        self._mailbox.send(self._members[destination], Channel.SYNC_PROBE, ("probe",), payload)

    def receive(self, source: int) -> Tensor:
        """Return the next bytes from a rank.

        Raises:
            PeerError: If the rank is late or lost.
        """
        peer = self._members[source]
        payload = self._mailbox.receive(peer, Channel.SYNC_PROBE, ("probe",), _WHAT)
        assert isinstance(payload, torch.Tensor)
        return payload
