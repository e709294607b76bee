"""The store of a map-style data set, written by one rank of every host while the others wait."""

from __future__ import annotations

import shutil
import tempfile
import uuid
from pathlib import Path
from typing import Any

from lightning.pytorch.strategies import Strategy
from lightning.pytorch.utilities import rank_zero_info

from lightning_dlres.core.errors import ConfigError
from lightning_dlres.prefetch.items import ENCODING, encode_item
from lightning_dlres.prefetch.storage.put import put
from lightning_dlres.prefetch.table import MANIFEST, SampleTable


def temporary_directory(job: str) -> Path:
    """Return where the stores of a job lie; nobody else knows its name beforehand, or may enter."""
    return Path(tempfile.gettempdir(), f"dlres-store-{job}")


def write_store(strategy: Strategy, dataset: Any, directory: Path, writes: bool) -> None:
    """Have a data set in a store; all ranks come here, and leave when it is there.

    Args:
        strategy: of the ranks.
        dataset: a map-style data set.
        directory: of the store. One that is there is used as it is; the directory may be on a
            storage that hosts share.
        writes: whether this rank writes: one of every host.

    Raises:
        ConfigError: a store of another data set is there, or another rank could not write.
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
    if (directory / MANIFEST).exists():
        return
    directory.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    rank_zero_info(f"Putting {len(dataset)} samples into {directory}")
    # Another host may write the same store: the first that is whole is taken.
    own = directory.with_name(f".{directory.name}-{uuid.uuid4().hex[:8]}")
    try:
        put(dataset, own, encode=encode_item, encoding=ENCODING)
        try:
            own.rename(directory)
        except OSError as error:
            if not (directory / MANIFEST).exists():
                raise ConfigError(
                    f"a store in {directory}: {error.strerror}. Expected nothing to be there, or "
                    "a store. Try another `store`."
                ) from error
    finally:
        shutil.rmtree(own, ignore_errors=True)


def _check(dataset: Any, directory: Path) -> None:
    table = SampleTable.load(directory / MANIFEST)
    if (len(table), table.encoding) != (len(dataset), ENCODING):
        raise ConfigError(
            f"the store in {directory}: got {len(table)} samples ({table.encoding}), expected the "
            f"{len(dataset)} of the data set ({ENCODING}). Remove it if it is out of date, or try "
            "another `store`."
        )
