"""What a data set is: a list of sample keys with sizes and checksums, as arrays, which a file holds
so that it can be mapped instead of read.

The file (`manifest.dlres`) is one line of JSON, padded with spaces, and four arrays behind it,
little-endian: sizes int64[n], CRC-32 uint32[n], ends of the keys int64[n], and the keys in UTF-8.
Its last four bytes are the CRC-32 of all before them.
"""

from __future__ import annotations

import codecs
import functools
import hashlib
import os
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from lightning_dlres.core.errors import ConfigError, got_expected
from lightning_dlres.core.wire.decoding import from_json
from lightning_dlres.prefetch.order.sequence import MOST_SAMPLES

MANIFEST = "manifest.dlres"
# In how many files a store is kept, at most.
MOST_PACKS = 1 << 16
# Of all samples of a data set: sums of sizes fit into int64.
_MOST_BYTES = 1 << 60
_FORMAT, _VERSION = "dlres-store", 2
_HEADER_BYTES, _CHECKSUM_BYTES = 512, 4
# Bytes that are checked at a time.
_SLICE = 1 << 24


class _Header(msgspec.Struct, frozen=True):
    format: str
    version: int
    samples: int
    key_bytes: int
    packs: Annotated[int, msgspec.Meta(ge=0, le=MOST_PACKS)]
    # It becomes a part of paths.
    packs_id: Annotated[str, msgspec.Meta(pattern=r"^([0-9a-f]{12})?\Z")]
    encoding: str
    checksums: bool


class _Format(msgspec.Struct, frozen=True):
    """The part of a header that every version has."""

    format: str
    version: int


@dataclass(frozen=True, eq=False)
class SampleTable:
    """Keys, sizes and checksums of n samples.

    `sizes` is int64[n], in bytes; `checksums` is uint32[n] (CRC-32), or None where the source has
    none; `keys` is uint8, the keys in UTF-8 one behind the other, and `key_ends` int64[n] where
    each ends. `encoding` says what the bytes of a sample are: "raw", as they were found, or
    "tensors" (see `samples`). `packs` is in how many files a store keeps them; 0: one file each.
    `packs_id` is a part of these files' names, another one for every store that was written.
    """

    sizes: NDArray[np.int64]
    checksums: NDArray[np.uint32] | None
    keys: NDArray[np.uint8]
    key_ends: NDArray[np.int64]
    encoding: str = "raw"
    packs: int = 0
    packs_id: str = ""

    def __post_init__(self) -> None:
        if not 0 < len(self.sizes) <= MOST_SAMPLES:
            raise ConfigError(
                got_expected(
                    "a data set", len(self.sizes), f"1 to {MOST_SAMPLES} samples", "another"
                )
            )

    @staticmethod
    def build(
        keys: Iterable[str],
        sizes: Sequence[int] | NDArray[np.int64],
        checksums: Sequence[int] | None = None,
        *,
        encoding: str = "raw",
        packs: int = 0,
        packs_id: str = "",
    ) -> SampleTable:
        """Return a table of lists.

        Raises:
            ConfigError: a key that is no text, as names of files may be, or bad sizes.
        """
        try:
            texts = [key.encode() for key in keys]
        except UnicodeEncodeError as error:
            raise ConfigError(
                got_expected("key of a sample", error.object, "a text in UTF-8", "another name")
            ) from error
        ends = np.cumsum([len(text) for text in texts], dtype=np.int64)
        blob = np.frombuffer(b"".join(texts), dtype=np.uint8)
        sums = None if checksums is None else np.array(checksums, dtype=np.uint32)
        lengths = np.array(sizes, dtype=np.int64)
        return SampleTable(lengths, sums, blob, ends, encoding, packs, packs_id)

    def __len__(self) -> int:
        return len(self.sizes)

    @property
    def total_bytes(self) -> int:
        """Bytes of all samples."""
        return int(self.sizes.sum())

    def key(self, number: int) -> str:
        """Return the key of a sample."""
        start = int(self.key_ends[number - 1]) if number else 0
        return self.keys[start : int(self.key_ends[number])].tobytes().decode()

    @functools.cached_property
    def digest(self) -> str:
        """A fingerprint of keys, sizes and checksums: equal tables are the same data set."""
        found = hashlib.blake2b(digest_size=16)
        sums = np.empty(0, dtype=np.uint32) if self.checksums is None else self.checksums
        for array in (self.sizes, sums, self.key_ends, self.keys):
            found.update(np.ascontiguousarray(array).data)
        found.update(self.encoding.encode())
        return found.hexdigest()

    def part(self, first: int, count: int) -> SampleTable:
        """Return so many samples from one on."""
        rows = slice(first, first + count)
        start = int(self.key_ends[first - 1]) if first else 0
        ends = self.key_ends[rows]
        sums = None if self.checksums is None else self.checksums[rows]
        keys = self.keys[start : int(ends[-1])]
        return SampleTable(
            self.sizes[rows], sums, keys, ends - start, self.encoding, self.packs, self.packs_id
        )

    def selected(self, numbers: NDArray[np.uint32]) -> SampleTable:
        """Return some samples, uint32[n]."""
        return SampleTable.build(
            map(self.key, numbers.tolist()),
            self.sizes[numbers],
            None if self.checksums is None else self.checksums[numbers].tolist(),
            encoding=self.encoding,
            packs=self.packs,
            packs_id=self.packs_id,
        )

    @staticmethod
    def join(parts: Sequence[SampleTable]) -> SampleTable:
        """Return the table of which these are the parts."""
        before = np.cumsum([0, *(len(part.keys) for part in parts[:-1])])
        ends = [part.key_ends + start for part, start in zip(parts, before, strict=True)]
        sums = [part.checksums for part in parts if part.checksums is not None]
        return SampleTable(
            np.concatenate([part.sizes for part in parts]),
            np.concatenate(sums) if len(sums) == len(parts) else None,
            np.concatenate([part.keys for part in parts]),
            np.concatenate(ends),
            parts[0].encoding,
            parts[0].packs,
            parts[0].packs_id,
        )

    def to_bytes(self) -> list[memoryview]:
        """Return what the file holds."""
        header = _Header(
            format=_FORMAT,
            version=_VERSION,
            samples=len(self),
            key_bytes=len(self.keys),
            packs=self.packs,
            packs_id=self.packs_id,
            encoding=self.encoding,
            checksums=self.checksums is not None,
        )
        line = msgspec.json.encode(header).ljust(_HEADER_BYTES - 1) + b"\n"
        sums = np.zeros(len(self), dtype=np.uint32) if self.checksums is None else self.checksums
        arrays: list[tuple[NDArray[Any], str]] = [
            (self.sizes, "<i8"),
            (sums, "<u4"),
            (self.key_ends, "<i8"),
            (self.keys, "u1"),
        ]
        pieces = [
            memoryview(line),
            *(
                np.ascontiguousarray(array, kind).data.cast("B")
                for array, kind in arrays
                if len(array)
            ),
        ]
        checksum = 0
        for piece in pieces:
            checksum = zlib.crc32(piece, checksum)
        return [*pieces, memoryview(checksum.to_bytes(_CHECKSUM_BYTES, "little"))]

    def save(self, path: Path) -> None:
        """Write the file, all of it or none.

        Raises:
            OSError: it cannot be written; the one that was there stays.
        """
        part = unfinished(path)
        try:
            with part.open("wb") as file:
                for piece in self.to_bytes():
                    file.write(piece)
                file.flush()
                os.fsync(file.fileno())
            part.replace(path)
        except BaseException:
            part.unlink(missing_ok=True)
            raise

    @staticmethod
    def load(path: Path) -> SampleTable:
        """Return the table of a file, mapped.

        Raises:
            ConfigError: the file is not there, or not such a file.
        """
        try:
            data = np.memmap(path, dtype=np.uint8, mode="r")
        except (OSError, ValueError) as error:
            raise ConfigError(
                f"{path} must be the manifest of a store, got: {error}. Make one with `dlres store "
                "put`."
            ) from error
        return SampleTable.from_bytes(data, str(path))

    @staticmethod
    def from_bytes(data: NDArray[np.uint8], name: str) -> SampleTable:
        """Return the table of a file's contents; `name` is what errors call it.

        Raises:
            ConfigError: the bytes are no such file.
        """
        line = data[:_HEADER_BYTES].tobytes()
        try:
            known = from_json(line, _Format)
            if (known.format, known.version) != (_FORMAT, _VERSION):
                raise ConfigError(_no_manifest(name, f"{known.format} {known.version}"))
            header = from_json(line, _Header)
        except msgspec.MsgspecError as error:
            raise ConfigError(_no_manifest(name, f"no header ({error})")) from error
        count = header.samples
        expected = _HEADER_BYTES + 20 * count + header.key_bytes + _CHECKSUM_BYTES
        if len(data) != expected or count < 1 or header.key_bytes < 0:
            raise ConfigError(_no_manifest(name, f"{len(data)} bytes for {count} samples"))
        end = len(data) - _CHECKSUM_BYTES
        if zlib.crc32(data[:end].data) != int.from_bytes(data[end:].tobytes(), "little"):
            raise ConfigError(_no_manifest(name, "bytes that do not have their checksum"))
        at = _HEADER_BYTES
        found = []
        for kind, size in (("<i8", 8), ("<u4", 4), ("<i8", 8)):
            found.append(np.frombuffer(data[at : at + size * count], dtype=kind))
            at += size * count
        sizes, sums, ends = found
        # Who has written them may be hostile, or have another version of this package.
        if (
            (sizes < 0).any()
            or float(sizes.sum(dtype=np.float64)) > _MOST_BYTES
            or ends[0] < 0
            or (ends[1:] < ends[:-1]).any()
            or ends[-1] != header.key_bytes
        ):
            raise ConfigError(_no_manifest(name, "sizes or keys that contradict each other"))
        keys = data[at:end]
        if not _are_texts(keys, ends):
            raise ConfigError(_no_manifest(name, "a key that is no text in UTF-8"))
        return SampleTable(
            sizes,
            sums if header.checksums else None,
            keys,
            ends,
            header.encoding,
            header.packs,
            header.packs_id,
        )


def unfinished(path: Path) -> Path:
    """Return where a manifest is written before it takes its place."""
    return path.with_name(path.name + ".part")


def _are_texts(keys: NDArray[np.uint8], ends: NDArray[np.int64]) -> bool:
    """Return whether each of some keys, one behind the other, is a text in UTF-8."""
    decoder = codecs.getincrementaldecoder("utf-8")()
    try:
        for at in range(0, len(keys), _SLICE):
            decoder.decode(keys[at : at + _SLICE].tobytes())
        decoder.decode(b"", final=True)
    except UnicodeDecodeError:
        return False
    # All are one text, then; no key may begin within a character.
    firsts = keys[ends[ends < len(keys)]]
    return not ((firsts & 0xC0) == 0x80).any()


def _no_manifest(name: str, got: str) -> str:
    return (
        f"{name} must be a manifest of version {_VERSION}, got {got}. Write the store again with "
        "`dlres store put --overwrite`."
    )
