"""Reading samples out of files: one file each or packed, on this machine or behind any URL that
fsspec knows, all with the same two methods.
"""

from __future__ import annotations

import os
import threading
import zlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import numpy as np

from lightning_dlres.core.errors import ConfigError, StorageError
from lightning_dlres.prefetch.sequence import Positions
from lightning_dlres.prefetch.table import MANIFEST, SampleTable

_LISTINGS = (".txt", ".tsv")
Listed = Callable[[int], None]
_MOST_PREAD = 1 << 30
# What packs are called.
PACKS = "samples-*-of-*.bin"


@dataclass(frozen=True)
class Piece:
    """So many bytes of a file from a place on."""

    path: str
    start: int
    length: int


class Files(ABC):
    """A way to files."""

    name = "files"

    @abstractmethod
    def read(self, pieces: Sequence[Piece]) -> list[bytes]:
        """Return pieces of files; a file that is too short gives fewer bytes.

        Raises:
            OSError: one cannot be read.
        """


class LocalFiles(Files):
    """Files of this machine."""

    name = "local files"

    def __init__(self, keep_open: bool = False) -> None:
        self._open: dict[str, int] | None = {} if keep_open else None
        self._opening = threading.Lock()

    def read(self, pieces: Sequence[Piece]) -> list[bytes]:
        """See `Files`."""
        return [self._read(piece) for piece in pieces]

    def _read(self, piece: Piece) -> bytes:
        if self._open is None:
            descriptor = os.open(piece.path, os.O_RDONLY)
            try:
                # One byte more shows that a file has grown.
                return _read(descriptor, piece.length + 1, piece.start)
            finally:
                os.close(descriptor)
        known = self._open.get(piece.path)
        if known is None:
            with self._opening:
                known = self._open.get(piece.path)
                if known is None:
                    known = self._open[piece.path] = os.open(piece.path, os.O_RDONLY)
        return _read(known, piece.length, piece.start)


class UrlFiles(Files):
    """Files behind a URL: pieces are read at once, by as many requests as fsspec makes."""

    def __init__(self, system: Any) -> None:
        self._system = system
        self.name = f"{type(system).__name__} of fsspec"

    def read(self, pieces: Sequence[Piece]) -> list[bytes]:
        """See `Files`."""
        # Nothing is asked for where there is nothing: not every server takes an empty range.
        asked = [piece for piece in pieces if piece.length]
        found = iter(
            self._system.cat_ranges(
                [piece.path for piece in asked],
                [piece.start for piece in asked],
                [piece.start + piece.length for piece in asked],
                on_error="raise",
            )
        )
        return [next(found) if piece.length else b"" for piece in pieces]


class Reader:
    """The samples of one source.

    Args:
        table: keys, sizes and checksums.
        files: the way to the files.
        paths: of the packs, sample i being in pack i mod their number; or of the samples' own
            files.
        packed: which of the two.
    """

    def __init__(
        self, table: SampleTable, files: Files, paths: Sequence[str], packed: bool
    ) -> None:
        self.table = table
        self._files, self._paths = files, paths
        self._offsets = _offsets(table, len(paths)) if packed else None

    def pieces(self, numbers: Positions) -> list[Piece]:
        """Return where samples are."""
        sizes = self.table.sizes[numbers].tolist()
        if self._offsets is None:
            paths = [self._paths[number] for number in numbers.tolist()]
            return [Piece(path, 0, size) for path, size in zip(paths, sizes, strict=True)]
        packs = (numbers % len(self._paths)).tolist()
        starts = self._offsets[numbers].tolist()
        return [
            Piece(self._paths[pack], start, size)
            for pack, start, size in zip(packs, starts, sizes, strict=True)
        ]

    def read(self, numbers: Positions) -> list[bytes]:
        """Return samples.

        Raises:
            StorageError: one cannot be read, or is not as long as it was; with its key.
            OSError: the way to the files fails; another try may help.
        """
        pieces = self.pieces(numbers)
        try:
            found = self._files.read(pieces)
        except (FileNotFoundError, PermissionError, IsADirectoryError) as error:
            raise self._unreadable(numbers, error) from error
        for number, piece, data in zip(numbers.tolist(), pieces, found, strict=True):
            if len(data) != piece.length:
                raise StorageError(
                    f"sample {self.table.key(number)!r} (number {number}): got {len(data)} bytes "
                    f"of {piece.path}, expected {piece.length}. Has the file changed since it was "
                    "listed? Start again, or write the store again with `dlres store put`."
                )
        return found

    def _unreadable(self, numbers: Positions, error: OSError) -> StorageError:
        path = str(error.filename or "")
        names = [
            self.table.key(number)
            for number, piece in zip(numbers.tolist(), self.pieces(numbers), strict=True)
            if piece.path == path
        ]
        which = f"sample {names[0]!r}" if names else f"one of {len(numbers)} samples"
        return StorageError(
            f"{which}: {error.strerror or error} ({path or self._files.name}). Is the file still "
            "there, and may this user read it?"
        )


def _read(descriptor: int, length: int, start: int) -> bytes:
    """Return what is there of so many bytes; the system gives less than 2 GiB at a time."""
    if length <= _MOST_PREAD:
        return os.pread(descriptor, length, start)
    first = os.pread(descriptor, _MOST_PREAD, start)
    if len(first) < _MOST_PREAD:
        return first
    return first + _read(descriptor, length - _MOST_PREAD, start + _MOST_PREAD)


def check(table: SampleTable, numbers: Positions, data: Sequence[memoryview | bytes]) -> str | None:
    """Return what is damaged about samples, or None; without checksums nothing is."""
    if table.checksums is None:
        return None
    for number, piece, expected in zip(
        numbers.tolist(), data, table.checksums[numbers].tolist(), strict=True
    ):
        found = zlib.crc32(piece)
        if found != expected:
            return (
                f"sample {table.key(number)!r} (number {number}) is damaged: got CRC-32 "
                f"{found:08x}, expected {expected:08x}"
            )
    return None


def open_reader(source: str | Path, listed: Listed | None = None) -> Reader:
    """Return the reader of a store, a folder, a listing or a URL of a store or folder.

    A listing is a text file (.txt, .tsv) with one sample in each line: a path, or a key, a tab and
    a path; relative paths count from the listing.

    Args:
        source: what to read.
        listed: called now and then with how many samples were found.

    Raises:
        ConfigError: there is nothing of the kind.
    """
    text = str(source)
    if "://" in text:
        return _open_url(text)
    path = Path(text).expanduser().absolute()
    if path.is_dir():
        if (path / MANIFEST).exists():
            table = SampleTable.load(path / MANIFEST)
            if table.packs:
                return _packed(table, LocalFiles(keep_open=True), f"{path}/")
        return _folder(path, listed)
    if path.suffix in _LISTINGS and path.is_file():
        return _listed(path, listed)
    raise ConfigError(
        f"a data set: got {text!r}, expected a folder, a store, a listing (.txt or .tsv), or a "
        "URL. " + ("Its ending is none of these." if path.is_file() else "Nothing is there.")
    )


def pack_name(pack: int, packs: int) -> str:
    """Return what a pack's file is called."""
    return f"samples-{pack:05d}-of-{packs:05d}.bin"


def _packed(table: SampleTable, files: Files, prefix: str) -> Reader:
    names = [prefix + pack_name(pack, table.packs) for pack in range(table.packs)]
    return Reader(table, files, names, packed=True)


def _folder(root: Path, listed: Listed | None) -> Reader:
    """Every file of a folder and those below it, but for hidden ones."""
    keys = []
    for directory, below, names in os.walk(root):
        below[:] = [name for name in below if not name.startswith(".")]
        inside = (
            "" if directory == str(root) else f"{Path(directory).relative_to(root).as_posix()}/"
        )
        keys += [inside + name for name in names if not name.startswith(".")]
        if listed:
            listed(len(keys))
    keys.sort()
    if not keys:
        raise ConfigError(
            f"a data set: got {root}, expected files in it. Hidden ones do not count."
        )
    _refuse_unfinished(keys, str(root))
    paths = [f"{root}/{key}" for key in keys]
    table = SampleTable.build(keys, _sizes(paths, listed))
    return Reader(table, LocalFiles(), paths, packed=False)


def _listed(listing: Path, listed: Listed | None) -> Reader:
    keys, paths = [], []
    for line in listing.read_text(encoding="utf-8").splitlines():
        if line.strip():
            key, tab, path = line.partition("\t")
            keys.append(key)
            paths.append(str(listing.parent / (path if tab else key)))
    table = SampleTable.build(keys, _sizes(paths, listed))
    return Reader(table, LocalFiles(), paths, packed=False)


def _refuse_unfinished(keys: Sequence[str], name: str) -> None:
    """Raise where a folder is a store without its manifest: its packs are no samples."""
    packs = [key for key in keys if fnmatch(key, PACKS) or fnmatch(key, f"{PACKS}.part")]
    if packs:
        raise ConfigError(
            f"a data set: got {name} with {packs[0]} and no {MANIFEST}, expected a whole store, or "
            "a folder of samples. Write it again with `dlres store put --overwrite`."
        )


def _sizes(paths: Iterable[str], listed: Listed | None) -> list[int]:
    sizes: list[int] = []
    for path in paths:
        sizes.append(_size(path))
        if listed:
            listed(len(sizes))
    return sizes


def _size(path: str) -> int:
    try:
        return os.stat(path).st_size
    except OSError as error:
        raise ConfigError(
            f"a data set: {path}: {error.strerror}. Expected a file that can be read."
        ) from error


def _open_url(url: str) -> Reader:
    import fsspec

    try:
        system, root = fsspec.core.url_to_fs(url)
        files, prefix = UrlFiles(system), root.rstrip("/") + "/"
        if system.exists(prefix + MANIFEST):
            data = np.frombuffer(system.cat_file(prefix + MANIFEST), dtype=np.uint8)
            return _packed(SampleTable.from_bytes(data, url), files, prefix)
        found = system.find(root, detail=True)
    except (ImportError, ValueError, OSError) as error:
        raise ConfigError(
            f"a data set: {url}: {error or type(error).__name__}. Expected a URL that fsspec can "
            "open, of a store or a folder."
        ) from error
    files_of = {
        path.removeprefix(prefix): path
        for path, info in found.items()
        if info["type"] == "file" and "/." not in "/" + path.removeprefix(prefix)
    }
    keys = sorted(files_of)
    paths = [files_of[key] for key in keys]
    if not paths:
        raise ConfigError(f"a data set: {url}: got no files, expected a store or a folder.")
    _refuse_unfinished(keys, url)
    sizes = [int(found[path]["size"]) for path in paths]
    return Reader(SampleTable.build(keys, sizes), files, paths, packed=False)


def _offsets(table: SampleTable, packs: int) -> Any:
    offsets = np.empty(len(table), dtype=np.int64)
    for pack in range(packs):
        sizes = table.sizes[pack::packs]
        offsets[pack::packs] = np.cumsum(sizes) - sizes
    return offsets
