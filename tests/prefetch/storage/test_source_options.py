"""Arguments of file systems: they reach fsspec, and no message shows them."""

from __future__ import annotations

import json
import logging
import traceback
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pytest
from fsspec.implementations.memory import MemoryFileSystem

from lightning_dlres.cli.main import main
from lightning_dlres.core.errors import ConfigError, StorageError
from lightning_dlres.prefetch.cache.options import host_config
from lightning_dlres.prefetch.loading.loader import PrefetchLoader
from lightning_dlres.prefetch.storage.listings import open_reader
from lightning_dlres.prefetch.storage.registry import open_storage
from lightning_dlres.prefetch.storage.source_options import parse_storage_options

SECRET = "hunter2-secret"
OPTIONS = {"token": SECRET, "nested": {"endpoint": ["https://vault"]}, "retries": 3}


class Vault(MemoryFileSystem):
    """File system in memory that needs a token, and whose errors reveal the token."""

    protocol = "vault"
    store: dict[str, Any] = {}
    pseudo_dirs = [""]
    cachable = False

    def __init__(self, token: str = "", **options: Any) -> None:
        super().__init__(token=token, **options)
        self.options = {"token": token, **options}
        if token != SECRET:
            raise PermissionError(f"token {token} is wrong")

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return "/" + path.removeprefix("vault://").strip("/")

    def cat_file(self, path: str, *arguments: Any, **options: Any) -> bytes:
        if "broken" in path:
            raise RuntimeError(f"lost the connection that has the token {SECRET}")
        if "gone" in path:
            raise FileNotFoundError(f"{path}?token={SECRET}")
        data: bytes = super().cat_file(path, *arguments, **options)
        return data


@pytest.fixture(autouse=True)
def vault() -> Iterator[None]:
    fsspec.register_implementation("vault", Vault, clobber=True)
    Vault(SECRET).pipe({f"/data/{name}.bin": name.encode() for name in "abc"})
    yield
    Vault.store.clear()


def test_options_reach_the_file_system_and_are_not_shown(
    caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    caplog.set_level(logging.DEBUG)
    path = tmp_path / "options.json"
    path.write_text(json.dumps(OPTIONS))
    for options in (OPTIONS, path, str(path)):
        config = host_config("vault://data", storage="direct", storage_options=options)
        with closing(PrefetchLoader("vault", config, batch_size=3, shuffle=False)) as loader:
            (batch,) = loader
            assert [bytes(sample.data) for sample in batch] == [b"a", b"b", b"c"]
        assert SECRET not in f"{config!r} {config} {config.source!r} {loader!r}"
    cached = host_config("vault://data", storage_options=OPTIONS).source
    assert cached.storage == "files"
    with closing(open_storage(cached, tmp_path)) as storage:
        assert len(storage.table) == 3
    assert main(["store", "ls", "vault://data", "--storage-options", str(path)]) == 0
    printed = capsys.readouterr()
    assert "b.bin" in printed.out
    assert SECRET not in printed.out + printed.err + caplog.text


@pytest.mark.parametrize("name", ["x-broken", "x-gone"])
def test_errors_of_reads_do_not_show_the_token(name: str) -> None:
    Vault(SECRET).pipe(f"/data/{name}", b"x")
    reader = open_reader("vault://data", storage_options=OPTIONS)
    sample_ids = np.array([3], dtype=np.uint32)
    with pytest.raises((StorageError, OSError)) as caught:
        reader.read(sample_ids)
    text = "".join(traceback.format_exception(caught.value))
    assert SECRET not in text
    assert "***" in text
    assert repr(name) in text


def test_errors_of_listings_do_not_show_the_token() -> None:
    for options, shown in (({"token": "wrong-token"}, "***"), (OPTIONS, "data")):
        with pytest.raises(ConfigError) as caught:
            open_reader("vault://missing-data", storage_options=options)
        text = "".join(traceback.format_exception(caught.value))
        assert "wrong-token" not in text
        assert SECRET not in text
        assert shown in text


class Credentials:
    def __repr__(self) -> str:
        return f"Credentials({SECRET})"


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ([SECRET], "got a list"),
        ({"token": Credentials()}, "got a Credentials as 'token'"),
        ({"token": [float("nan")]}, "got a list as 'token'"),
        ({3: SECRET}, "got a key of type int"),
        ("/no/such/file.json", "No such file"),
    ],
)
def test_bad_options_are_refused_and_not_shown(options: Any, words: str) -> None:
    with pytest.raises(ConfigError, match=f"storage_options must be .*{words}") as caught:
        parse_storage_options(options)
    assert SECRET not in "".join(traceback.format_exception(caught.value))


def test_the_content_of_a_file_that_is_not_json_is_not_shown(tmp_path: Path) -> None:
    (tmp_path / "o.json").write_text(f"token = {SECRET}")
    with pytest.raises(ConfigError, match="is not JSON") as caught:
        parse_storage_options(tmp_path / "o.json")
    assert SECRET not in "".join(traceback.format_exception(caught.value))


@pytest.mark.parametrize("source", ["data", "tcp://127.0.0.1:1"])
def test_options_are_refused_for_sources_without_a_file_system(source: str) -> None:
    with pytest.raises(ConfigError, match="storage_options must be None for a source") as caught:
        host_config(source, storage_options=OPTIONS)
    assert SECRET not in str(caught.value)


def test_extensions_select_the_samples() -> None:
    Vault(SECRET).pipe("/data/NOTES.txt", b"no sample")
    reader = open_reader("vault://data", storage_options=OPTIONS, extensions=(".bin",))
    assert [reader.table.key(number) for number in range(len(reader.table))] == [
        "a.bin",
        "b.bin",
        "c.bin",
    ]


def test_a_bad_option_of_the_command_is_refused() -> None:
    assert main(["store", "ls", "data", "--storage-options", "x"]) == 2
