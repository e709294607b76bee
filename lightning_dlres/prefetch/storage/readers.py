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
    """So many bytes of a file from a place on; `is_whole`: the file has no others."""

    path: str
    start: int
    length: int
    is_whole: bool


class Files(ABC):
    """A way to files.

    Attributes:
        name: for errors.
        is_concurrent: whether several threads read at once; else they wait for each other.
    """

    name = "files"
    is_concurrent = True

    @abstractmethod
    def read(self, pieces: Sequence[Piece]) -> list[bytes | OSError]:
        """Return pieces of files, or for each why it cannot be read. A file that is too short gives
        fewer bytes, and a whole file that is too long gives more."""


class LocalFiles(Files):
    """Files of this machine."""

    name = "local files"

    def __init__(self, keep_open: bool = False) -> None:
        self._open: dict[str, int] | None = {} if keep_open else None
        self._opening = threading.Lock()

    def read(self, pieces: Sequence[Piece]) -> list[bytes | OSError]:
        """See `Files`."""
        return [self._read_or_error(piece) for piece in pieces]

    def _read_or_error(self, piece: Piece) -> bytes | OSError:
        try:
            return self._read(piece)
        except OSError as error:
            return error

    def _read(self, piece: Piece) -> bytes:
        if self._open is None:
            descriptor = os.open(piece.path, os.O_RDONLY)
            try:
                # One byte more shows that a file has grown.
                return _read(descriptor, piece.length + int(piece.is_whole), piece.start)
            finally:
                os.close(descriptor)
        known = self._open.get(piece.path)
        if known is None:
            with self._opening:
                known = self._open.get(piece.path)
                if known is None:
                    known = self._open[piece.path] = os.open(piece.path, os.O_RDONLY)
        return _read(known, piece.length, piece.start)


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
            return [Piece(path, 0, size, True) for path, size in zip(paths, sizes, strict=True)]
        packs = (numbers % len(self._paths)).tolist()
        starts = self._offsets[numbers].tolist()
        return [
            Piece(self._paths[pack], start, size, False)
            for pack, start, size in zip(packs, starts, sizes, strict=True)
        ]

    @property
    def is_concurrent(self) -> bool:
        """Whether several threads read at once; else they wait for each other."""
        return self._files.is_concurrent

    def read(self, numbers: Positions) -> list[bytes]:
        """Return samples.

        Raises:
            StorageError: one cannot be read, or is not as long as it was; with its key.
            OSError: the way to the files fails; with the sample's key; another try may help.
        """
        pieces = self.pieces(numbers)
        samples = []
        for number, piece, data in zip(
            numbers.tolist(), pieces, self._files.read(pieces), strict=True
        ):
            if isinstance(data, OSError):
                raise self._unreadable(number, piece, data) from data
            if len(data) != piece.length:
                more = "more than " if len(data) > piece.length else f"{len(data)} bytes of "
                raise StorageError(
                    f"{self._named(number)}: got {more}the {piece.length} bytes of {piece.path} "
                    "that were listed. Has the file changed since then? Start again, or write the "
                    "store again with `dlres store put`."
                )
            samples.append(data)
        return samples

    def _named(self, number: int) -> str:
        return f"sample {self.table.key(number)!r} (number {number})"

    def _unreadable(self, number: int, piece: Piece, error: OSError) -> OSError | StorageError:
        text = f"{self._named(number)}: {error.strerror or error} ({piece.path})"
        if isinstance(error, (FileNotFoundError, PermissionError, IsADirectoryError)):
            return StorageError(f"{text}. Is the file still there, and may this user read it?")
        return OSError(text)


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
