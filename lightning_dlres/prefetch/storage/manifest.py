"""Table of the samples of a data set (keys, sizes, checksums), and its file: a store's manifest.

The file (`manifest.dlres`) begins with one line of JSON, padded with spaces. Four little-endian
arrays follow: sizes int64[n], CRC-32 uint32[n], ends of the keys int64[n], and the keys in UTF-8.
The last four bytes are the CRC-32 of all bytes before them. The file can be mapped into memory.
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
from lightning_dlres.prefetch.order.sequence import MAX_SAMPLES

# Name of the manifest in the folder of a store.
MANIFEST = "manifest.dlres"
# Maximum number of packs of a store. A pack is a file with many samples.
MAX_PACKS = 1 << 16
# Maximum bytes of all samples of a data set, so that sums of sizes fit into int64.
_MAX_TOTAL_BYTES = 1 << 60
_FORMAT, _VERSION = "dlres-store", 2
_HEADER_BYTES, _CHECKSUM_BYTES = 512, 4
# Number of bytes of the keys that the check for UTF-8 decodes at a time.
_DECODED_BYTES = 1 << 24


class _Header(msgspec.Struct, frozen=True):
    format: str
    version: int
    samples: int
    key_bytes: int
    packs: Annotated[int, msgspec.Meta(ge=0, le=MAX_PACKS)]
    # Becomes a part of file names. The pattern keeps out "/" and "..", since a manifest may come
    # from anywhere.
    packs_id: Annotated[str, msgspec.Meta(pattern=r"^([0-9a-f]{12})?\Z")]
    encoding: str
    checksums: bool


class _Format(msgspec.Struct, frozen=True):
    """Fields of a header that all versions of the format have."""

    format: str
    version: int


@dataclass(frozen=True, eq=False)
class SampleTable:
    """Keys, sizes and checksums of n samples.

    Attributes:
        sizes: int64[n], in bytes.
        checksums: uint32[n] (CRC-32), or None if the source has none.
        keys: uint8[bytes of all keys], the keys in UTF-8, concatenated.
        key_ends: int64[n], offset in `keys` at which each key ends.
        encoding: Meaning of the bytes of a sample: "raw" for the bytes of its file, or "tensors"
            (see `loading.items`).
        packs: Number of files of a store; 0 if each sample is a file.
        packs_id: Random part of the packs' file names; different each time a store is written.
    """

    sizes: NDArray[np.int64]
    checksums: NDArray[np.uint32] | None
    keys: NDArray[np.uint8]
    key_ends: NDArray[np.int64]
    encoding: str = "raw"
    packs: int = 0
    packs_id: str = ""

    def __post_init__(self) -> None:
        if not 0 < len(self.sizes) <= MAX_SAMPLES:
            raise ConfigError(
                f"A data set must have 1 to {MAX_SAMPLES} samples, got {len(self.sizes)}. Use "
                "another data set."
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
        """Return a table with these keys, sizes and checksums.

        Raises:
            ConfigError: If there are no samples, or a key cannot be encoded in UTF-8. Names of
                files need not be text on Linux.
        """
        try:
            texts = [key.encode() for key in keys]
        except UnicodeEncodeError as error:
            raise ConfigError(
                got_expected("key of a sample", error.object, "a text in UTF-8", "another name")
            ) from error
        ends = np.cumsum([len(text) for text in texts], dtype=np.int64)
        blob = np.frombuffer(b"".join(texts), dtype=np.uint8)
        checksum_array = None if checksums is None else np.array(checksums, dtype=np.uint32)
        lengths = np.array(sizes, dtype=np.int64)
        return SampleTable(lengths, checksum_array, blob, ends, encoding, packs, packs_id)

    def __len__(self) -> int:
        return len(self.sizes)

    @property
    def total_bytes(self) -> int:
        """Bytes of all samples together."""
        return int(self.sizes.sum())

    def key(self, sample_id: int) -> str:
        """Return the key of a sample."""
        start = int(self.key_ends[sample_id - 1]) if sample_id else 0
        return self.keys[start : int(self.key_ends[sample_id])].tobytes().decode()

    @functools.cached_property
    def digest(self) -> str:
        """Hash of keys, sizes, checksums and encoding, equal for equal data sets."""
        digest = hashlib.blake2b(digest_size=16)
        checksums = np.empty(0, dtype=np.uint32) if self.checksums is None else self.checksums
        for array in (self.sizes, checksums, self.key_ends, self.keys):
            digest.update(np.ascontiguousarray(array).data)
        digest.update(self.encoding.encode())
        return digest.hexdigest()

    def rows(self, first: int, count: int) -> SampleTable:
        """Return the table of `count` samples from sample_id `first` on."""
        rows = slice(first, first + count)
        start = int(self.key_ends[first - 1]) if first else 0
        ends = self.key_ends[rows]
        checksums = None if self.checksums is None else self.checksums[rows]
        keys = self.keys[start : int(ends[-1])]
        return SampleTable(
            self.sizes[rows],
            checksums,
            keys,
            ends - start,
            self.encoding,
            self.packs,
            self.packs_id,
        )

    def select(self, sample_ids: NDArray[np.uint32]) -> SampleTable:
        """Return the table of some samples, uint32[n], which get new ids from 0."""
        return SampleTable.build(
            map(self.key, sample_ids.tolist()),
            self.sizes[sample_ids],
            None if self.checksums is None else self.checksums[sample_ids].tolist(),
            encoding=self.encoding,
            packs=self.packs,
            packs_id=self.packs_id,
        )

    @staticmethod
    def join(parts: Sequence[SampleTable]) -> SampleTable:
        """Return the table of all samples of some tables, in order; the inverse of `rows`."""
        key_starts = np.cumsum([0, *(len(part.keys) for part in parts[:-1])])
        ends = [part.key_ends + start for part, start in zip(parts, key_starts, strict=True)]
        checksums = [part.checksums for part in parts if part.checksums is not None]
        return SampleTable(
            np.concatenate([part.sizes for part in parts]),
            np.concatenate(checksums) if len(checksums) == len(parts) else None,
            np.concatenate([part.keys for part in parts]),
            np.concatenate(ends),
            parts[0].encoding,
            parts[0].packs,
            parts[0].packs_id,
        )

    def to_bytes(self) -> list[memoryview]:
        """Return the content of the manifest file, in pieces to be written in order."""
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
        checksums = (
            np.zeros(len(self), dtype=np.uint32) if self.checksums is None else self.checksums
        )
        arrays: list[tuple[NDArray[Any], str]] = [
            (self.sizes, "<i8"),
            (checksums, "<u4"),
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
        """Write the manifest file atomically.

        Raises:
            OSError: If it cannot be written. An existing file is left as it was.
        """
        part = partial_path(path)
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
        """Return the table of a file, which is mapped into memory.

        Raises:
            ConfigError: If the file is missing or is not a manifest.
        """
        try:
            data = np.memmap(path, dtype=np.uint8, mode="r")
        except (OSError, ValueError) as error:
            raise ConfigError(
                f"{path} must be the manifest of a store, got: {error}. Write a store with "
                "`dlres store put`."
            ) from error
        return SampleTable.from_bytes(data, str(path))

    @staticmethod
    def from_bytes(data: NDArray[np.uint8], name: str) -> SampleTable:
        """Return the table of a file's content.

        Args:
            data: uint8, the content.
            name: Name of the file in errors.

        Raises:
            ConfigError: If the content is no valid manifest.
        """
        line = data[:_HEADER_BYTES].tobytes()
        try:
            # Decode the format and version first: other versions have other headers.
            version_header = from_json(line, _Format)
            if (version_header.format, version_header.version) != (_FORMAT, _VERSION):
                actual = f"{version_header.format} {version_header.version}"
                raise ConfigError(_invalid_manifest(name, actual))
            header = from_json(line, _Header)
        except msgspec.MsgspecError as error:
            raise ConfigError(_invalid_manifest(name, f"no header ({error})")) from error
        count = header.samples
        expected = _HEADER_BYTES + 20 * count + header.key_bytes + _CHECKSUM_BYTES
        if len(data) != expected or count < 1 or header.key_bytes < 0:
            raise ConfigError(_invalid_manifest(name, f"{len(data)} bytes for {count} samples"))
        end = len(data) - _CHECKSUM_BYTES
        if zlib.crc32(data[:end].data) != int.from_bytes(data[end:].tobytes(), "little"):
            raise ConfigError(_invalid_manifest(name, "bytes with another checksum"))
        offset = _HEADER_BYTES
        arrays = []
        for kind, size in (("<i8", 8), ("<u4", 4), ("<i8", 8)):
            arrays.append(np.frombuffer(data[offset : offset + size * count], dtype=kind))
            offset += size * count
        sizes, checksums, ends = arrays
        # Never trust the content: its writer may be hostile or another version of this package.
        if (
            (sizes < 0).any()
            or float(sizes.sum(dtype=np.float64)) > _MAX_TOTAL_BYTES
            or ends[0] < 0
            or (ends[1:] < ends[:-1]).any()
            or ends[-1] != header.key_bytes
        ):
            raise ConfigError(
                _invalid_manifest(name, "sizes or ends of keys that are out of range")
            )
        keys = data[offset:end]
        if not _are_texts(keys, ends):
            raise ConfigError(_invalid_manifest(name, "a key that is not UTF-8"))
        return SampleTable(
            sizes,
            checksums if header.checksums else None,
            keys,
            ends,
            header.encoding,
            header.packs,
            header.packs_id,
        )


def partial_path(path: Path) -> Path:
    """Return the temporary path at which a manifest is written before it is renamed."""
    return path.with_name(path.name + ".part")


def _are_texts(keys: NDArray[np.uint8], ends: NDArray[np.int64]) -> bool:
    """Return True if every key is valid UTF-8."""
    decoder = codecs.getincrementaldecoder("utf-8")()
    try:
        for offset in range(0, len(keys), _DECODED_BYTES):
            decoder.decode(keys[offset : offset + _DECODED_BYTES].tobytes())
        decoder.decode(b"", final=True)
    except UnicodeDecodeError:
        return False
    # All keys together are valid UTF-8. Also, no key may begin within a character.
    first_bytes = keys[ends[ends < len(keys)]]
    return not ((first_bytes & 0xC0) == 0x80).any()


def _invalid_manifest(name: str, got: str) -> str:
    return (
        f"{name} must be a manifest of version {_VERSION}, got {got}. Write the store again with "
        "`dlres store put --overwrite`."
    )
