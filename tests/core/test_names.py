"""Tests of names in paths: no name leaves its directory."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from lightning_dlres.core.errors import ConfigError
from lightning_dlres.core.names import path_part
from lightning_dlres.core.wire.keys import create_keys
from lightning_dlres.prefetch.cache.launch import HostProcess, runtime_directory
from lightning_dlres.prefetch.cache.options import host_config
from lightning_dlres.prefetch.loading.node import PrefetchCacheNode

BAD = {
    *("", ".", "..", "...", "../x", "a/b", "/etc", "a/", "a\0b", "a\nb", "a\n", "a b", "-rf", ".a"),
    *("a\\b", "x" * 101, "ü" * 51, "\ud800", "a\u2028b", "~root", "a:b", "$HOME", "a*", "a\x7f"),
}


@pytest.mark.parametrize("name", sorted(BAD, key=ascii), ids=ascii)
def test_names_that_cannot_be_part_of_a_path_are_refused(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    (tmp_path / "precious").write_text("kept")
    config = host_config(tmp_path)
    for make in (
        lambda: path_part("name", name),
        lambda: HostProcess(name, config),
        lambda: PrefetchCacheNode(str(tmp_path), cache=name),
        lambda: create_keys(tmp_path / "keys", name),
    ):
        with pytest.raises(ConfigError, match=r"(name|cache) must be a name of 1 to 100 bytes"):
            make()
    assert os.listdir(tmp_path) == ["precious"]


def test_other_types_and_reserved_endings_are_refused() -> None:
    for name in (None, 5, b"bytes", Path("a")):
        with pytest.raises(ConfigError, match="must be a name"):
            path_part("name", name)
    # The lock of "a" would be the directory of "a.lock".
    for name in ("a.lock", "a.log"):
        with pytest.raises(ConfigError, match=r"not ending in \.lock or \.log"):
            HostProcess(name, host_config("."))


@pytest.mark.parametrize("name", ["a", "7", "train-1.5", "höst.example_org", "a~b", "x" * 100])
def test_usual_names_are_accepted(name: str) -> None:
    assert path_part("name", name) == name


def test_the_runtime_directory_does_not_depend_on_the_current_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_RUNTIME_DIR", ".")
    assert runtime_directory().is_absolute()
    assert not os.listdir(tmp_path)
