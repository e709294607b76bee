"""Writing and verification of stores: samples are packed into a few files.

Millions of small samples can then be read with one open file for each pack.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from lightning_dlres.core.errors import ConfigError, StorageError, add_note, got_expected
from lightning_dlres.prefetch.order.sequence import SampleIds
from lightning_dlres.prefetch.storage.listings import open_reader
from lightning_dlres.prefetch.storage.manifest import SampleTable
from lightning_dlres.prefetch.storage.readers import Reader, checksum_error
from lightning_dlres.prefetch.storage.store_writer import StoreWriter

# Samples that are read with one call.
_SAMPLES_PER_READ = 256


def put(
    source: str | Path | Any,
    directory: str | Path,
    *,
    packs: int = 1,
    overwrite: bool = False,
    encode: Callable[[Any], bytes] | None = None,
    encoding: str = "raw",
    progress: Callable[[int, int], None] | None = None,
    on_note: Callable[[str], None] | None = None,
    **source_arguments: Any,
) -> SampleTable:
    """Write a store and return its table.

    Args:
        source: A folder, store, listing or URL (see `open_reader`), or a map-style data set.
        directory: Directory of the store; made if it is missing. It must lie outside of the source.
        packs: Number of pack files; sample i goes into pack i mod `packs`.
        overwrite: True to replace an existing store.
        encode: Function that turns an item of a data set into bytes; None if items are bytes.
        encoding: Name of the format of these bytes, see `SampleTable`. Samples of a path or URL are
            copied as they are: `encode` and `encoding` have no effect.
        progress: Called with the number of samples written so far, and of all samples.
        on_note: Called with the reader's line for users, if there is one; see `Reader`.
        source_arguments: Further arguments of `open_reader`; none for a data set.

    Raises:
        ConfigError: If the source cannot be read or an item is not bytes, if `packs` is out of
            range, if an argument of `open_reader` is given with a data set, if the directory is the
            source or inside it, if it has a store and `overwrite` is False, or if it cannot be
            written to. An existing store is left as it was.
        StorageError: If a sample cannot be read.
        TypeError: If `open_reader` has no such argument.
    """
    target = Path(directory).expanduser()
    writer = StoreWriter(target, packs, overwrite)
    if isinstance(source, (str, Path)):
        _require_outside(target, source)
    total, items, encoding = _items(source, encode, encoding, on_note, source_arguments)
    with writer:
        for written, (key, data) in enumerate(items, 1):
            writer.write(key, data)
            if progress:
                progress(written, total)
        return writer.commit(encoding)


def find_damage(
    reader: Reader, progress: Callable[[int, int], None] | None = None
) -> Iterator[str]:
    """Read a whole source and yield a line for each damaged or missing sample.

    Args:
        reader: Reader of the source.
        progress: Called with the number of samples read so far, and of all samples.
    """
    total = len(reader.table)
    for first in range(0, total, _SAMPLES_PER_READ):
        sample_ids = np.arange(first, min(first + _SAMPLES_PER_READ, total), dtype=np.uint32)
        if _read_error(reader, sample_ids):
            # Read the samples again one by one, to name each that is damaged.
            errors = (_read_error(reader, one) for one in sample_ids.reshape(-1, 1))
            yield from filter(None, errors)
        if progress:
            progress(int(sample_ids[-1]) + 1, total)


def _require_outside(target: Path, source: str | Path) -> None:
    """Raise an error if the store would be the source itself, or lie inside it.

    The packs would be samples of the source when the store is written again.
    """
    # URLs of other schemes name no folder of this host.
    path = str(source).removeprefix("file://").removeprefix("local://")
    folder = Path(path).expanduser().resolve()
    if folder.is_dir() and target.resolve().is_relative_to(folder):
        raise ConfigError(
            f"directory must be outside of the source {folder}, got {target}. Pass another "
            "directory."
        )


def _read_error(reader: Reader, sample_ids: SampleIds) -> str | None:
    try:
        return checksum_error(reader.table, sample_ids, reader.read(sample_ids))
    except (StorageError, OSError) as error:
        return str(error)


def _items(
    source: Any,
    encode: Callable[[Any], bytes] | None,
    encoding: str,
    on_note: Callable[[str], None] | None,
    source_arguments: Mapping[str, Any],
) -> tuple[int, Iterator[tuple[str, bytes]], str]:
    if isinstance(source, (str, Path)):
        reader = open_reader(source, **source_arguments)
        if on_note and reader.note:
            on_note(reader.note)
        return len(reader.table), _read_all(reader), reader.table.encoding
    if not hasattr(source, "__getitem__") or not hasattr(source, "__len__"):
        raise ConfigError(
            got_expected(
                "source", type(source).__name__, "a path, a URL or a map-style data set", "a folder"
            )
        )
    if source_arguments:
        names = sorted(source_arguments)
        raise ConfigError(
            f"Further arguments must be given only with a path or URL, got {names} with a data "
            "set. Leave them out."
        )
    return len(source), _encode_all(source, encode), encoding


def _read_all(reader: Reader) -> Iterator[tuple[str, bytes]]:
    for first in range(0, len(reader.table), _SAMPLES_PER_READ):
        end = min(first + _SAMPLES_PER_READ, len(reader.table))
        sample_ids = np.arange(first, end, dtype=np.uint32)
        samples = reader.read(sample_ids)
        if problem := checksum_error(reader.table, sample_ids, samples):
            raise StorageError(f"{problem}. No store was written; repair the source first.")
        yield from zip(map(reader.table.key, sample_ids.tolist()), samples, strict=True)


def _encode_all(source: Any, encode: Callable[[Any], bytes] | None) -> Iterator[tuple[str, bytes]]:
    width = len(str(max(len(source) - 1, 0)))
    for index in range(len(source)):
        try:
            item = source[index]
        except Exception as error:
            add_note(error, f"Item {index} of the data set was read, to be written into a store.")
            raise
        try:
            data = encode(item) if encode else item
        except ConfigError as error:
            raise ConfigError(f"Item {index} of the data set: {error}") from error
        if not isinstance(data, (bytes, bytearray, memoryview)):
            raise ConfigError(
                got_expected(
                    f"item {index} of the data set",
                    type(data).__name__,
                    "bytes",
                    "an `encode` that returns bytes",
                )
            )
        yield f"{index:0{width}d}", bytes(data)
