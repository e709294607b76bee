"""Writing stores, and looking whether they are whole: samples packed into a few files, so that
millions of small ones cost one open file."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from lightning_dlres.core.errors import ConfigError, StorageError, got_expected
from lightning_dlres.prefetch.storage.listings import open_reader
from lightning_dlres.prefetch.storage.manifest import SampleTable
from lightning_dlres.prefetch.storage.readers import Reader, check
from lightning_dlres.prefetch.storage.store_writer import StoreWriter

_AT_ONCE = 256


def put(
    source: str | Path | Any,
    directory: str | Path,
    *,
    packs: int = 1,
    overwrite: bool = False,
    encode: Callable[[Any], bytes] | None = None,
    encoding: str = "raw",
    progress: Callable[[int, int], None] | None = None,
    noted: Callable[[str], None] | None = None,
    **source_arguments: Any,
) -> SampleTable:
    """Write a store and return its table.

    Args:
        source: a folder, store, listing or URL (see `open_reader`), or a map-style data set.
        directory: made where it is missing.
        packs: in how many files; sample i goes into file i mod `packs`.
        overwrite: whether a store that is there is replaced.
        encode: turns an item of a data set into bytes; None: the items are bytes.
        encoding: what to note about these bytes.
        progress: called with how many samples are written, and of how many.
        noted: called with what users are to know of the source, in a line.
        source_arguments: further arguments of `open_reader`.

    Raises:
        ConfigError: the source cannot be read, or the directory has a store already or cannot be
            written to. What was there stays.
        StorageError: a sample cannot be read.
    """
    target = Path(directory).expanduser()
    writer = StoreWriter(target, packs, overwrite)
    if isinstance(source, (str, Path)) and target.exists() and _is_same(source, target):
        raise ConfigError(
            f"The directory of a store must be another than its source, got {target} for both. "
            "Pass another directory."
        )
    total, items, encoding = _items(source, encode, encoding, noted, source_arguments)
    with writer:
        for number, (key, data) in enumerate(items):
            writer.write(key, data)
            if progress:
                progress(number + 1, total)
        return writer.commit(encoding)


def damaged(reader: Reader, progress: Callable[[int, int], None] | None = None) -> Iterator[str]:
    """Read a whole source and yield what is wrong, one line for each damaged or missing sample."""
    total = len(reader.table)
    for first in range(0, total, _AT_ONCE):
        numbers = np.arange(first, min(first + _AT_ONCE, total), dtype=np.uint32)
        if _damage(reader, numbers):
            # One by one, to name every one.
            yield from filter(None, (_damage(reader, one) for one in numbers.reshape(-1, 1)))
        if progress:
            progress(int(numbers[-1]) + 1, total)


def _is_same(source: str | Path, target: Path) -> bool:
    path = Path(source).expanduser()
    return path.exists() and path.samefile(target)


def _damage(reader: Reader, numbers: Any) -> str | None:
    try:
        return check(reader.table, numbers, reader.read(numbers))
    except (StorageError, OSError) as error:
        return str(error)


def _items(
    source: Any,
    encode: Callable[[Any], bytes] | None,
    encoding: str,
    noted: Callable[[str], None] | None,
    source_arguments: Mapping[str, Any],
) -> tuple[int, Iterator[tuple[str, bytes]], str]:
    if isinstance(source, (str, Path)):
        reader = open_reader(source, **source_arguments)
        if noted and reader.note:
            noted(reader.note)
        return len(reader.table), _read_all(reader), reader.table.encoding
    if not hasattr(source, "__getitem__") or not hasattr(source, "__len__"):
        raise ConfigError(
            got_expected(
                "source", type(source).__name__, "a path, a URL or a map-style data set", "a folder"
            )
        )
    return len(source), _encode_all(source, encode), encoding


def _read_all(reader: Reader) -> Iterator[tuple[str, bytes]]:
    for first in range(0, len(reader.table), _AT_ONCE):
        numbers = np.arange(first, min(first + _AT_ONCE, len(reader.table)), dtype=np.uint32)
        found = reader.read(numbers)
        if wrong := check(reader.table, numbers, found):
            raise StorageError(f"{wrong}. Nothing was written.")
        yield from zip(map(reader.table.key, numbers.tolist()), found, strict=True)


def _encode_all(source: Any, encode: Callable[[Any], bytes] | None) -> Iterator[tuple[str, bytes]]:
    width = len(str(max(len(source) - 1, 0)))
    for number in range(len(source)):
        item = source[number]
        try:
            data = encode(item) if encode else item
        except ConfigError as error:
            raise ConfigError(f"Item {number} of the data set: {error}") from error
        if not isinstance(data, (bytes, bytearray, memoryview)):
            raise ConfigError(
                got_expected(
                    f"item {number} of the data set",
                    type(data).__name__,
                    "bytes",
                    "an `encode` that returns bytes",
                )
            )
        yield f"{number:0{width}d}", bytes(data)
