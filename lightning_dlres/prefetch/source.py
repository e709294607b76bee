"""From a description of a storage to the storage."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

from lightning_dlres.core.errors import ConfigError, got_expected
from lightning_dlres.core.net import CurveKeys
from lightning_dlres.prefetch.messages import SourceConfig
from lightning_dlres.prefetch.sequence import Positions
from lightning_dlres.prefetch.storage.base import Reply, Storage
from lightning_dlres.prefetch.storage.files import FileStorage
from lightning_dlres.prefetch.storage.listings import Listed, open_reader
from lightning_dlres.prefetch.storage.nodes import Identity, NodeStorage
from lightning_dlres.prefetch.storage.server import StoreNode

# The first is no business of the cache.
KINDS = ("direct", "embedded", "files", "nodes")


def open_storage(config: SourceConfig, directory: Path, listed: Listed | None = None) -> Storage:
    """Return the storage that a configuration describes.

    Args:
        config: the description.
        directory: where sockets of embedded nodes may lie; only this user may enter it.
        listed: see `open_reader`.

    Raises:
        ConfigError: it describes none, or what it describes is not there.
        PeerTimeoutError: a storage node does not answer.
    """
    if config.kind == "nodes":
        identity = None
        if config.secret_key:
            keys = CurveKeys(config.public_key, config.secret_key)
            identity = Identity(keys, config.server_key)
        return NodeStorage(
            config.addresses,
            replicas=config.replicas,
            timeout=config.timeout,
            identity=identity,
        )
    if config.kind == "files":
        reader = open_reader(config.addresses[0], listed, config.follow_links)
        return FileStorage(reader, config.nodes, config.threads, config.timeout)
    if config.kind == "embedded":
        return EmbeddedStorage(config, directory, listed)
    raise ConfigError(got_expected("storage", config.kind, " or ".join(KINDS), "'embedded'"))


class EmbeddedStorage(Storage):
    """Storage nodes in this process, over Unix sockets that only this user can reach: what runs on
    many hosts, on one."""

    def __init__(self, config: SourceConfig, directory: Path, listed: Listed | None = None) -> None:
        super().__init__()
        reader = open_reader(config.addresses[0], listed, config.follow_links)
        with ExitStack() as stack:
            running = [
                stack.enter_context(
                    StoreNode(
                        reader,
                        node=node,
                        nodes=config.nodes,
                        path=directory / f"node{node}.sock",
                        concurrency=config.threads,
                    )
                )
                for node in range(config.nodes)
            ]
            self._inner = NodeStorage(
                [node.endpoint for node in running],
                replicas=config.replicas,
                timeout=config.timeout,
            )
            self._running = stack.pop_all()
        self.table, self.nodes = self._inner.table, self._inner.nodes
        self.note = reader.note
        self._inner.on_reply = self._forward

    def submit(self, ticket: int, node: int, numbers: Positions) -> None:
        """See `Storage`."""
        self._inner.submit(ticket, node, numbers)

    def replies(self) -> list[Reply]:
        """See `Storage`."""
        return self._inner.replies()

    def close(self) -> None:
        """See `Storage`."""
        self._inner.close()
        self._running.close()

    def _forward(self) -> None:
        self.on_reply()
