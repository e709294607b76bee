"""Storage nodes in the test's process, which tests kill, restart and let alter their samples."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np

from lightning_dlres.prefetch.storage.listings import open_reader
from lightning_dlres.prefetch.storage.nodes.server import StoreNode
from lightning_dlres.prefetch.storage.readers import Reader

# Returns the samples of a read, altered.
Alter = Callable[[list[bytes]], list[bytes]]


class AlteringReader:
    """Reader that counts its reads and may alter their samples.

    Attributes:
        alter: Called with the samples of each read; None to leave them as they are.
        reads: Number of reads so far.
    """

    def __init__(self, reader: Reader) -> None:
        self.table, self.content_digest, self._reader = reader.table, reader.content_digest, reader
        self.alter: Alter | None = None
        self.reads = 0

    def read(self, sample_ids: np.ndarray) -> list[bytes]:
        self.reads += 1
        samples = self._reader.read(sample_ids)
        return self.alter(samples) if self.alter else samples


class Nodes:
    """Storage nodes of one source in this process.

    Args:
        source: Source that all nodes serve.
        count: Number of nodes.

    Attributes:
        readers: Reader of each node; a restart uses the present one.
        running: Each node, or None if it was killed.
        endpoints: Address of each node, the same after a restart.
    """

    def __init__(self, source: Path, count: int) -> None:
        self.readers = [AlteringReader(open_reader(source)) for _ in range(count)]
        self.running: list[StoreNode | None] = []
        for node in range(count):
            self.running.append(self._start(node, 0))
        self.endpoints = [node.endpoint for node in self.running if node]

    def _start(self, node: int, port: int) -> StoreNode:
        reader: Reader = self.readers[node]  # type: ignore[assignment]
        return StoreNode(reader, node=node, nodes=len(self.readers), port=port)

    def kill(self, node: int) -> None:
        running = self.running[node]
        if running:
            running.close()
        self.running[node] = None

    def restart(self, node: int) -> None:
        self.running[node] = self._start(node, int(self.endpoints[node].rpartition(":")[2]))
