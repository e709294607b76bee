"""Storage nodes in the process of the test, which can kill, restart and corrupt them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np

from lightning_dlres.prefetch.storage.listings import open_reader
from lightning_dlres.prefetch.storage.nodes.server import StoreNode
from lightning_dlres.prefetch.storage.readers import Reader

# Function that takes the samples of a read and returns the samples to send instead.
AlterSamples = Callable[[list[bytes]], list[bytes]]


class AlteringReader:
    """Reader that counts its reads and may alter their samples.

    Attributes:
        alter: Function that replaces the samples of each read. None: the samples stay as they are.
        reads: Number of reads so far.
    """

    def __init__(self, reader: Reader) -> None:
        self.table, self.content_digest, self._reader = reader.table, reader.content_digest, reader
        self.alter: AlterSamples | None = None
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
        readers: Reader of each node. A test may replace one; `restart` then uses the new reader.
        running: Each running node; None in the place of a killed one.
        addresses: Address of each node, the same after a restart.
    """

    def __init__(self, source: Path, count: int) -> None:
        self.readers = [AlteringReader(open_reader(source)) for _ in range(count)]
        self.running: list[StoreNode | None] = []
        for node in range(count):
            self.running.append(self._start(node, 0))
        self.addresses = [node.address for node in self.running if node]

    def _start(self, node: int, port: int) -> StoreNode:
        reader: Reader = self.readers[node]  # type: ignore[assignment]
        return StoreNode(reader, node=node, nodes=len(self.readers), port=port)

    def kill(self, node: int) -> None:
        """Close a node, so that its address refuses connections."""
        running = self.running[node]
        if running:
            running.close()
        self.running[node] = None

    def restart(self, node: int) -> None:
        """Start a killed node again at its old address."""
        self.running[node] = self._start(node, int(self.addresses[node].rpartition(":")[2]))
