"""Writer of the files of a store. If it is interrupted at any time, an earlier store stays whole.

The packs are written first, under names that no other store has. Then the new manifest, which names
them, replaces the old one. The old packs are removed last.
"""

from __future__ import annotations

import contextlib
import errno
import os
import uuid
import zlib
from array import array
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

import numpy as np

from lightning_dlres.core.errors import ConfigError, got_expected
from lightning_dlres.core.host.locks import locked_if_possible
from lightning_dlres.prefetch.storage.listings import PACKS, pack_names
from lightning_dlres.prefetch.storage.manifest import (
    MANIFEST,
    MAX_PACKS,
    SampleTable,
    partial_path,
)

# File whose lock is held while a store is written. Its name is hidden, so it is no sample.
_LOCK = ".put.lock"
_FREE_SPACE = "Free some space there, or pass another directory."
_FEWER_PACKS = "Pass fewer packs: each is an open file."
_FIXES = {
    errno.ENOSPC: _FREE_SPACE,
    errno.EDQUOT: _FREE_SPACE,
    errno.EMFILE: _FEWER_PACKS,
    errno.ENFILE: _FEWER_PACKS,
}


class StoreWriter:
    """Context manager that writes one store. Without `commit` it removes what it has written.

    Args:
        directory: Directory of the store; made if it is missing.
        packs: Number of pack files; sample i goes into pack i mod `packs`.
        overwrite: True to replace a store, or the rest of an unfinished one.

    Raises:
        ConfigError: If the directory has a store, another process writes into it, or it cannot be
            written to.
    """

    def __init__(self, directory: Path, packs: int, overwrite: bool) -> None:
        if not 1 <= packs <= MAX_PACKS:
            raise ConfigError(got_expected("packs", packs, f"1 to {MAX_PACKS}", "packs=4"))
        self._directory, self._manifest = directory, directory / MANIFEST
        self._packs, self._id = packs, uuid.uuid4().hex[:12]
        if not overwrite and self._manifest.exists():
            raise ConfigError(
                f"directory must have no store unless overwrite is True, got {directory} with a "
                "store. Overwrite it, or pass another directory."
            )
        if not overwrite and any(directory.glob(PACKS)):
            raise ConfigError(
                f"directory must have no store unless overwrite is True, got {directory} with an "
                "unfinished store. Overwrite it, or pass another directory."
            )
        self._keys: list[str] = []
        self._sizes, self._checksums = array("q"), array("L")
        self._files: list[BinaryIO] = []
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> StoreWriter:
        with contextlib.ExitStack() as stack, self._explain_os_errors():
            self._directory.mkdir(parents=True, exist_ok=True)
            if not stack.enter_context(locked_if_possible(self._directory / _LOCK)):
                raise ConfigError(
                    "directory must have no other process that writes a store into it, got "
                    f"{self._directory}. Wait for that process, or pass another directory."
                )
            # First free the space that the files of a killed process take.
            self._clean()
            stack.callback(self._clean)
            for name in pack_names(self._packs, self._id):
                self._files.append((self._directory / name).open("xb"))
                stack.callback(_close, self._files[-1])
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def write(self, key: str, data: bytes) -> None:
        """Add a sample."""
        file = self._files[len(self._keys) % self._packs]
        try:
            file.write(data)
        except OSError as error:
            raise self._unwritable(error) from error
        self._keys.append(key)
        self._sizes.append(len(data))
        self._checksums.append(zlib.crc32(data))

    def commit(self, encoding: str) -> SampleTable:
        """Replace the old store by the new one and return its table."""
        table = SampleTable.build(
            self._keys,
            np.array(self._sizes, dtype=np.int64),
            list(self._checksums),
            encoding=encoding,
            packs=self._packs,
            packs_id=self._id,
        )
        with self._explain_os_errors():
            for file in self._files:
                file.flush()
                os.fsync(file.fileno())
            # The names of the packs must be on the disk before the manifest that names them.
            _sync_directory(self._directory)
            table.save(self._manifest)
            _sync_directory(self._directory)
        return table

    def _clean(self) -> None:
        """Remove packs that the manifest does not name, and an unfinished manifest."""
        packs = {path.name for path in self._directory.glob(PACKS)}
        try:
            table = SampleTable.load(self._manifest)
            packs -= set(pack_names(table.packs, table.packs_id))
        except ConfigError:
            if self._manifest.exists():
                # A manifest of another version may name the other packs: remove only new ones.
                packs &= set(pack_names(self._packs, self._id))
        for name in [*packs, partial_path(self._manifest).name]:
            # A file that cannot be removed now is removed when the next store is written.
            with contextlib.suppress(OSError):
                (self._directory / name).unlink()

    @contextlib.contextmanager
    def _explain_os_errors(self) -> Iterator[None]:
        """Context manager that turns an `OSError` into a `ConfigError` with a fix."""
        try:
            yield
        except OSError as error:
            raise self._unwritable(error) from error

    def _unwritable(self, error: OSError) -> ConfigError:
        fix = _FIXES.get(error.errno or 0, "Pass a directory that this user can write to.")
        return ConfigError(
            f"The store in {self._directory} cannot be written: {error.strerror or error}. {fix}"
        )


def _close(file: BinaryIO) -> None:
    # On a full disk `close` fails once more, with the data that is still buffered.
    with contextlib.suppress(OSError):
        file.close()


def _sync_directory(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        # Some network file systems do not support the call.
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
    finally:
        os.close(descriptor)
