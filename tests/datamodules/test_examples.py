"""The example of the prefetch cache learns, and the name that it needs is public."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

import lightning_dlres as dlres
from lightning_dlres.prefetch.cache.samples import Sample

ROOT = Path(__file__).resolve().parents[2]


pytestmark = pytest.mark.usefixtures("own_runtime_directory")


def test_the_digits_example_learns(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The tests do not install scikit-learn: it brings SciPy, and then torchmetrics takes seconds
    # longer to import.
    pytest.importorskip("sklearn", reason="the example asks for scikit-learn")
    monkeypatch.chdir(tmp_path)
    runpy.run_path(str(ROOT / "examples/prefetch_cache.py"), run_name="__main__")
    accuracy = float(capsys.readouterr().out.rpartition("accuracy: ")[2])
    assert accuracy > 0.8


def test_sample_is_a_public_name() -> None:
    assert dlres.Sample is Sample
