"""The ranks of a run as the pipeline's engines see them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from lightning_dlres.core.wire.tree import Tree
from lightning_dlres.pipeline.comm.mailbox import Mailbox


class RankGroup(Protocol):
    """All ranks of one run. Every method is called by all ranks, in the same order.

    Attributes:
        rank: this process's rank.
        world_size: number of ranks.
        mailbox: sends and receives messages between two ranks.
    """

    rank: int
    world_size: int
    mailbox: Mailbox

    def broadcast(self, tree: Tree, source: int) -> Tree:
        """Return the source's tree on all ranks."""

    def gather(self, values: list[float]) -> list[list[float]]:
        """Return every rank's numbers."""

    def any_rank(self, flag: bool, meanwhile: Callable[[], None] | None = None) -> bool:
        """Return whether the flag is set on any rank; `meanwhile` is called until all have come."""

    def all_ranks(self, flag: bool) -> bool:
        """Return whether the flag is set on all ranks."""
