"""Ways to start a run: a script without a guard, and a notebook."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from lightning.pytorch import Trainer

from lightning_dlres import ConfigError, HeteroPipeStrategy
from tests.strategies.hetero_pipe.test_launch import SCRIPT
from tests.support.scripts import RunScript

GUARD = 'if __name__ == "__main__":\n'


@pytest.mark.exhaustive
def test_a_script_without_a_guard_trains(run_script: RunScript, tmp_path: Path) -> None:
    before, after = SCRIPT.split(GUARD)
    result = run_script(f"{before}if True:\n{after}", cwd=tmp_path)
    assert result.returncode == 0, result.output
    assert "steps 8 predicted 6 (3, 2)" in result.output


def test_a_notebook_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    # Python sets it in interactive sessions, and IPython in notebooks.
    monkeypatch.setattr(sys, "ps1", ">>> ", raising=False)
    with pytest.raises(ConfigError, match="got a notebook or an interactive session"):
        Trainer(strategy=HeteroPipeStrategy(), accelerator="cpu", devices=2, logger=False)
    Trainer(strategy=HeteroPipeStrategy(), accelerator="cpu", devices=1, logger=False)
