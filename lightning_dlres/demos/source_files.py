"""Source files of Python's standard library, as samples for the prefetch cache.

Every machine with Python has these files, and they vary in size as real samples do.
"""

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

from lightning_dlres.core.checks import whole_number
from lightning_dlres.core.errors import ConfigError
from lightning_dlres.datamodules import PrefetchCacheDataModule
from lightning_dlres.datamodules.split_configs import TailRule
from lightning_dlres.demos.source_text import (
    SPLIT_CYCLE,
    VALIDATION_POSITION,
    check_directory,
    python_files,
)
from lightning_dlres.prefetch.cache.samples import Sample
from lightning_dlres.prefetch.loading.workers import Workers


@dataclass(frozen=True)
class Crop:
    """Transform that returns a window of a file's bytes.

    The sample's seed sets the position of the window. It changes with each epoch and is the same
    after a restart. Files that are too short are padded with newlines.

    Attributes:
        length: Number of bytes in a window.
    """

    length: int

    def __call__(self, sample: Sample) -> Tensor:
        """Return the window as uint8[length]."""
        data = sample.tensor()
        start = sample.seed % max(len(data) - self.length + 1, 1)
        window = torch.full((self.length,), ord("\n"), dtype=torch.uint8)
        piece = data[start : start + self.length]
        window[: len(piece)] = piece
        return window


class SourceFilesDataModule(PrefetchCacheDataModule):
    """Data module that yields one window of bytes of each Python source file in every epoch.

    Args:
        context: Number of bytes that the model reads. A window has one byte more, because the
            target of each byte is the next one.
        directory: Directory with `.py` files. None: this Python's standard library.
        batch_size, storage, capacity, prefetch, lookahead, pinned, drop_last, tail, seed,
            num_workers, worker_type: See `PrefetchCacheDataModule`.

    Raises:
        ConfigError: If an argument is invalid.
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
        whole_number("context", context, "context=128")
        check_directory(directory)
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
        """List the files, and use one of every `SPLIT_CYCLE` for validation.

        Raises:
            ConfigError: If there are too few files.
        """
        files = self.files()
        if len(files) < SPLIT_CYCLE:
            raise ConfigError(
                f"directory must have at least {SPLIT_CYCLE} .py files, got {len(files)} .py files "
                f"in {str(self.directory)!r}. Use a directory with more Python source."
            )
        training = [
            path for index, path in enumerate(files) if index % SPLIT_CYCLE != VALIDATION_POSITION
        ]
        self.use("train", _write_listing(self.directory, training))
        self.use("val", _write_listing(self.directory, files[VALIDATION_POSITION::SPLIT_CYCLE]))
        super().setup(stage)

    def files(self) -> list[Path]:
        """Return the non-empty `.py` files, sorted by path."""
        return [path for path in python_files(self.directory) if path.stat().st_size]


def _write_listing(root: Path, files: list[Path]) -> Path:
    """Write a listing of files and return the path of the listing.

    Its name contains a hash of its content, so that all ranks write the same file. A rename puts
    it in place, so that no rank reads a part of it.
    """
    for path in files:
        if not {"\t", "\n"}.isdisjoint(str(path)):
            raise ConfigError(
                f"file names must have no tabs or newlines, got {str(path)!r}. Rename the file."
            )
    text = "".join(f"{path.relative_to(root).as_posix()}\t{path}\n" for path in files)
    name = f"dlres-sources-{os.getuid()}-{hashlib.sha256(text.encode()).hexdigest()[:12]}.tsv"
    target = Path(tempfile.gettempdir(), name)
    descriptor, temporary_path = tempfile.mkstemp(suffix=".tsv")
    with open(descriptor, "w", encoding="utf-8") as file:
        file.write(text)
    Path(temporary_path).replace(target)
    return target
