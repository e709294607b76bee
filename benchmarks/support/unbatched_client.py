"""Client of storage nodes that requests one sample at a time and waits for it, as most loaders do.

benchmarks.prefetch uses it for the peers. It also runs in the peers' environment, which lacks
Lightning.
"""

from __future__ import annotations

import os
import threading
from typing import Any

import numpy as np

from lightning_dlres.prefetch.storage.nodes.node_storage import NodeStorage


class UnbatchedClient:
    """Client that fetches samples by number. Each thread and process has its own connections.

    Args:
        endpoints: Addresses of the storage nodes, separated by commas.
    """

    def __init__(self, endpoints: str) -> None:
        self._endpoints = endpoints.split(",")
        self._own = threading.local()

    def fetch(self, number: int) -> bytes:
        """Return the bytes of a sample.

        Raises:
            Exception: The error of the storage, if it could not read the sample.
        """
        own = self._connected()
        own.storage.submit(number, number % own.storage.nodes, np.array([number], np.uint32))
        while True:
            own.has_reply.wait()
            own.has_reply.clear()
            for reply in own.storage.replies():
                if isinstance(reply.data, Exception):
                    raise reply.data
                return bytes(reply.data)

    def number(self, key: str) -> int:
        """Return the number of the sample with a key."""
        own = self._connected()
        if not hasattr(own, "numbers"):
            table = own.storage.table
            own.numbers = {table.key(number): number for number in range(len(table))}
        return int(own.numbers[key])

    def _connected(self) -> Any:
        own = self._own
        # After a fork the connections belong to the parent process.
        if getattr(own, "pid", None) != os.getpid():
            own.__dict__.clear()
            own.pid, own.has_reply = os.getpid(), threading.Event()
            own.storage = NodeStorage(self._endpoints)
            own.storage.on_reply = own.has_reply.set
        return own

    def __getstate__(self) -> dict[str, Any]:
        return {"_endpoints": self._endpoints}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state, _own=threading.local())
