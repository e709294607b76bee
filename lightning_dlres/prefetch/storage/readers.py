"""Readers of samples from files: one file for each sample, or packs of many samples.

The files lie on this host, or at any URL that fsspec knows. `Files` is the interface to both.
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
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lightning_dlres.core.errors import StorageError
from lightning_dlres.prefetch.order.sequence import SampleIds
from lightning_dlres.prefetch.storage.local_reads import read_parts, read_whole
from lightning_dlres.prefetch.storage.manifest import SampleTable

# Maximum bytes of one `pread` call. Linux reads less than 2 GiB per call.
_MAX_PREAD_BYTES = 1 << 30
# `Reader.content_digest` hashes the first _PROBE_BYTES bytes of _PROBES samples, evenly spread.
_PROBES, _PROBE_BYTES = 16, 1 << 16
# Maximum number of files that stay open: _MAX_OPEN, or 1/_OPEN_FRACTION of the process's limit of
# open files if that is less.
_MAX_OPEN, _OPEN_FRACTION = 256, 4
# Maximum number of files that one read opens at once beside those that stay open.
_MAX_TEMPORARY = 8


@dataclass(frozen=True)
class Piece:
    """Part of a file.

    Attributes:
        path: Path of the file.
        start: Offset in bytes.
        length: Length in bytes.
        is_whole: True if the piece is the whole file.
    """

    path: str
    start: int
    length: int
    is_whole: bool


@dataclass(frozen=True)
class PieceArrays:
    """Parts of n files, as arrays; each is a `Piece`.

    Attributes:
        paths: Paths of the files.
        starts: int64[n], offsets in bytes.
        sizes: int64[n], lengths in bytes.
    """

    paths: list[str]
    starts: NDArray[np.int64]
    sizes: NDArray[np.int64]


class Files(ABC):
    """Access to files by path.

    Attributes:
        name: Kind of access, such as "local files", for errors.
        is_concurrent: True if several threads read at once; False if they wait for each other.
    """

    name = "files"
    is_concurrent = True

    @abstractmethod
    def read(self, pieces: Sequence[Piece]) -> list[bytes | OSError]:
        """Return for each piece its bytes, or the error if it cannot be read.

        A file that is too short gives fewer bytes. A whole file that is too long gives more.
        """

    def read_joined(self, pieces: PieceArrays) -> NDArray[np.uint8] | None:
        """Return pieces, concatenated, in memory that only the caller uses; None to use `read`.

        None means that a piece cannot be read, or that this access cannot read several pieces at
        once. In both cases call `read`, which returns the error if there is one.
        """
        return None


class LocalFiles(Files):
    """Files on this host.

    Args:
        keep_open: True to keep files open between reads, for packs.
    """

    name = "local files"

    def __init__(self, keep_open: bool = False) -> None:
        self._open: dict[str, int] | None = {} if keep_open else None
        limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        unlimited = limit == resource.RLIM_INFINITY
        self._max_open = _MAX_OPEN if unlimited else min(_MAX_OPEN, limit // _OPEN_FRACTION)
        # Guards the opening of files and additions to `_open`. Look-ups need no lock.
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

    # Descriptors and locks are not sent to another process: it opens the files again.
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
                # Ask for one byte more: if it comes, the file has grown since it was listed.
                return _read(descriptor, piece.length + int(piece.is_whole), piece.start)
            finally:
                os.close(descriptor)
        with self._descriptors([piece.path]) as (descriptor,):
            return _read(descriptor, piece.length, piece.start)

    @contextlib.contextmanager
    def _descriptors(self, paths: Sequence[str]) -> Iterator[list[int]]:
        """Context manager that gives an open descriptor for each path.

        The first files stay open for later reads; the others are closed at the end. The reason is
        that a store may have more packs than a process may open files.

        Raises:
            OSError: If a file cannot be opened, or too many would be open at once.
        """
        temporary: dict[str, int] = {}
        try:
            yield [self._descriptor(path, temporary) for path in paths]
        finally:
            for descriptor in temporary.values():
                os.close(descriptor)

    def _descriptor(self, path: str, temporary: dict[str, int]) -> int:
        assert self._open is not None
        descriptor = self._open.get(path, temporary.get(path))
        if descriptor is not None:
            return descriptor
        with self._opening:
            # Another thread may have opened it while this one waited for the lock.
            descriptor = self._open.get(path)
            if descriptor is None:
                stays_open = len(self._open) < self._max_open
                if len(temporary) == _MAX_TEMPORARY:
                    raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
                descriptor = os.open(path, os.O_RDONLY)
                (self._open if stays_open else temporary)[path] = descriptor
        return descriptor


class Reader:
    """Reader of the samples of one source.

    Args:
        table: Keys, sizes and checksums.
        files: Access to the files.
        paths: With `packed`, the paths of the packs; sample i is in pack i mod len(paths).
            Otherwise the path of each sample's file.
        packed: True if the source is a store, whose packs hold many samples each.
        note: Line to print about the source, such as about links that were left out; "" for none.
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
        # For a selection: the id that each sample has in the whole source.
        self._whole_ids: SampleIds | None = None

    def select(self, sample_ids: SampleIds) -> Reader:
        """Return the reader of some samples, which get new ids from 0.

        Args:
            sample_ids: uint32[n], ascending. This reader must not be a selection itself.
        """
        selection = copy.copy(self)
        selection.table, selection._whole_ids = self.table.select(sample_ids), sample_ids
        # The copy has the cached digest of the whole source. Drop it, so that it is computed anew.
        vars(selection).pop("content_digest", None)
        return selection

    def pieces(self, sample_ids: SampleIds) -> list[Piece]:
        """Return the piece of a file that holds each sample."""
        sizes = self.table.sizes[sample_ids].tolist()
        whole_ids = self._to_whole_ids(sample_ids)
        if self._offsets is None:
            paths = [self._paths[whole_id] for whole_id in whole_ids.tolist()]
            return [Piece(path, 0, size, True) for path, size in zip(paths, sizes, strict=True)]
        packs = (whole_ids % len(self._paths)).tolist()
        starts = self._offsets[whole_ids].tolist()
        return [
            Piece(self._paths[pack], start, size, False)
            for pack, start, size in zip(packs, starts, sizes, strict=True)
        ]

    @property
    def is_concurrent(self) -> bool:
        """True if several threads read at once; False if they wait for each other."""
        return self._files.is_concurrent

    @functools.cached_property
    def content_digest(self) -> str:
        """Hash of the first 64 KiB of 16 samples, evenly spread; "" if the table has checksums.

        It distinguishes most versions of a source that have the same keys and sizes.

        Raises:
            StorageError: If one of the samples cannot be read.
        """
        if self.table.checksums is not None:
            return ""
        filled = np.flatnonzero(self.table.sizes)
        spread = np.linspace(0, len(filled) - 1, min(_PROBES, len(filled))).astype(np.int64)
        sample_ids = filled[spread].astype(np.uint32)
        pieces = [
            replace(piece, length=min(piece.length, _PROBE_BYTES), is_whole=False)
            for piece in self.pieces(sample_ids)
        ]
        digest = hashlib.blake2b(digest_size=16)
        for sample_id, piece, data in zip(
            sample_ids.tolist(), pieces, self._files.read(pieces), strict=True
        ):
            if isinstance(data, OSError):
                raise StorageError(str(self._read_error(sample_id, piece, data))) from data
            digest.update(data)
        return digest.hexdigest()

    def read(self, sample_ids: SampleIds) -> list[bytes]:
        """Return samples.

        Raises:
            StorageError: If a sample is gone, may not be read, or has another size than listed.
            OSError: If the access to the files fails otherwise; another try may help.
        """
        samples = []
        for data in self.read_each(sample_ids):
            if isinstance(data, OSError):
                raise data
            samples.append(data)
        return samples

    def read_each(self, sample_ids: SampleIds) -> list[bytes | OSError]:
        """Return each sample, or the error of its access to the files; another try may help.

        Raises:
            StorageError: If a sample is gone, may not be read, or has another size than listed.
            OSError: If the access to all of the files fails.
        """
        pieces = self.pieces(sample_ids)
        samples: list[bytes | OSError] = []
        for sample_id, piece, data in zip(
            sample_ids.tolist(), pieces, self._files.read(pieces), strict=True
        ):
            if isinstance(data, OSError):
                error = self._read_error(sample_id, piece, data)
                if isinstance(error, StorageError):
                    raise error from data
                samples.append(error)
                continue
            if len(data) > piece.length and not piece.is_whole:
                raise StorageError(
                    f"{self._describe(sample_id)}: got more than the {piece.length} bytes of "
                    f"{piece.path} that were asked for. The server seems to ignore byte ranges: "
                    "use one that answers them, or serve the folder of samples itself."
                )
            if len(data) != piece.length:
                more = "more than " if len(data) > piece.length else f"{len(data)} bytes of "
                raise StorageError(
                    f"{self._describe(sample_id)}: got {more}the {piece.length} bytes of "
                    f"{piece.path} that were listed. The file has changed since then: start the "
                    "run again, or write the store again with `dlres store put`."
                )
            samples.append(data)
        return samples

    def read_joined(self, sample_ids: SampleIds) -> NDArray[np.uint8]:
        """Return samples as uint8[sum of their sizes], concatenated, in memory that only the
        caller uses. Raises the errors of `read`."""
        data = self.read_at_once(sample_ids)
        return joined(self.read(sample_ids)) if data is None else data

    def read_at_once(self, sample_ids: SampleIds) -> NDArray[np.uint8] | None:
        """Return samples as `read_joined` does; None if `read` must read them, or show an error."""
        sizes = np.ascontiguousarray(self.table.sizes[sample_ids], dtype=np.int64)
        whole_ids = self._to_whole_ids(sample_ids)
        if self._offsets is None:
            paths = [self._paths[whole_id] for whole_id in whole_ids.tolist()]
            pieces = PieceArrays(paths, np.zeros_like(sizes), sizes)
        else:
            paths = [self._paths[pack] for pack in (whole_ids % len(self._paths)).tolist()]
            pieces = PieceArrays(paths, self._offsets[whole_ids], sizes)
        return self._files.read_joined(pieces)

    def _to_whole_ids(self, sample_ids: SampleIds) -> SampleIds:
        return sample_ids if self._whole_ids is None else self._whole_ids[sample_ids]

    def _describe(self, sample_id: int) -> str:
        return f"sample {self.table.key(sample_id)!r} (sample_id {sample_id})"

    def _read_error(self, sample_id: int, piece: Piece, error: OSError) -> OSError | StorageError:
        reason = error.strerror or str(error)
        if isinstance(error, FileNotFoundError) and error.strerror is None:
            # That of a remote file system has its address only.
            reason = os.strerror(errno.ENOENT)
        text = f"{self._describe(sample_id)}: {reason} ({piece.path})"
        if error.errno in (errno.EMFILE, errno.ENFILE):
            return StorageError(f"{text}. Raise the limit of open files (`ulimit -n`).")
        if isinstance(error, (FileNotFoundError, PermissionError, IsADirectoryError)):
            return StorageError(f"{text}. Check that the file is there and this user may read it.")
        return OSError(text)


def _read(descriptor: int, length: int, start: int) -> bytes:
    """Return up to `length` bytes of a file, fewer if it is shorter. One system call reads less
    than 2 GiB."""
    if length <= _MAX_PREAD_BYTES:
        return os.pread(descriptor, length, start)
    first = os.pread(descriptor, _MAX_PREAD_BYTES, start)
    if len(first) < _MAX_PREAD_BYTES:
        return first
    return first + _read(descriptor, length - _MAX_PREAD_BYTES, start + _MAX_PREAD_BYTES)


def joined(samples: Iterable[bytes]) -> NDArray[np.uint8]:
    """Return uint8[sum of the lengths], the samples one behind the other in new memory."""
    return np.frombuffer(bytearray(b"".join(samples)), dtype=np.uint8)


def checksum_error(
    table: SampleTable, sample_ids: SampleIds, data: Sequence[memoryview | bytes]
) -> str | None:
    """Return a text about the first sample with a wrong checksum; None if there is no such sample,
    or the table has no checksums."""
    if table.checksums is None:
        return None
    for sample_id, piece, expected in zip(
        sample_ids.tolist(), data, table.checksums[sample_ids].tolist(), strict=True
    ):
        checksum = zlib.crc32(piece)
        if checksum != expected:
            return (
                f"sample {table.key(sample_id)!r} (sample_id {sample_id}) is damaged: got CRC-32 "
                f"{checksum:08x}, expected {expected:08x}"
            )
    return None


def _offsets(table: SampleTable, packs: int) -> NDArray[np.int64]:
    """Return int64[n], the offset of each sample in its pack; sample i is in pack i mod `packs`."""
    offsets = np.empty(len(table), dtype=np.int64)
    for pack in range(packs):
        sizes = table.sizes[pack::packs]
        offsets[pack::packs] = np.cumsum(sizes) - sizes
    return offsets
