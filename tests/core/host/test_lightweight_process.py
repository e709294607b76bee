"""Tests of processes that import only parts of the package."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from lightning_dlres.core.host.lightweight_process import lightweight_command


def test_the_process_imports_modules_from_the_same_paths(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    known, here = tmp_path / "known", tmp_path / "here"
    for directory, words in ((known, "known"), (here, "planted")):
        directory.mkdir()
        (directory / "dlres_twin.py").write_text(f"def main(): print({words!r})")
    monkeypatch.syspath_prepend(known)
    done = subprocess.run(
        lightweight_command("dlres_twin:main"), cwd=here, capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "known\n", "")


def test_the_process_gets_its_arguments_and_does_not_import_torch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "dlres_looks.py").write_text(
        "import sys\n"
        "from lightning_dlres.core.wire import endpoint, server\n"
        "def main(): print(sys.argv[1:], 'torch' in sys.modules)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    done = subprocess.run(
        lightweight_command("dlres_looks:main", "a b", ""),
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (done.returncode, done.stdout) == (0, "['a b', ''] False\n")
