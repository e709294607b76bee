"""Files of CURVE keys: a pair is written completely, or not at all."""

from __future__ import annotations

import errno
from pathlib import Path
from typing import Any

import pytest
import zmq.auth

from lightning_dlres.core.errors import ConfigError
from lightning_dlres.core.wire.keys import create_keys, load_keys, load_public_key


@pytest.mark.parametrize(
    ("error", "raised", "words"),
    [
        (OSError(errno.ENOSPC, "No space left"), ConfigError, "No space left"),
        (KeyboardInterrupt("stopped"), KeyboardInterrupt, "stopped"),
    ],
    ids=["full disk", "Ctrl-C"],
)
def test_a_failed_write_leaves_no_files(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    error: BaseException,
    raised: type[BaseException],
    words: str,
) -> None:
    def write_one(directory: Path, name: str) -> None:
        (directory / f"{name}.key").write_text("half a key")
        raise error

    with monkeypatch.context() as patched:
        patched.setattr(zmq.auth, "create_certificates", write_one)
        with pytest.raises(raised, match=words):
            create_keys(tmp_path, "node")
    assert not list(tmp_path.iterdir())
    public, secret = create_keys(tmp_path, "node")
    assert load_public_key(public) == load_keys(secret).public


@pytest.mark.parametrize("suffix", ["key", "key_secret"])
def test_a_name_that_another_process_takes_during_the_call_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, suffix: str
) -> None:
    path = tmp_path / f"node.{suffix}"

    # `create_keys` makes the directory just before it creates the files.
    def take_name(self: Path, *_: Any, **__: Any) -> None:
        path.write_text("the other process's key")

    monkeypatch.setattr(Path, "mkdir", take_name)
    with pytest.raises(ConfigError, match=r"name must be new, got 'node': .* exists"):
        create_keys(tmp_path, "node")
    assert list(tmp_path.iterdir()) == [path]
    assert path.read_text() == "the other process's key"


def test_a_directory_that_is_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"directory must be writable, got .*file: File exists"):
        create_keys(tmp_path / "file", "node")
