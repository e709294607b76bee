"""Samples of variable size that every machine with Python has: the standard library's source files,
through the prefetch cache."""

from __future__ import annotations

import hashlib
import os
import sysconfig
import tempfile
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from typing_extensions import override

from lightning_dlres.core.errors import ConfigError, got_expected
from lightning_dlres.datamodules import PrefetchCacheDataModule
from lightning_dlres.datamodules.split_configs import TailRule
from lightning_dlres.demos.source_text import CYCLE, SKIPPED, VALIDATION
from lightning_dlres.prefetch.cache.samples import Sample
from lightning_dlres.prefetch.loading.workers import Workers


@dataclass(frozen=True)
class Crop:
    """A window of a file's bytes, at a place that its seed says: another one in every epoch, and
    the same after a restart. A file that is too short is filled up with line ends."""

    length: int

    def __call__(self, sample: Sample) -> Tensor:
        """Return uint8[length]."""
        data = sample.tensor()
        start = sample.seed % max(len(data) - self.length + 1, 1)
        window = torch.full((self.length,), ord("\n"), dtype=torch.uint8)
        piece = data[start : start + self.length]
        window[: len(piece)] = piece
        return window


class SourceFilesDataModule(PrefetchCacheDataModule):
    """Windows of bytes of Python source files, each file once in an epoch.

    Args:
        context: Bytes of a window that are looked at; a window has one more, to be predicted.
        directory: Where to look for `.py` files. None: this Python's standard library.
        batch_size, storage, capacity, prefetch, lookahead, pinned, drop_last, tail, seed,
            num_workers, worker_type: See `PrefetchCacheDataModule`.

    Raises:
        ConfigError: an argument is of no use; the message says what was expected.
    """

    def __init__(
        self,
        context: int = 128,
        directory: str | None = None,
        batch_size: int = 32,
        storage: str = "embedded",
        capacity: int | str = "16MiB",
        prefetch: int = 32,
        lookahead: int | str | None = None,
        pinned: int | str = 0,
        drop_last: bool = False,
        tail: TailRule = "pad",
        seed: int = 0,
        num_workers: int = 0,
        worker_type: Workers = "thread",
    ) -> None:
        if context < 1:
            raise ConfigError(got_expected("context", context, "at least 1", "context=128"))
        self.directory = Path(directory or sysconfig.get_paths()["stdlib"])
        super().__init__(
            batch_size=batch_size,
            storage=storage,
            capacity=capacity,
            prefetch=prefetch,
            lookahead=lookahead,
            pinned=pinned,
            drop_last=drop_last,
            tail=tail,
            seed=seed,
            decode=Crop(context + 1),
            collate=torch.stack,
            num_workers=num_workers,
            worker_type=worker_type,
        )

    @override
    def setup(self, stage: str) -> None:
        """List the files.

        Raises:
            ConfigError: there are too few of them.
        """
        found = self.files()
        if len(found) < CYCLE:
            raise ConfigError(
                f"SourceFilesDataModule: got {len(found)} .py files in {str(self.directory)!r}, "
                f"expected at least {CYCLE}. Try a directory with more Python source."
            )
        training = [path for at, path in enumerate(found) if at % CYCLE != VALIDATION]
        self.use("train", _listing(self.directory, training))
        self.use("val", _listing(self.directory, found[VALIDATION::CYCLE]))
        super().setup(stage)

    def files(self) -> list[Path]:
        """Return the files, in the order of their names."""
        found: list[Path] = []
        for folder, subfolders, names in os.walk(self.directory):
            subfolders[:] = [name for name in subfolders if name not in SKIPPED]
            found += [Path(folder, name) for name in names if name.endswith(".py")]
        return sorted(path for path in found if path.stat().st_size)


def _listing(root: Path, files: list[Path]) -> Path:
    """Write a listing, under a name that follows from its contents: all ranks write the same."""
    for path in files:
        if not {"\t", "\n"}.isdisjoint(str(path)):
            raise ConfigError(
                f"SourceFilesDataModule: got {str(path)!r}, expected names without tabs and line "
                "ends, which a listing cannot hold. Rename it."
            )
    text = "".join(f"{path.relative_to(root).as_posix()}\t{path}\n" for path in files)
    name = f"dlres-sources-{os.getuid()}-{hashlib.sha256(text.encode()).hexdigest()[:12]}.tsv"
    target = Path(tempfile.gettempdir(), name)
    descriptor, unfinished = tempfile.mkstemp(suffix=".tsv")
    with open(descriptor, "w", encoding="utf-8") as file:
        file.write(text)
    Path(unfinished).replace(target)
    return target
