"""Tests of the command `dlres`: its output, and `fit` with the example config."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

import pytest
import torch

import lightning_dlres
import lightning_dlres_command
from lightning_dlres.cli.main import COMMANDS, main
from lightning_dlres.core.errors import ConfigError
from tests.support.rank_environment import set_torchrun_variables
from tests.support.rank_pool import RankContext, RankOutcome, RankPool
from tests.support.scripts import RunScript

CONFIG = Path(__file__).resolve().parents[2] / "examples" / "configs" / "hetero_pipe.yaml"
TINY = (
    "--trainer.limit_train_batches=3",
    "--trainer.max_epochs=1",
    "--trainer.limit_val_batches=1",
    "--trainer.log_every_n_steps=1",
    "--model.init_args.width=16",
    "--model.init_args.depth=2",
    "--data.init_args.batch_size=8",
    "--data.init_args.max_bytes=600kB",
)


def run_in(context: RankContext, directory: str, *options: str) -> int:
    """Run `dlres` in a directory, as a rank of torchrun."""
    os.chdir(directory)
    set_torchrun_variables(context)
    return main(options)


def assert_trained(outcomes: list[RankOutcome], directory: Path) -> None:
    """Assert that `fit` printed its plan and wrote its files."""
    assert [outcome.value for outcome in outcomes] == [0] * len(outcomes), outcomes
    assert "Pipeline plan" in outcomes[0].output, outcomes
    assert "Predicted step" in outcomes[0].output
    assert "Predicted step" not in outcomes[1].output
    (checkpoint,) = directory.glob("lightning_logs/version_0/checkpoints/last.ckpt")
    state = torch.load(checkpoint, weights_only=True)["state_dict"]
    assert {name.split(".")[1] for name in state} == {"0", "1", "2", "3"}
    metrics = (directory / "lightning_logs/version_0/metrics.csv").read_text()
    assert "val_bits_per_byte" in metrics.splitlines()[0]


@pytest.mark.parametrize("argv", [["--help"], ["-h"], []])
def test_help_names_every_command(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(argv) == 0
    printed = capsys.readouterr().out
    assert all(f"\n  {command} " in printed for command in COMMANDS)


def test_version_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"dlres {lightning_dlres.__version__}\n"


# Program that prints the heavy modules that the commands imported, and the number of all modules.
SCRIPT = """
import sys
import lightning_dlres_command as command
for words in sys.argv[1].split(";"):
    sys.argv = ["dlres", *words.split()]
    try:
        status = command.main()
    except SystemExit as ended:
        status = ended.code
    assert not status, (words, status)
heavy = [name for name in ("torch", "lightning", "matplotlib") if name in sys.modules]
print(heavy, len(sys.modules), file=sys.stderr)
"""


def test_commands_that_need_no_torch_do_not_import_it(
    tmp_path: Path, run_script: RunScript
) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "a.txt").write_text("sample")
    words = "--help;--version;store --help;store ls data;store verify data"
    ran = run_script(SCRIPT, words)
    assert ran.returncode == 0, ran.output
    assert "a.txt" in ran.output
    last = [line for line in ran.output.splitlines() if line.startswith("[")][-1]
    heavy, modules = last.rsplit(" ", 1)
    assert heavy == "[]"
    # torch alone imports more than a thousand.
    assert int(modules) < 900


def test_the_script_runs_all_commands(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    scripts = re.search(r"^dlres = (.*)$", (CONFIG.parents[2] / "pyproject.toml").read_text(), re.M)
    assert scripts is not None
    assert scripts[1] == '"lightning_dlres_command:main"'
    monkeypatch.setattr(sys, "argv", ["dlres", "train"])
    assert lightning_dlres_command.main() == 2
    assert "got 'train'" in capsys.readouterr().err
    assert sys.modules["lightning_dlres"] is lightning_dlres


def test_an_unknown_command_lists_the_commands(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train"]) == 2
    printed = capsys.readouterr().err
    assert "got 'train'" in printed
    assert all(command in printed for command in COMMANDS)


@pytest.mark.parametrize("rank", [0, 1])
def test_only_rank_zero_prints_an_error(
    rank: int, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(command: str, options: list[str]) -> int:
        raise ConfigError(f"{command}: got {options}, expected others. Try them.")

    monkeypatch.setattr("lightning_dlres.cli.fit.run_trainer", refuse)
    monkeypatch.setenv("LOCAL_RANK", str(rank))
    assert main(["fit", "--bad"]) == 2
    printed = capsys.readouterr().err
    assert printed == (
        "dlres: fit: got ['--bad'], expected others. Try them.\n" if rank == 0 else ""
    )


def test_fit_trains_the_example(pool: RankPool, tmp_path: Path) -> None:
    options = (f"--config={CONFIG}", *TINY, "--trainer.strategy=dlres_hetero_pipe")
    outcomes = pool.run_expecting_errors(run_in, 2, str(tmp_path), "fit", *options)
    assert_trained(outcomes, tmp_path)
    assert "profiling" in outcomes[0].output
