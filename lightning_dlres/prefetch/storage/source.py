"""From a description of a storage to the storage."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

from lightning_dlres.core.errors import ConfigError, got_expected
from lightning_dlres.core.wire.keys import CurveKeys
from lightning_dlres.prefetch.order.sequence import Positions
from lightning_dlres.prefetch.storage.base import Reply, Storage
from lightning_dlres.prefetch.storage.files import FileStorage
from lightning_dlres.prefetch.storage.labels import check_classes, class_names
from lightning_dlres.prefetch.storage.listings import Listed, open_reader
from lightning_dlres.prefetch.storage.nodes.node_storage import Identity, NodeStorage
from lightning_dlres.prefetch.storage.nodes.server import StoreNode
from lightning_dlres.prefetch.storage.readers import Reader
from lightning_dlres.prefetch.storage.source_options import SourceConfig, load_storage_options

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
        nodes = NodeStorage(
            config.addresses,
            replicas=config.replicas,
            timeout=config.timeout,
            identity=identity,
        )
        try:
            check_classes(nodes.table, config.classes, config.addresses[0])
        except ConfigError:
            nodes.close()
            raise
        return nodes
    if config.kind == "files":
        reader = open_source(config, listed)
        return FileStorage(reader, config.nodes, config.threads, config.timeout)
    if config.kind == "embedded":
        return EmbeddedStorage(config, directory, listed)
    raise ConfigError(got_expected("storage", config.kind, " or ".join(KINDS), "'embedded'"))


def open_source(config: SourceConfig, listed: Listed | None = None) -> Reader:
    """Return the reader of a source that is no storage node.

    Raises:
        ConfigError: There is no such source, or a sample lies in no folder of a class.
    """
    source = config.addresses[0]
    reader = open_reader(
        source,
        listed,
        follow_links=config.follow_links,
        extensions=config.extensions,
        storage_options=load_storage_options(config.storage_options),
    )
    check_classes(reader.table, config.classes, source)
    return reader


def source_classes(config: SourceConfig) -> tuple[str, ...]:
    """Return the folders that the samples of a source lie in, in alphabetical order; the source is
    opened for it.

    Raises:
        ConfigError: There is no such source, or a sample lies in no folder.
        PeerTimeoutError: A storage node does not answer.
    """
    if config.kind != "nodes":
        return class_names(open_source(config).table, config.addresses[0])
    nodes = open_storage(config, Path())
    try:
        return class_names(nodes.table, config.addresses[0])
    finally:
        nodes.close()


class EmbeddedStorage(Storage):
    """Storage nodes in this process, over Unix sockets that only this user can reach: what runs on
    many hosts, on one."""

    def __init__(self, config: SourceConfig, directory: Path, listed: Listed | None = None) -> None:
        super().__init__()
        reader = open_source(config, listed)
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
