"""Reading samples out of files: one file each or packed, on this machine or behind any URL that
fsspec knows, all with the same two methods.
"""

from __future__ import annotations

import contextlib
import copy
import errno
import functools
import hashlib
import os
import resource
import threading
import zlib
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lightning_dlres.core.errors import StorageError
from lightning_dlres.prefetch.order.sequence import Positions
from lightning_dlres.prefetch.storage.local_reads import read_parts, read_whole
from lightning_dlres.prefetch.storage.manifest import SampleTable

_MOST_PREAD = 1 << 30
# Of these the bytes tell versions of a source apart that has no checksums: so many samples, evenly
# spread, and so many bytes of each.
_PROBES, _PROBE_BYTES = 16, 1 << 16
# Files that stay open, at most, and the part of the limit of open files that they may be.
_MOST_OPEN, _OPEN_PART = 256, 4
# Of files beyond these one read opens so many at once, at most.
_MOST_PASSING = 8


@dataclass(frozen=True)
class Piece:
    """So many bytes of a file from a place on; `is_whole`: the file has no others."""

    path: str
    start: int
    length: int
    is_whole: bool


@dataclass(frozen=True)
class PieceArrays:
    """PieceArrays of files: paths, and int64[n] each of where they start and how long they are."""

    paths: list[str]
    starts: NDArray[np.int64]
    sizes: NDArray[np.int64]


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

    def read_joined(self, pieces: PieceArrays) -> NDArray[np.uint8] | None:
        """Return pieces, one behind the other, in memory of their own; None if they have to be read
        one by one, to see what is wrong or because there is no other way."""
        return None


class LocalFiles(Files):
    """Files of this machine."""

    name = "local files"

    def __init__(self, keep_open: bool = False) -> None:
        self._open: dict[str, int] | None = {} if keep_open else None
        limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        unlimited = limit == resource.RLIM_INFINITY
        self._most_open = _MOST_OPEN if unlimited else min(_MOST_OPEN, limit // _OPEN_PART)
        self._opening = threading.Lock()

    def read(self, pieces: Sequence[Piece]) -> list[bytes | OSError]:
        """See `Files`."""
        return [self._read_or_error(piece) for piece in pieces]

    def read_joined(self, pieces: PieceArrays) -> NDArray[np.uint8] | None:
        """See `Files`."""
        if self._open is None:
            data, counts = read_whole(pieces.paths, pieces.sizes)
        else:
            try:
                with self._descriptors(pieces.paths) as open_files:
                    descriptors = np.array(open_files, dtype=np.int32)
                    data, counts = read_parts(descriptors, pieces.starts, pieces.sizes)
            except OSError:
                return None
        return data if np.array_equal(counts, pieces.sizes) else None

    def __getstate__(self) -> dict[str, Any]:
        return {"_open": None if self._open is None else {}}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(keep_open=state["_open"] is not None)  # type: ignore[misc]

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
        with self._descriptors([piece.path]) as (descriptor,):
            return _read(descriptor, piece.length, piece.start)

    @contextlib.contextmanager
    def _descriptors(self, paths: Sequence[str]) -> Iterator[list[int]]:
        """Context manager that gives an open file for each path. The first files stay open, the
        others are closed again: a store may have more packs than a process may open files.

        Raises:
            OSError: one cannot be opened, or too many are to be open at once.
        """
        passing: dict[str, int] = {}
        try:
            yield [self._descriptor(path, passing) for path in paths]
        finally:
            for descriptor in passing.values():
                os.close(descriptor)

    def _descriptor(self, path: str, passing: dict[str, int]) -> int:
        assert self._open is not None
        known = self._open.get(path, passing.get(path))
        if known is not None:
            return known
        with self._opening:
            known = self._open.get(path)
            if known is None:
                kept = self._open if len(self._open) < self._most_open else passing
                if len(passing) == _MOST_PASSING:
                    raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
                known = kept[path] = os.open(path, os.O_RDONLY)
        return known


class Reader:
    """The samples of one source.

    Args:
        table: keys, sizes and checksums.
        files: the way to the files.
        paths: of the packs, sample i being in pack i mod their number; or of the samples' own
            files.
        packed: which of the two.
        note: what users are to know of the source, in a line; "": nothing.
    """

    def __init__(
        self,
        table: SampleTable,
        files: Files,
        paths: Sequence[str],
        packed: bool,
        note: str = "",
    ) -> None:
        self.table, self.note = table, note
        self._files, self._paths = files, paths
        self._offsets = _offsets(table, len(paths)) if packed else None
        # Of a part: the number that each sample has in the whole source.
        self._whole_numbers: Positions | None = None

    def part(self, numbers: Positions) -> Reader:
        """Return the reader of some samples of a whole source, uint32[n], ascending. They get new
        numbers from 0."""
        part = copy.copy(self)
        part.table, part._whole_numbers = self.table.selected(numbers), numbers
        # It has other samples to look at.
        vars(part).pop("contents", None)
        return part

    def pieces(self, numbers: Positions) -> list[Piece]:
        """Return where samples are."""
        sizes = self.table.sizes[numbers].tolist()
        numbers = self._in_whole(numbers)
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

    @functools.cached_property
    def contents(self) -> str:
        """A fingerprint of the first 64 KiB of 16 samples, evenly spread: versions of a source with
        the same keys and sizes mostly differ in it. "" where the table has checksums.

        Raises:
            StorageError: one of them cannot be read.
        """
        if self.table.checksums is not None:
            return ""
        filled = np.flatnonzero(self.table.sizes)
        spread = np.linspace(0, len(filled) - 1, min(_PROBES, len(filled))).astype(np.int64)
        numbers = filled[spread].astype(np.uint32)
        pieces = [
            replace(piece, length=min(piece.length, _PROBE_BYTES), is_whole=False)
            for piece in self.pieces(numbers)
        ]
        found = hashlib.blake2b(digest_size=16)
        for number, piece, data in zip(
            numbers.tolist(), pieces, self._files.read(pieces), strict=True
        ):
            if isinstance(data, OSError):
                raise StorageError(str(self._unreadable(number, piece, data))) from data
            found.update(data)
        return found.hexdigest()

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

    def read_joined(self, numbers: Positions) -> NDArray[np.uint8]:
        """Return samples as uint8[sum of their sizes], one behind the other, in memory of their
        own. Raises what `read` does."""
        sizes = np.ascontiguousarray(self.table.sizes[numbers], dtype=np.int64)
        places = self._in_whole(numbers)
        if self._offsets is None:
            paths = [self._paths[place] for place in places.tolist()]
            pieces = PieceArrays(paths, np.zeros_like(sizes), sizes)
        else:
            paths = [self._paths[pack] for pack in (places % len(self._paths)).tolist()]
            pieces = PieceArrays(paths, self._offsets[places], sizes)
        data = self._files.read_joined(pieces)
        if data is None:
            data = np.frombuffer(bytearray(b"".join(self.read(numbers))), dtype=np.uint8)
        return data

    def _in_whole(self, numbers: Positions) -> Positions:
        return numbers if self._whole_numbers is None else self._whole_numbers[numbers]

    def _named(self, number: int) -> str:
        return f"sample {self.table.key(number)!r} (number {number})"

    def _unreadable(self, number: int, piece: Piece, error: OSError) -> OSError | StorageError:
        text = f"{self._named(number)}: {error.strerror or error} ({piece.path})"
        if error.errno in (errno.EMFILE, errno.ENFILE):
            return StorageError(f"{text}. Raise the limit of open files (`ulimit -n`).")
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
