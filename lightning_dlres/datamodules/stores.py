"""The store of a map-style data set, written by one rank of every host while the others wait."""

from __future__ import annotations

import os
import shutil
import socket
import tempfile
import time
import uuid
import weakref
import zlib
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from lightning.pytorch import Trainer
from lightning.pytorch.strategies import Strategy
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn

from lightning_dlres.core.errors import ConfigError
from lightning_dlres.core.host.locks import (
    LOCK,
    locked,
    locked_if_possible,
    private_directory,
    remove_owned,
    sweep,
)
from lightning_dlres.prefetch.loading.items import ENCODING, encode_item
from lightning_dlres.prefetch.storage.manifest import MANIFEST, SampleTable
from lightning_dlres.prefetch.storage.writer import put

# Samples that are read again, to see whether they are the same.
_PROBES = 16
# Seconds between two looks at a lock.
_POLL = 0.01


class SplitStores:
    """The stores of the data sets of a data module's splits.

    Args:
        directory: For one store of each split; None: a temporary directory.
    """

    def __init__(self, directory: Path | None) -> None:
        self._directory = directory
        self.paths: dict[str, Path] = {}
        # Removes the temporary stores of this process.
        self._clean_up: weakref.finalize[..., Any] | None = None

    def write(self, trainer: Trainer, job: str, name: str, dataset: Any) -> None:
        """Write a data set into a store, once on every host; all ranks come here.

        Args:
            trainer: Of the ranks.
            job: A name, the same for all ranks and for no other job.
            name: Of the store.
            dataset: A map-style data set.

        Raises:
            ConfigError: See `write_store`.
        """
        writes, base = trainer.local_rank == 0, self._directory
        if base is None:
            base = temporary_directory(job)
            if writes and self._clean_up is None:
                self._clean_up = weakref.finalize(self, own_temporary_directory(base))
        write_store(trainer.strategy, dataset, base / name, writes)
        self.paths[name] = base / name

    def forget(self) -> None:
        """Remove temporary stores; others stay for the next run."""
        self.paths.clear()
        if self._clean_up is not None:
            self._clean_up()
            self._clean_up = None


def temporary_directory(job: str) -> Path:
    """Return the directory of a job's temporary stores on this host, below one that only this user
    may enter."""
    base = Path(tempfile.gettempdir())
    return private_directory(base, f"dlres-stores-{os.getuid()}-{_host()}") / job


def _host() -> str:
    """Return a part of names that only this host uses: hosts may share a directory, and locks may
    not reach from one to another."""
    return f"{zlib.crc32(socket.gethostname().encode()):08x}"


def own_temporary_directory(directory: Path) -> Callable[[], None]:
    """Make a directory that this process owns and return what removes it. Those of owners that are
    gone are removed now, as this one is by the next start if this process is killed.

    Raises:
        ConfigError: it cannot be made.
    """
    sweep(directory.parent)
    lock = directory.with_name(directory.name + LOCK)
    holding = ExitStack()
    try:
        _hold(lock, holding, locked)
        directory.mkdir(mode=0o700)
    except OSError as error:
        holding.close()
        raise ConfigError(
            f"{directory} must be a directory that can be made and locked, got: "
            f"{error.strerror}. Pass `store`, or set TMPDIR to another place."
        ) from error
    return partial(_remove_temporary, os.getpid(), lock, holding)


def _hold(
    lock: Path, holding: ExitStack, kind: Callable[[Path], AbstractContextManager[object]]
) -> None:
    # The sweep of another start may hold it for a moment.
    while not holding.enter_context(kind(lock)):
        holding.close()
        time.sleep(_POLL)


def _remove_temporary(owner: int, lock: Path, holding: ExitStack) -> None:
    # A process that was forked off may end before its owner does.
    if os.getpid() == owner:
        remove_owned(lock)
        holding.close()


def write_store(strategy: Strategy, dataset: Any, directory: Path, writes: bool) -> None:
    """Have a data set in a store; all ranks come here, and leave when it is there.

    Args:
        strategy: of the ranks.
        dataset: a map-style data set.
        directory: of the store. One that is there is used if it holds the data set; the directory
            may be on a storage that hosts share.
        writes: whether this rank writes: one of every host.

    Raises:
        ConfigError: a store of another data set is there (some samples are compared), or another
            rank could not write.
    """
    failed: Exception | None = None
    if writes:
        try:
            _write(dataset, directory)
        except Exception as error:  # the others must not wait for this rank in vain
            failed = error
    fine = strategy.reduce_boolean_decision(failed is None, all=True)
    if failed is not None:
        raise failed
    if not fine:
        raise ConfigError(
            f"a store of a data set in {directory}: another rank could not write it and says why."
        )
    _check(dataset, directory)


def _write(dataset: Any, directory: Path) -> None:
    prefix = f".{directory.name}-{_host()}-"
    # A store that a killed process has begun.
    sweep(directory.parent, prefix)
    if (directory / MANIFEST).exists():
        table = _check(dataset, directory)
        if (changed := _differing(dataset, table)) is not None and not _is_random(dataset, changed):
            raise ConfigError(
                f"the store in {directory} must hold the data set, got another sample "
                f"{changed} ({table.key(changed)!r}). Remove it if it is out of date."
            )
        return
    directory.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    rank_zero_info(f"Putting {len(dataset)} samples into {directory}")
    # Another host may write the same store: the first that is whole is taken.
    own = directory.with_name(f"{prefix}{uuid.uuid4().hex[:8]}")
    holding = ExitStack()
    try:
        try:
            _hold(own.with_name(own.name + LOCK), holding, locked_if_possible)
        except OSError as error:
            raise ConfigError(
                f"store must be in a directory that can be written to, got {directory}: "
                f"{error.strerror}. Try another `store`."
            ) from error
        table = put(dataset, own, encode=encode_item, encoding=ENCODING)
        if (changed := _differing(dataset, table)) is not None:
            rank_zero_warn(
                f"Sample {changed} of {type(dataset).__name__} was not the same when it was read "
                "again. The prefetch cache keeps what was read first for all epochs: move random "
                "transforms into `decode`, where `Sample.seed` differs from epoch to epoch."
            )
        try:
            own.rename(directory)
        except OSError as error:
            if not (directory / MANIFEST).exists():
                raise ConfigError(
                    f"store must be a directory for stores, got {directory.parent}, in which "
                    f"{directory.name} is something else: {error.strerror}. Pass another one."
                ) from error
    finally:
        shutil.rmtree(own, ignore_errors=True)
        holding.close()


def _check(dataset: Any, directory: Path) -> SampleTable:
    table = SampleTable.load(directory / MANIFEST)
    if (len(table), table.encoding) != (len(dataset), ENCODING):
        raise ConfigError(
            f"the store in {directory} must hold the {len(dataset)} samples of the data set "
            f"({ENCODING}), got {len(table)} samples ({table.encoding}). Remove it if it is out of "
            "date, or pass another store."
        )
    return table


def _differing(dataset: Any, table: SampleTable) -> int | None:
    """Return the number of a sample of which the data set gives other bytes than were written, or
    None. To read all of them would take as long as writing them: some stand for the others."""
    assert table.checksums is not None
    for number in np.unique(np.linspace(0, len(table) - 1, _PROBES, dtype=np.int64)).tolist():
        if zlib.crc32(encode_item(dataset[number])) != int(table.checksums[number]):
            return int(number)
    return None


def _is_random(dataset: Any, number: int) -> bool:
    first = encode_item(dataset[number])
    return any(encode_item(dataset[number]) != first for _ in range(_PROBES))
