"""Readers and classes of a source of samples, made from its configuration."""

from __future__ import annotations

import tempfile
from contextlib import closing
from pathlib import Path

from lightning_dlres.prefetch.storage.base import ReportProgress
from lightning_dlres.prefetch.storage.labels import check_classes, class_names
from lightning_dlres.prefetch.storage.listings import open_reader
from lightning_dlres.prefetch.storage.readers import Reader
from lightning_dlres.prefetch.storage.registry import open_storage, storage_backend
from lightning_dlres.prefetch.storage.source_options import SourceConfig, load_storage_options


def open_source_unchecked(
    config: SourceConfig, report_progress: ReportProgress | None = None
) -> Reader:
    """Return the reader of a source of files, without the check of classes in `open_source`.

    Raises:
        ConfigError: If there is no such source.
    """
    return open_reader(
        config.addresses[0],
        report_progress,
        follow_links=config.follow_links,
        extensions=config.extensions,
        storage_options=load_storage_options(config.storage_options),
    )


def open_source(config: SourceConfig) -> Reader:
    """Return the reader of a source of files.

    Raises:
        ConfigError: If there is no such source, or a sample lies outside of the folders of the
            classes.
    """
    reader = open_source_unchecked(config)
    check_classes(reader.table, config.classes, config.addresses[0])
    return reader


def source_classes(config: SourceConfig) -> tuple[str, ...]:
    """Return the folders that the samples of a source lie in, in alphabetical order.

    This opens the source, and lists its files or gets the list from a storage.

    Raises:
        ConfigError: If there is no such source, or a sample lies in no folder.
        PeerTimeoutError: If a storage node does not answer.
    """
    source = config.addresses[0]
    if storage_backend(config.storage).reads_files:
        return class_names(open_source(config).table, source)
    with tempfile.TemporaryDirectory(prefix="dlres-") as directory:
        with closing(open_storage(config, Path(directory))) as storage:
            return class_names(storage.table, source)
