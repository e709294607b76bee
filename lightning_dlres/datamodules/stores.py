"""Stores of map-style data sets: one rank of every host writes them while the others wait."""

from __future__ import annotations

import os
import shutil
import socket
import tempfile
import time
import uuid
import weakref
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from lightning.pytorch import Trainer
from lightning.pytorch.strategies import Strategy
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn

from lightning_dlres.core.errors import ConfigError, got_expected
from lightning_dlres.core.host.locks import (
    LOCK,
    locked,
    locked_if_possible,
    private_directory,
    remove_owned,
    sweep,
)
from lightning_dlres.datamodules.splits import Split, is_data_set
from lightning_dlres.prefetch.loading.items import ENCODING, encode_item
from lightning_dlres.prefetch.storage.manifest import MANIFEST, SampleTable
from lightning_dlres.prefetch.storage.writer import put

# Number of samples that are compared with a store.
_PROBES = 16
# Number of further reads of one sample, to detect a data set with random samples.
_REPEATED_READS = 16
# Seconds between two attempts to take a lock.
_POLL_SECONDS = 0.01


def require_set_up(kind: type, job: str) -> None:
    """Raise if `setup` of the data module has not run, in which the job gets its name.

    Args:
        kind: Class of the data module.
        job: Name of the job; "" before `setup`.

    Raises:
        ConfigError: If it has not run.
    """
    if not job:
        raise ConfigError(
            f"setup must run before {kind.__name__} makes a loader, got none. Call "
            "super().setup(stage) in a setup of your own."
        )


class SplitStores:
    """Stores of the data sets of a data module's splits.

    Args:
        directory: Directory for the stores, one for each data set. None: a temporary directory.
    """

    def __init__(self, directory: Path | None) -> None:
        self._directory = directory
        # Path of each store that was written, by the name of its source.
        self._paths: dict[str, Path] = {}
        # Function that removes the temporary stores. It runs at the end of this process at the
        # latest.
        self._remove: weakref.finalize[..., Any] | None = None

    def write(self, trainer: Trainer, job: str, name: str, dataset: Any) -> None:
        """Write a data set into a store, once on every host. All ranks must call this.

        Args:
            trainer: Trainer of this rank.
            job: Name of the job, the same on all ranks and different for every job.
            name: Name of the store.
            dataset: The map-style data set.

        Raises:
            ConfigError: See `write_store`.
        """
        is_writer, base = trainer.local_rank == 0, self._directory
        if base is None:
            base = temporary_directory(job)
            if is_writer and self._remove is None:
                self._remove = weakref.finalize(self, own_temporary_directory(base))
        write_store(trainer.strategy, dataset, base / name, is_writer)
        self._paths[name] = base / name

    def source_of(self, split: Split, name: str) -> Any:
        """Return the store that was written for a source of a split, or the source itself.

        Raises:
            ConfigError: If the split has no such source, or it is a data set without a store.
        """
        source = self._paths.get(name, split.sources.get(name))
        if source is None:
            rule, fix = "a folder, store, URL or data set", f"{split.name}='data/{split.name}'"
            raise ConfigError(got_expected(split.name, None, rule, fix))
        if is_data_set(source):
            raise ConfigError(
                f"{split.name} must be set before setup if it is a data set, got a "
                f"{type(source).__name__} after it. Call use() before super().setup(stage)."
            )
        return source

    def forget(self, names: Iterable[str]) -> None:
        """Forget the stores of sources that are used no longer."""
        for name in names:
            self._paths.pop(name, None)

    def remove_temporary(self) -> None:
        """Forget all stores and remove the temporary ones. The others stay for the next run."""
        self._paths.clear()
        if self._remove is not None:
            self._remove()
            self._remove = None


def temporary_directory(job: str) -> Path:
    """Return the directory of a job's temporary stores on this host.

    Only this user may enter its parent directory.
    """
    base = Path(tempfile.gettempdir())
    return private_directory(base, f"dlres-stores-{os.getuid()}-{_host()}") / job


def _host() -> str:
    """Return a part of file names that is unique for this host.

    Hosts may share a directory without seeing each other's locks. So each host removes only files
    with this part in their names.
    """
    return f"{zlib.crc32(socket.gethostname().encode()):08x}"


def own_temporary_directory(directory: Path) -> Callable[[], None]:
    """Make a directory that this process owns, and return the function that removes it.

    It also removes the directories of processes that have ended. If this process is killed, the
    next process that calls this function removes its directory.

    Raises:
        ConfigError: If the directory cannot be made or locked.
    """
    sweep(directory.parent)
    lock = directory.with_name(directory.name + LOCK)
    lock_holder = ExitStack()
    try:
        _hold(lock, lock_holder, locked)
        directory.mkdir(mode=0o700)
    except OSError as error:
        lock_holder.close()
        raise ConfigError(
            f"{directory} must be a directory that can be made and locked, got: "
            f"{error.strerror}. Pass store, or set TMPDIR to another directory."
        ) from error
    return partial(_remove_owned, os.getpid(), lock, lock_holder)


def _hold(
    lock: Path, lock_holder: ExitStack, kind: Callable[[Path], AbstractContextManager[object]]
) -> None:
    """Hold a lock until `lock_holder` closes. `kind` is a context manager of `core.host.locks`."""
    # Try again: the sweep of another process may hold the lock for a short time.
    while not lock_holder.enter_context(kind(lock)):
        lock_holder.close()
        time.sleep(_POLL_SECONDS)


def _remove_owned(owner: int, lock: Path, lock_holder: ExitStack) -> None:
    # A forked process inherits the finalizer, and may end before the owner.
    if os.getpid() == owner:
        remove_owned(lock)
        lock_holder.close()


def write_store(strategy: Strategy, dataset: Any, directory: Path, is_writer: bool) -> None:
    """Write a data set into a store, unless the store exists.

    All ranks must call this. It returns after all ranks have written.

    Args:
        strategy: Strategy of the ranks.
        dataset: The map-style data set.
        directory: Directory of the store. Hosts may share it. An existing store is used if it holds
            the data set.
        is_writer: True if this rank writes; one rank of every host must.

    Raises:
        ConfigError: If the directory has a store of another data set (some samples are compared),
            or another rank could not write.
    """
    failure: Exception | None = None
    if is_writer:
        try:
            _write(dataset, directory)
        except Exception as error:  # raised below, after the other ranks have the result
            failure = error
    all_written = strategy.reduce_boolean_decision(failure is None, all=True)
    if failure is not None:
        raise failure
    if not all_written:
        raise ConfigError(
            f"The store in {directory} must be written on every host, got an error on another "
            "rank. See the error of that rank."
        )
    _check(dataset, directory)


def _write(dataset: Any, directory: Path) -> None:
    prefix = f".{directory.name}-{_host()}-"
    # Remove the unfinished stores of killed processes.
    sweep(directory.parent, prefix)
    if (directory / MANIFEST).exists():
        _require_same(dataset, directory)
        return
    with _naming_store(directory):
        directory.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    rank_zero_info(f"Putting {len(dataset)} samples into {directory}")
    # Another host may write the same store. Each host writes to a directory with a unique name and
    # renames it at the end. The first rename wins.
    unfinished_store = directory.with_name(f"{prefix}{uuid.uuid4().hex[:8]}")
    lock_holder = ExitStack()
    try:
        with _naming_store(directory):
            _hold(
                unfinished_store.with_name(unfinished_store.name + LOCK),
                lock_holder,
                locked_if_possible,
            )
        table = put(dataset, unfinished_store, encode=encode_item, encoding=ENCODING)
        if (changed := _differing(dataset, table)) is not None:
            rank_zero_warn(
                f"Sample {changed} of {type(dataset).__name__} had other bytes when it was read "
                "again. All epochs use the bytes that were read first. Move random transforms into "
                "`decode`, where `Sample.seed` differs from epoch to epoch."
            )
        try:
            unfinished_store.rename(directory)
        except OSError as error:
            if not (directory / MANIFEST).exists():
                raise ConfigError(
                    f"store must be a directory for stores, got {directory.parent}, in which "
                    f"{directory.name} is no store: {error.strerror}. Pass another directory."
                ) from error
            # The other writer may have had another data set.
            _require_same(dataset, directory)
    finally:
        shutil.rmtree(unfinished_store, ignore_errors=True)
        lock_holder.close()


@contextmanager
def _naming_store(directory: Path) -> Iterator[None]:
    """Context manager that turns an `OSError` into a `ConfigError` that names the store."""
    try:
        yield
    except OSError as error:
        raise ConfigError(
            f"store must be in a directory that can be written to, got {directory}: "
            f"{error.strerror}. Pass another store."
        ) from error


def _require_same(dataset: Any, directory: Path) -> None:
    """Check that a store which another process has written holds the data set."""
    table = _check(dataset, directory)
    if (changed := _differing(dataset, table)) is not None and not _is_random(dataset, changed):
        raise ConfigError(
            f"The store in {directory} must hold the data set, got other bytes for sample "
            f"{changed} ({table.key(changed)!r}). Remove the store if it is out of date, or pass "
            "another one."
        )


def _check(dataset: Any, directory: Path) -> SampleTable:
    table = SampleTable.load(directory / MANIFEST)
    if (len(table), table.encoding) != (len(dataset), ENCODING):
        raise ConfigError(
            f"The store in {directory} must hold the {len(dataset)} samples of the data set "
            f"({ENCODING}), got {len(table)} samples ({table.encoding}). Remove the store if it is "
            "out of date, or pass another one."
        )
    return table


def _differing(dataset: Any, table: SampleTable) -> int | None:
    """Return the index of a sample whose bytes differ from the store; None if no sample differs.

    It compares `_PROBES` samples only, because reading all samples takes as long as writing them.
    """
    assert table.checksums is not None
    for index in np.unique(np.linspace(0, len(table) - 1, _PROBES, dtype=np.int64)).tolist():
        if zlib.crc32(encode_item(dataset[index])) != int(table.checksums[index]):
            return int(index)
    return None


def _is_random(dataset: Any, index: int) -> bool:
    """Return True if the bytes of a sample change from read to read."""
    first = encode_item(dataset[index])
    return any(encode_item(dataset[index]) != first for _ in range(_REPEATED_READS))
