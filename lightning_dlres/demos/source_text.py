"""Windows of bytes from the source of Python's standard library, for byte-level models.

The source is real text that every machine with Python has.
"""

from __future__ import annotations

import os
import sysconfig
from pathlib import Path

import torch
from lightning.pytorch import LightningDataModule
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from lightning_dlres.core.checks import instance, whole_number
from lightning_dlres.core.errors import ConfigError
from lightning_dlres.core.units import parse_bytes

# Names of folders that `python_files` skips.
_SKIPPED_FOLDERS = {"site-packages", "dist-packages", "test", "tests", "idle_test"}
# Each cycle of SPLIT_CYCLE consecutive files has one file for validation and one for test, at these
# positions.
SPLIT_CYCLE, VALIDATION_POSITION, TEST_POSITION = 10, 4, 9


def check_directory(directory: object) -> None:
    """Raise unless the argument `directory` is a path or None.

    Raises:
        ConfigError: If it is neither.
    """
    kinds = (str, Path, type(None))
    instance("directory", directory, kinds, "the path of a folder", "directory=None")


def python_files(directory: Path) -> list[Path]:
    """Return the `.py` files below a directory, sorted by path."""
    files: list[Path] = []
    for folder, subfolders, names in os.walk(directory):
        subfolders[:] = [name for name in subfolders if name not in _SKIPPED_FOLDERS]
        files += [Path(folder, name) for name in names if name.endswith(".py")]
    # A broken link is no file. Emacs leaves links such as `.#module.py` beside edited files.
    return sorted(path for path in files if path.is_file())


class SourceTextDataModule(LightningDataModule):
    """Windows of bytes of Python source, split by file into training, validation and test.

    Args:
        context: Number of bytes that the model reads. A window has one byte more, because the
            target of each byte is the next one.
        batch_size: Number of windows in a batch.
        max_bytes: Maximum size of the text, such as "4MiB". Files are used in order of their paths,
            until the next file would exceed it.
        directory: Directory with `.py` files. None: this Python's standard library.

    Raises:
        ConfigError: If an argument is invalid.
    """

    def __init__(
        self,
        context: int = 128,
        batch_size: int = 48,
        max_bytes: int | str = "8MiB",
        directory: str | None = None,
    ) -> None:
        super().__init__()
        whole_number("context", context, "context=128")
        whole_number("batch_size", batch_size, "batch_size=48")
        check_directory(directory)
        self.context, self.batch_size = context, batch_size
        self.max_bytes = parse_bytes(max_bytes, "max_bytes")
        self.directory = Path(directory or sysconfig.get_paths()["stdlib"])

    def setup(self, stage: str | None = None) -> None:
        """Read the text.

        Raises:
            ConfigError: If a split has too few windows.
        """
        files = self.files()
        training = [
            f
            for i, f in enumerate(files)
            if i % SPLIT_CYCLE not in (VALIDATION_POSITION, TEST_POSITION)
        ]
        self.training = ByteWindows(training, self.context)
        self.validation = ByteWindows(files[VALIDATION_POSITION::SPLIT_CYCLE], self.context)
        self.testing = ByteWindows(files[TEST_POSITION::SPLIT_CYCLE], self.context)
        counts = [len(part) for part in (self.training, self.validation, self.testing)]
        if counts[0] < self.batch_size or not all(counts):
            raise ConfigError(
                f"directory must have at least {self.batch_size} windows (one batch) of "
                f"{self.context + 1} bytes for training, 1 for validation and 1 for test, got "
                f"{len(files)} .py files in {str(self.directory)!r} with {counts[0]}, {counts[1]} "
                f"and {counts[2]} windows. Use a directory with more Python source, a larger "
                "max_bytes, or a smaller batch_size."
            )

    def files(self) -> list[Path]:
        """Return the first `.py` files in order of their paths, at most `max_bytes` in total."""
        files, total = [], 0
        for path in python_files(self.directory):
            total += path.stat().st_size
            if total > self.max_bytes:
                break
            files.append(path)
        return files

    def train_dataloader(self) -> DataLoader[Tensor]:
        """Return a loader of shuffled batches, all of the same size."""
        return DataLoader(self.training, batch_size=self.batch_size, shuffle=True, drop_last=True)

    def val_dataloader(self) -> DataLoader[Tensor]:
        """Return a loader of the windows of the validation files."""
        return DataLoader(self.validation, batch_size=self.batch_size)

    def test_dataloader(self) -> DataLoader[Tensor]:
        """Return a loader of the windows of the test files."""
        return DataLoader(self.testing, batch_size=self.batch_size)

    def predict_dataloader(self) -> DataLoader[Tensor]:
        """Return a loader of the windows of the test files."""
        return self.test_dataloader()


class ByteWindows(Dataset[Tensor]):
    """Windows of `context` + 1 bytes of the concatenated files.

    Each window begins with the last byte of the previous one. So every byte except the first is
    a target once. Bytes at the end that fill no window are left out.

    Args:
        files: Files to concatenate, in this order.
        context: Number of bytes that the model reads.
    """

    def __init__(self, files: list[Path], context: int) -> None:
        text = bytearray().join(path.read_bytes() for path in files)
        # `frombuffer` refuses an empty buffer. One byte makes no window either.
        self.text = torch.frombuffer(text or bytearray(1), dtype=torch.uint8)
        self.context = context

    def __len__(self) -> int:
        return (len(self.text) - 1) // self.context

    def __getitem__(self, index: int) -> Tensor:
        # `range` raises IndexError past the end. Iteration over this data set ends with it.
        start = range(len(self))[index] * self.context
        return self.text[start : start + self.context + 1]
