"""Protocol of the group of ranks that profiling measures together."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from lightning_dlres.core.comm.mailbox import Mailbox
from lightning_dlres.core.wire.tree import Tree


class RankGroup(Protocol):
    """All ranks of one run. Every method is called by all ranks, in the same order.

    Attributes:
        rank: Rank of this process.
        world_size: Number of ranks.
        mailbox: Sends and receives messages between two ranks.
    """

    rank: int
    world_size: int
    mailbox: Mailbox

    def broadcast(self, tree: Tree, source: int) -> Tree:
        """Return the source's tree on all ranks."""

    def gather(self, values: list[float]) -> list[list[float]]:
        """Return every rank's numbers, by rank; all ranks give equally many."""

    def any_rank(self, flag: bool, while_waiting: Callable[[], None] | None = None) -> bool:
        """Return True if the flag is set on any rank. `while_waiting` is called repeatedly until
        all ranks take part."""

    def all_ranks(self, flag: bool) -> bool:
        """Return True if the flag is set on all ranks."""
