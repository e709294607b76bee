"""Source file demo: a model trains on one window of each file."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from lightning_dlres.core.errors import ConfigError
from lightning_dlres.demos.byte_gpt import ByteGPT
from lightning_dlres.demos.source_files import SourceFilesDataModule
from tests.support.quiet import trainer

pytestmark = pytest.mark.usefixtures("own_runtime_directory")


class RecordingGPT(ByteGPT):
    """Model that records its training batches."""

    def __init__(self) -> None:
        super().__init__(width=8, depth=1, heads=1, context=16)
        self.batches: list[torch.Tensor] = []

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        self.batches.append(batch)
        return super().training_step(batch, batch_idx)


def test_training_uses_one_window_of_each_file_in_every_epoch(tmp_path: Path) -> None:
    for number in range(30):
        text = "\n".join(f"value{i} = {i * number}" for i in range(number * 3 + 1))
        (tmp_path / f"module{number}.py").write_text(text)
    data = SourceFilesDataModule(context=16, directory=str(tmp_path), batch_size=4)
    model = RecordingGPT()
    trainer(tmp_path, max_epochs=2).fit(model, datamodule=data)
    windows = torch.cat(model.batches)
    # One file of ten is for validation.
    assert windows.shape == (2 * 27, 17)
    assert bytes(windows[0].tolist()).isascii()


def test_a_directory_with_too_few_files_is_refused(tmp_path: Path) -> None:
    data = SourceFilesDataModule(directory=str(tmp_path / "nothing"))
    with pytest.raises(ConfigError, match=r"must have at least 10 \.py files"):
        trainer(tmp_path).fit(ByteGPT(), datamodule=data)
