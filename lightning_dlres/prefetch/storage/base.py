"""Interface of storage backends: submit fetches, collect replies. No call waits for storage."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from lightning_dlres.core.errors import StorageError
from lightning_dlres.prefetch.order.sequence import SampleIds
from lightning_dlres.prefetch.storage.manifest import SampleTable

# Called with a line of text about the progress of a long start, such as "1000 files listed".
ReportProgress = Callable[[str], None]


@dataclass(frozen=True)
class Reply:
    """End of a fetch.

    Attributes:
        fetch_id: The id that the fetch was submitted with.
        data: uint8, the samples, concatenated; or the error, if they could not be read.
    """

    fetch_id: int
    data: NDArray[np.uint8] | StorageError


class Storage(ABC):
    """N storage nodes; sample i is on node i mod N.

    Attributes:
        table: Keys, sizes and checksums of all samples.
        nodes: Number of storage nodes, N.
        note: Line for users about the data set, such as links that were left out; "" for none.
        on_reply: Called from any thread when a reply has come. Set it before the first fetch.
    """

    table: SampleTable
    nodes: int
    note: str
    on_reply: Callable[[], None]

    def __init__(self) -> None:
        self.on_reply, self.note = _ignore, ""
        # Any thread appends, one thread removes. `deque` needs no lock for that.
        self._replies: deque[Reply] = deque()

    @abstractmethod
    def submit(self, fetch_id: int, node: int, sample_ids: SampleIds) -> None:
        """Request samples from a node, and return at once. Only one thread may call this.

        A reply with this `fetch_id` follows within the storage's timeout, whatever happens.

        Args:
            fetch_id: Unique among the fetches in flight.
            node: Node that has the samples.
            sample_ids: uint32[n], all of this node.
        """

    @abstractmethod
    def close(self) -> None:
        """Release threads and sockets. Replies to fetches in flight are lost."""

    def replies(self) -> list[Reply]:
        """Return the replies that have come since the last call."""
        replies = []
        while self._replies:
            replies.append(self._replies.popleft())
        return replies

    def _reply(self, reply: Reply) -> None:
        self._replies.append(reply)
        self.on_reply()


def _ignore() -> None:
    pass
