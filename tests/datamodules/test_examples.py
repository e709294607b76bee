"""Examples of the prefetch cache: each one trains."""

from __future__ import annotations

import runpy
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Trainer

import lightning_dlres as dlres
from lightning_dlres.demos.byte_gpt import ByteGPT
from lightning_dlres.demos.source_files import SourceFilesDataModule
from lightning_dlres.prefetch.cache.samples import Sample

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(autouse=True)
def own_runtime_directory(monkeypatch: pytest.MonkeyPatch) -> Any:
    with tempfile.TemporaryDirectory(prefix="dl") as short:
        monkeypatch.setenv("XDG_RUNTIME_DIR", short)
        yield


def test_the_digits_example_learns(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # No dependency of the tests: it brings SciPy, with which the import of torchmetrics takes
    # seconds longer.
    pytest.importorskip("sklearn", reason="the example asks for scikit-learn")
    monkeypatch.chdir(tmp_path)
    runpy.run_path(str(ROOT / "examples/prefetch_cache.py"), run_name="__main__")
    accuracy = float(capsys.readouterr().out.rpartition("accuracy: ")[2])
    assert accuracy > 0.8


def test_the_source_file_demo_trains_on_long_enough_files(tmp_path: Path) -> None:
    for number in range(30):
        text = "\n".join(f"value{i} = {i * number}" for i in range(number * 3 + 1))
        (tmp_path / f"module{number}.py").write_text(text)
    data = SourceFilesDataModule(context=16, directory=str(tmp_path), batch_size=4)
    seen: list[torch.Tensor] = []

    class Model(ByteGPT):
        def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
            seen.append(batch)
            return super().training_step(batch, batch_idx)

    trainer = Trainer(
        max_epochs=2,
        accelerator="cpu",
        devices=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Model(width=8, depth=1, heads=1, context=16), datamodule=data)
    rows = torch.cat(seen)
    assert rows.shape == (2 * 27, 17)
    assert bytes(rows[0].tolist()).isascii()
    empty = SourceFilesDataModule(directory=str(tmp_path / "nothing"))
    with pytest.raises(dlres.ConfigError, match=r"must have at least 10 \.py files"):
        trainer.fit(ByteGPT(), datamodule=empty)


def test_sample_is_a_public_name() -> None:
    assert dlres.Sample is Sample
