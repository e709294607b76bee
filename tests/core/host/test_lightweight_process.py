"""Tests of processes that import only parts of the package."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from lightning_dlres.core.host.lightweight_process import lightweight_command


def test_the_process_imports_modules_from_the_same_paths(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The working folder is not a path of this process, so its module of the same name is not run.
    importable, working = tmp_path / "importable", tmp_path / "working"
    for directory in (importable, working):
        directory.mkdir()
        (directory / "dlres_twin.py").write_text(f"def main(): print({directory.name!r})")
    monkeypatch.syspath_prepend(importable)
    done = subprocess.run(
        lightweight_command("dlres_twin:main"),
        cwd=working,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "importable\n", "")


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
