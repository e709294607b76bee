"""Tests of the demo's text: the same in every run and on every rank, and split by file."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_dlres.core.errors import ConfigError
from lightning_dlres.demos.source_files import SourceFilesDataModule
from lightning_dlres.demos.source_text import ByteWindows, SourceTextDataModule


@pytest.fixture
def sources(tmp_path: Path) -> Path:
    """Fixture: thirty files, each of one repeated byte, and some files that must be skipped."""
    for number in range(30):
        folder = tmp_path / f"package{number % 3}"
        folder.mkdir(exist_ok=True)
        (folder / f"module{number}.py").write_bytes(bytes([number]) * 200)
    for skipped in ("site-packages/other.py", "package0/tests/test_it.py", "package0/notes.txt"):
        path = tmp_path / skipped
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(b"\xff" * 200)
    return tmp_path


def module(directory: Path | None, **options: int | str) -> SourceTextDataModule:
    data = SourceTextDataModule(
        context=16, batch_size=4, directory=str(directory) if directory else None, **options
    )
    data.setup()
    return data


def bytes_in(windows: ByteWindows) -> set[int]:
    return {byte for index in range(len(windows)) for byte in windows[index].tolist()}


def test_the_standard_library_is_read_in_the_same_order_every_time() -> None:
    first, second = module(None, max_bytes="1MiB"), module(None, max_bytes="1MiB")
    assert first.files() == second.files()
    assert sum(path.stat().st_size for path in first.files()) <= 1 << 20
    assert torch.equal(first.training.text, second.training.text)
    (batch, *_) = first.val_dataloader()
    assert batch.shape == (4, 17)
    assert batch.dtype == torch.uint8


def test_training_validation_and_test_share_no_file(sources: Path) -> None:
    data = module(sources)
    parts = [bytes_in(part) for part in (data.training, data.validation, data.testing)]
    assert [len(part) for part in parts] == [24, 3, 3]
    assert set.union(*parts) == set(range(30))


def test_consecutive_windows_share_one_byte(sources: Path) -> None:
    data = module(sources)
    assert all(
        data.training[index][-1] == data.training[index + 1][0]
        for index in range(len(data.training) - 1)
    )


def test_iteration_and_indices_end_with_the_last_window(sources: Path) -> None:
    windows = module(sources).validation
    assert len(list(itertools.islice(windows, len(windows) + 1))) == len(windows)
    assert torch.equal(windows[-1], windows[len(windows) - 1])
    for index in (len(windows), -len(windows) - 1):
        with pytest.raises(IndexError):
            windows[index]


def test_broken_links_are_skipped(sources: Path) -> None:
    text, files = module(sources), SourceFilesDataModule(directory=str(sources))
    expected = text.files(), files.files()
    # Emacs makes such a link beside a file that is being edited.
    (sources / "package0" / ".#module0.py").symlink_to("user@host.123:456")
    assert (text.files(), files.files()) == expected


def test_training_batches_have_one_size_and_are_shuffled(sources: Path) -> None:
    loader = module(sources).train_dataloader()
    first, second = list(loader), list(loader)
    assert {len(batch) for batch in first} == {4}
    assert not torch.equal(torch.cat(first), torch.cat(second))


def test_too_few_files_are_an_error_that_names_the_directory(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"got 0 \.py files") as error:
        module(tmp_path)
    assert str(tmp_path) in str(error.value)


@pytest.mark.parametrize(
    ("argument", "value"),
    [
        ("batch_size", 0),
        ("batch_size", 2.5),
        ("context", "a"),
        ("max_bytes", "much"),
        ("directory", 3),
    ],
)
def test_invalid_arguments_are_refused(argument: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=f"{argument} must be .*, got {value!r}"):
        SourceTextDataModule(**{argument: value})
    if argument in ("context", "directory"):
        with pytest.raises(ConfigError, match=f"{argument} must be .*, got {value!r}"):
            SourceFilesDataModule(**{argument: value})
