"""What the cache asks of a storage: requests go in, replies come out, nobody waits in between."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from lightning_dlres.core.errors import StorageError
from lightning_dlres.prefetch.order.sequence import Positions
from lightning_dlres.prefetch.storage.manifest import SampleTable

# Called with a line of text that says how far a long start has come.
ReportProgress = Callable[[str], None]


@dataclass(frozen=True)
class Reply:
    """The end of a request: uint8, the samples one behind the other, or why they cannot be had."""

    fetch_id: int
    data: NDArray[np.uint8] | StorageError


class Storage(ABC):
    """N storage nodes; sample i is on node i mod N.

    Attributes:
        table: the data set.
        nodes: N.
        note: what users are to know of the data set, in a line; "": nothing.
        on_reply: called from any thread when a reply is there; set it before the first request.
    """

    table: SampleTable
    nodes: int
    note: str
    on_reply: Callable[[], None]

    def __init__(self) -> None:
        self.on_reply, self.note = _nothing, ""
        self._replies: deque[Reply] = deque()

    @abstractmethod
    def submit(self, fetch_id: int, node: int, numbers: Positions) -> None:
        """Ask a node for samples (uint32[n], all of this node). Returns at once; a reply with this
        fetch_id follows within the storage's deadline, whatever happens. For one thread."""

    @abstractmethod
    def close(self) -> None:
        """Give back threads and sockets; replies that are under way are lost."""

    def replies(self) -> list[Reply]:
        """Return the replies that have come, each once."""
        found = []
        while self._replies:
            found.append(self._replies.popleft())
        return found

    def _reply(self, reply: Reply) -> None:
        self._replies.append(reply)
        self.on_reply()


def _nothing() -> None:
    pass
