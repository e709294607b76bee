"""Command `dlres store`, run as a user types it."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lightning_dlres.cli.main import main
from lightning_dlres.cli.store import serve_main
from lightning_dlres.core.host import lightweight_process
from lightning_dlres.prefetch.storage.nodes.node_storage import NodeStorage

# Script that becomes the lightweight process of `dlres store serve` without the imports before it.
LIGHTWEIGHT_SCRIPT = f"""
import os, runpy, sys
module = runpy.run_path({lightweight_process.__file__!r})
command = module["lightweight_command"]("lightning_dlres.cli.store:serve_main", *sys.argv[1:])
os.execv(command[0], command)
"""
# Script that does the same as the command `dlres`, which starts this command without Lightning.
COMMAND_SCRIPT = """
import sys
from lightning_dlres_command import main
sys.exit(main())
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    root = tmp_path / "files"
    root.mkdir()
    for number in range(30):
        (root / f"{number:02d}.txt").write_text(f"sample {number}" * number)
    return root


def test_a_store_is_put_listed_and_verified(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    store = tmp_path / "store"
    assert main(["store", "put", str(folder), str(store), "--packs", "2"]) == 0
    assert "Put 30 samples" in capsys.readouterr().out
    assert main(["store", "ls", str(store), "--limit", "3"]) == 0
    printed = capsys.readouterr().out
    assert "02.txt" in printed
    assert "03.txt" not in printed
    assert "the first 3 of 30 samples" in printed
    assert main(["store", "verify", str(store)]) == 0
    assert "30 of 30 samples are intact" in capsys.readouterr().out
    (pack,) = store.glob("samples-*-00001-of-00002.bin")
    data = bytearray(pack.read_bytes())
    data[-1] ^= 1
    pack.write_bytes(data)
    assert main(["store", "verify", str(store)]) == 1
    output = capsys.readouterr()
    assert "29 of 30 samples are intact" in output.out
    assert "'29.txt' (sample_id 29) is damaged" in output.err


def test_only_files_with_the_endings_are_samples(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "7.jpg").write_text("x")
    (folder / "8.JPEG").write_text("x")
    store = tmp_path / "store"
    assert main(["store", "put", str(folder), str(store), "--extensions", ".jpg", ".jpeg"]) == 0
    assert "Put 2 samples" in capsys.readouterr().out
    assert main(["store", "ls", str(store), "--extensions", ".jpeg"]) == 0
    printed = capsys.readouterr().out
    assert "8.JPEG" in printed
    assert "7.jpg" not in printed


def test_links_out_of_a_folder_are_followed_on_request_and_reported_otherwise(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "secret").write_text("x")
    (folder / "out").symlink_to(tmp_path / "secret")
    for command in (["ls", folder], ["verify", folder], ["put", folder, tmp_path / "store"]):
        argv = ["store", *map(str, command)]
        assert main(argv) == 0
        printed = capsys.readouterr()
        assert "30 samples" in printed.out
        assert printed.err.count("1 link leads out of the folder") == 1
        overwrite = ["--overwrite"] if command[0] == "put" else []
        assert main([*argv, *overwrite, "--follow-links"]) == 0
        printed = capsys.readouterr()
        assert "31 samples" in printed.out
        assert "leads out" not in printed.err


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["put", "{files}", "{files}/../store", "--packs", "0"], "packs"),
        (["ls", "{files}/nothing"], "Nothing is there"),
        (["keys", "a", "--directory", "/proc/nowhere"], "directory must be writable"),
    ],
)
def test_mistakes_end_with_status_2_and_a_message(
    argv: list[str], words: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["store", *(argument.format(files=folder) for argument in argv)]) == 2
    assert words in capsys.readouterr().err


def test_serve_answers_until_it_is_stopped(start_script: Any, folder: Path, tmp_path: Path) -> None:
    serving = start_script(COMMAND_SCRIPT, "store", "serve", folder, "--nodes", 2, "--port", 0)
    serving_line = serving.wait_for_line("Serving 30 samples .* as all of 2 nodes: (.*)")
    storage = NodeStorage(serving_line[1].split(","), timeout=20)
    assert storage.table.key(3) == "03.txt"
    storage.submit(0, 1, np.array([1, 3], np.uint32))
    storage.close()
    port = int(serving_line[1].split(",")[0].rpartition(":")[2])
    # The port of the first server is taken.
    second = start_script(LIGHTWEIGHT_SCRIPT, "serve", folder, "--port", port)
    assert second.wait() == 2
    assert "cannot listen on" in second.output()
    os.kill(serving.pid, signal.SIGTERM)
    assert serving.wait() == 0
    assert "Answered" in serving.output()


@pytest.fixture
def handlers() -> Iterator[None]:
    """Restore the handlers of signals after the test."""
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.usefixtures("handlers")
@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--nodes", "0"], "--nodes"),
        (["--node", "2", "--nodes", "2", "--port", "0"], ", got 2"),
        (["--key", "nowhere"], "--allow"),
        (["--bind", "0.0.0.0"], "--insecure"),
    ],
    ids=str,
)
def test_bad_options_of_serve_are_refused(
    options: list[str],
    words: str,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr("sys.argv", ["dlres", "serve", str(folder), *options])
    assert serve_main() == 2
    assert words in capsys.readouterr().err


def test_an_output_that_its_reader_closes_early_prints_no_error(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    with open(writer, "w") as output:
        monkeypatch.setattr("sys.stdout", output)
        assert main(["store", "ls", str(folder)]) == 1
    assert capsys.readouterr().err == ""
