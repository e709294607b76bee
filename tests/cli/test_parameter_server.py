"""Command `dlres ps`, run as a user types it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_dlres.cli.main import main
from lightning_dlres.cli.parameter_server import serve_main
from lightning_dlres.core.host import lightweight_process
from lightning_dlres.core.wire.keys import CurveKeys, load_keys, load_public_key
from lightning_dlres.paramserver.execute.server.service import ParameterServer
from tests.support.parameter_jobs import new_worker

# Script that becomes the lightweight process of `dlres ps serve` without the imports before it.
SCRIPT = f"""
import os, runpy, sys
module = runpy.run_path({lightweight_process.__file__!r})
function = "lightning_dlres.cli.parameter_server:serve_main"
command = module["lightweight_command"](function, *sys.argv[1:])
os.execv(command[0], command)
"""
# Script that does the same as the command `dlres`, which starts this command without Lightning.
COMMAND_SCRIPT = """
import sys
from lightning_dlres_command import main
sys.exit(main())
"""
SERVING = "Serving parameters on 2 servers .*: (tcp://.*)"


def test_serve_answers_until_it_is_stopped(
    start_script: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    serving = start_script(COMMAND_SCRIPT, "ps", "serve", "--shards", 2, "--port", 0)
    addresses = serving.wait_for_line(SERVING)[1].split(",")
    assert len(addresses) == 2
    worker = new_worker(addresses)
    worker.session.start()
    worker.session.join()
    for _ in range(3):
        worker.step()
    assert main(["ps", "status", ",".join(addresses), "--once"]) == 0
    printed = capsys.readouterr().out
    assert "1 of 2" in printed
    assert "bsp" in printed
    assert "active" in printed
    worker.session.leave()
    os.kill(serving.pid, signal.SIGTERM)
    assert serving.wait() == 0
    assert "Made 3 updates" in serving.output()
    assert main(["ps", "status", addresses[0], "--once"]) == 1
    assert "no answer" in capsys.readouterr().out


def test_a_killed_server_goes_on_from_its_snapshot_with_an_optimizer_of_its_own(
    start_script: Any, tmp_path: Path
) -> None:
    (tmp_path / "own_optimizer.py").write_text(
        "import torch\n\n\nclass Own(torch.optim.SGD):\n    pass\n"
    )
    options = ["--optimizer", "own_optimizer:Own", "--snapshot", tmp_path / "snapshots"]
    environment = {"PYTHONPATH": os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])}
    with ParameterServer() as free:
        port = int(free.address.rpartition(":")[2])
    argv = ["serve", "--port", port, "--snapshot-every", "1h", *options]
    serving = start_script(SCRIPT, *argv, env=environment)
    address = serving.wait_for_line("Serving parameters .*: (tcp://.*)")[1]
    worker = new_worker([address], optimizer_name="own_optimizer:Own", retry_seconds=0.1)
    worker.session.start()
    worker.session.join()
    worker.step()
    os.kill(serving.pid, signal.SIGKILL)
    serving.wait()
    again = start_script(SCRIPT, *argv, env=environment)
    again.wait_for_line("Serving parameters")
    worker.step()
    worker.session.leave()
    plain = new_worker_values(2)
    for name, value in worker.parameters.items():
        assert torch.equal(value, plain[name]), name


def new_worker_values(steps: int) -> dict[str, torch.Tensor]:
    with ParameterServer() as server:
        worker = new_worker([server.address])
        worker.session.start()
        worker.session.join()
        for _ in range(steps):
            worker.step()
        worker.session.leave()
    return worker.parameters


def test_keys_are_written_and_admit_a_client(
    tmp_path: Path, start_script: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("server", "job"):
        assert main(["ps", "keygen", name, "--directory", str(tmp_path)]) == 0
        assert f"{name}.key_secret (keep it on this host)" in capsys.readouterr().out
    files = {name: tmp_path / name for name in ("server.key_secret", "job.key", "job.key_secret")}
    serving = start_script(
        SCRIPT,
        "serve",
        "--port",
        0,
        "--key",
        files["server.key_secret"],
        "--allow",
        files["job.key"],
    )
    address = serving.wait_for_line("Serving parameters .*: (tcp://.*)")[1]
    keys = ["--key", str(files["job.key_secret"]), "--server-key", str(tmp_path / "server.key")]
    assert main(["ps", "status", address, "--once", *keys]) == 0
    assert "no job" in capsys.readouterr().out
    assert load_keys(files["job.key_secret"]).public == load_public_key(files["job.key"])


def test_status_repeats_until_it_is_stopped(start_script: Any) -> None:
    with ParameterServer() as server:
        status = start_script(COMMAND_SCRIPT, "ps", "status", server.address, "--interval", "50ms")
        status.wait_for_line("Servers")
        os.kill(status.pid, signal.SIGTERM)
        assert status.wait() == 0


def test_serve_and_status_do_not_import_lightning(tmp_path: Path) -> None:
    script = (
        "import sys, lightning_dlres_command as c; c._skip_package_imports();"
        "from lightning_dlres.cli import parameter_server;"
        "from lightning_dlres.paramserver.execute.server import service;"
        "from lightning_dlres.paramserver.report import status_tables;"
        "assert not {'lightning', 'pytorch_lightning'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", script], check=True, timeout=120)


@pytest.fixture
def handlers() -> Any:
    """Restore the handlers of signals after the test."""
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.usefixtures("handlers")
@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--shards", "0"], "--shards"),
        (["--key", "nowhere"], "--allow"),
        (["--bind", "0.0.0.0", "--port", "0"], "dlres ps keygen"),
        (["--optimizer", "os:system", "--port", "0"], "torch.optim.Optimizer"),
        (["--optimizer", "nowhere:Class", "--port", "0"], "PYTHONPATH"),
        (["--optimizer", "torch", "--port", "0"], "--optimizer"),
        (["--snapshot", "x", "--port", "0"], "--port"),
        (["--snapshot-every", "never", "--port", "0"], "snapshot_every"),
        (["--port", "70000"], "port"),
    ],
    ids=str,
)
def test_bad_options_of_serve_are_refused(
    options: list[str],
    words: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr("sys.argv", ["dlres", "serve", *options])
    assert serve_main() == 2
    assert words in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["localhost:1", "--interval", "never"], "--interval"),
        (["localhost:1", "--key", "x"], "--server-key"),
        (["nonsense"], "address"),
    ],
    ids=str,
)
def test_bad_options_of_status_are_refused(
    options: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["ps", "status", *options]) == 2
    assert words in capsys.readouterr().err


def test_an_unknown_client_gets_no_state(capsys: pytest.CaptureFixture[str]) -> None:
    keys, known = CurveKeys.generate(), CurveKeys.generate()
    with ParameterServer(curve=keys, allowed=[known.public]) as server:
        assert main(["ps", "status", server.address, "--once"]) == 1
    assert "no answer" in capsys.readouterr().out
