"""Tests of the command `dlres`: its output, and `fit` with the example config."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest

import lightning_dlres
import lightning_dlres_command
from lightning_dlres.cli.main import COMMANDS, main
from lightning_dlres.core.errors import ConfigError
from tests.support.commands import CONFIG, ROOT, TINY, assert_trained, run_command_in
from tests.support.rank_pool import RankPool
from tests.support.scripts import RunScript


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
import lightning_dlres_command
for command_line in sys.argv[1].split(";"):
    sys.argv = ["dlres", *command_line.split()]
    try:
        status = lightning_dlres_command.main()
    except SystemExit as ended:
        status = ended.code
    assert not status, (command_line, status)
heavy = [name for name in ("torch", "lightning", "matplotlib") if name in sys.modules]
print(heavy, len(sys.modules), file=sys.stderr)
"""


def test_commands_that_need_no_torch_do_not_import_it(
    tmp_path: Path, run_script: RunScript
) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "a.txt").write_text("sample")
    command_lines = "--help;--version;store --help;store ls data;store verify data"
    result = run_script(SCRIPT, command_lines)
    assert result.returncode == 0, result.output
    assert "a.txt" in result.output
    last = [line for line in result.output.splitlines() if line.startswith("[")][-1]
    heavy, modules = last.rsplit(" ", 1)
    assert heavy == "[]"
    # torch alone imports more than a thousand.
    assert int(modules) < 900


def test_the_installed_script_runs_the_command(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    scripts = re.search(r"^dlres = (.*)$", (ROOT / "pyproject.toml").read_text(), re.M)
    assert scripts is not None
    assert scripts[1] == '"lightning_dlres_command:main"'
    monkeypatch.setattr(sys, "argv", ["dlres", "train"])
    assert lightning_dlres_command.main() == 2
    assert "got 'train'" in capsys.readouterr().err
    # The script replaces the package by an empty one only if it is not imported yet.
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


def test_a_bad_value_of_a_constructor_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    config = ROOT / "examples" / "configs" / "parameter_server.yaml"
    bad = "--trainer.strategy.init_args.staleness=-1"
    assert main(["fit", "--config", str(config), bad]) == 2
    assert "\ndlres: staleness must be a whole number" in "\n" + capsys.readouterr().err


def test_a_bad_value_of_a_data_module_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = data_config(tmp_path, {"timeout": "soon"})
    assert main(["fit", "--config", str(config)]) == 2
    printed = capsys.readouterr().err
    assert printed.splitlines()[-1].startswith("dlres: timeout must be a time in seconds")
    assert "hunter2" not in printed


@pytest.mark.parametrize("argument", [{"batch_size": "many"}, {"bach_size": 3}])
def test_errors_of_the_parser_show_no_storage_options(
    argument: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main(["fit", "--config", str(data_config(tmp_path, argument))])
    printed = capsys.readouterr().err
    assert str(*argument) in printed
    assert "hunter2" not in printed


def data_config(directory: Path, arguments: dict[str, Any]) -> Path:
    """Write a config file of `dlres fit` whose data module has these arguments and a secret."""
    arguments = {"train": "s3://b/x", **arguments, "storage_options": {"secret": "hunter2"}}
    document = {
        "trainer": {"accelerator": "cpu", "logger": False},
        "model": {"class_path": "lightning.pytorch.demos.boring_classes.BoringModel"},
        "data": {
            "class_path": "lightning_dlres.PrefetchCacheDataModule",
            "init_args": arguments,
        },
    }
    path = directory / "config.yaml"
    # JSON is YAML.
    path.write_text(json.dumps(document))
    return path


def test_classes_of_the_package_have_short_names(run_script: RunScript) -> None:
    # In a process of its own, since a class has one as soon as anything has imported it.
    program = """
        import sys
        from lightning_dlres.cli.main import main
        main(["fit", *sys.argv[1:], "--print_config"])
    """
    names = {
        "--data": "PrefetchCacheDataModule",
        "--optimizer": "OneBitAdam",
        "--trainer.callbacks+": "ParameterMirror",
        "--trainer.plugins": "MemoryPrecision",
    }
    options = [word for option in names.items() for word in option]
    result = run_script(program, *options, "--data.train", "samples")
    assert result.returncode == 0, result.output
    for name in names.values():
        assert f"class_path: lightning_dlres.{name}\n" in result.output


def test_fit_trains_the_example(pool: RankPool, tmp_path: Path) -> None:
    options = (f"--config={CONFIG}", *TINY, "--trainer.strategy=dlres_hetero_pipe")
    # `run` would return the exit status alone, without the printed plan.
    outcomes = pool.run_expecting_errors(run_command_in, 2, str(tmp_path), "fit", *options)
    assert_trained(outcomes, tmp_path)
    assert "profiling" in outcomes[0].output
