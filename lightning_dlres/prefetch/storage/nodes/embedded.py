"""Storage backend of nodes inside the cache's process, which read a source of files."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

from lightning_dlres.prefetch.storage.base import ReportProgress
from lightning_dlres.prefetch.storage.nodes.node_storage import NodeStorage
from lightning_dlres.prefetch.storage.nodes.server import StoreNode
from lightning_dlres.prefetch.storage.source import open_source_unchecked
from lightning_dlres.prefetch.storage.source_options import SourceConfig


class EmbeddedStorage(NodeStorage):
    """Storage nodes in this process, over Unix sockets that only this user can reach.

    Args:
        config: Describes the source and the nodes.
        directory: Folder for the sockets; only this user may enter it.
        report_progress: See `open_reader`.

    Raises:
        ConfigError: If there is no such source, or a number in `config` is out of range.
        StorageError: If one of the samples that are hashed at the start cannot be read.
    """

    def __init__(
        self,
        config: SourceConfig,
        directory: Path,
        report_progress: ReportProgress | None = None,
    ) -> None:
        reader = open_source_unchecked(config, report_progress)
        with ExitStack() as stack:
            store_nodes = [
                stack.enter_context(
                    StoreNode(
                        reader,
                        node=node,
                        nodes=config.nodes,
                        path=directory / f"node{node}.sock",
                        read_threads=config.read_threads,
                    )
                )
                for node in range(config.nodes)
            ]
            super().__init__(
                [node.address for node in store_nodes],
                replicas=config.replicas,
                timeout=config.timeout,
            )
            self._open_nodes = stack.pop_all()
        self.note = reader.note

    def close(self) -> None:
        """See `Storage`."""
        super().close()
        self._open_nodes.close()


# Opener of storage="embedded".
open_embedded = EmbeddedStorage
