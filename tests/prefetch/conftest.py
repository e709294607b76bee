"""Fixtures of the prefetch tests: a small data set in files, and caches that start fast."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

import pytest

from benchmarks.support.forkserver import ForkServer
from lightning_dlres.prefetch.cache import launch
from tests.support.cache_processes import ForkedCacheProcess
from tests.support.rank_pool import ADDRESSES
from tests.support.sample_files import SAMPLES, bytes_of


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder with `SAMPLES` files in two folders below it, in the order of their sample_ids."""
    root = tmp_path_factory.mktemp("data") / "set"
    for number in range(SAMPLES):
        path = root / f"part{number // 50}" / f"sample {number:03d}.bin"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(bytes_of(number))
    (root / ".hidden").write_bytes(b"not a sample")
    return root


@pytest.fixture(autouse=True)
def _runtime_directory(own_runtime_directory: Path) -> None:
    pass


@pytest.fixture(scope="session")
def fork_server(request: pytest.FixtureRequest) -> Iterator[ForkServer]:
    """Fork server that has imported the modules of a cache process."""
    server = ForkServer(request.config.stash[ADDRESSES][0])
    yield server
    server.close()


@pytest.fixture(autouse=True)
def forked_caches(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fork the cache processes from a fork server instead of starting programs.

    The imports of a program take half a second, and these tests start many. Tests of other folders
    start programs, as users do.
    """

    def start(function: str, arguments: list[str], log: IO[bytes], lock: int) -> Any:
        read_end, write_end = os.pipe()
        try:
            descriptors = {0: read_end, 1: log.fileno(), 2: log.fileno(), lock: lock}
            fork_server = request.getfixturevalue("fork_server")
            return ForkedCacheProcess(
                fork_server.start(
                    function,
                    arguments,
                    descriptors,
                    environ=os.environ,
                    directory=os.getcwd(),
                ),
                write_end,
            )
        finally:
            os.close(read_end)

    monkeypatch.setattr(launch, "start_program", start)
