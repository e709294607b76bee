"""Reading samples out of files: one file each or packed, on this machine or behind any URL that
fsspec knows, all with the same two methods.
"""

from __future__ import annotations

import os
import threading
import zlib
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from lightning_dlres.core.errors import StorageError
from lightning_dlres.prefetch.sequence import Positions
from lightning_dlres.prefetch.table import SampleTable

_MOST_PREAD = 1 << 30


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


def _offsets(table: SampleTable, packs: int) -> Any:
    offsets = np.empty(len(table), dtype=np.int64)
    for pack in range(packs):
        sizes = table.sizes[pack::packs]
        offsets[pack::packs] = np.cumsum(sizes) - sizes
    return offsets
