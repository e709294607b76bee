"""A client of storage nodes as most loaders have it: one request for one sample, and the caller
waits for it. For benchmarks.prefetch, where the peers' environment runs it, too.
"""

from __future__ import annotations

import os
import threading
from typing import Any

import numpy as np

from lightning_dlres.prefetch.storage.nodes.node_storage import NodeStorage


class OneByOne:
    """Samples by number or key; every thread and process has connections of its own."""

    def __init__(self, endpoints: str) -> None:
        self._endpoints = endpoints.split(",")
        self._own = threading.local()

    def fetch(self, number: int) -> bytes:
        """Return a sample."""
        own = self._connected()
        own.storage.submit(number, number % own.storage.nodes, np.array([number], np.uint32))
        while True:
            own.came.wait()
            own.came.clear()
            for reply in own.storage.replies():
                if isinstance(reply.data, Exception):
                    raise reply.data
                return bytes(reply.data)

    def number(self, key: str) -> int:
        """Return which sample a key names."""
        own = self._connected()
        if not hasattr(own, "numbers"):
            table = own.storage.table
            own.numbers = {table.key(number): number for number in range(len(table))}
        return int(own.numbers[key])

    def _connected(self) -> Any:
        own = self._own
        if getattr(own, "pid", None) != os.getpid():
            own.__dict__.clear()
            own.pid, own.came = os.getpid(), threading.Event()
            own.storage = NodeStorage(self._endpoints)
            own.storage.on_reply = own.came.set
        return own

    def __getstate__(self) -> dict[str, Any]:
        return {"_endpoints": self._endpoints}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state, _own=threading.local())
