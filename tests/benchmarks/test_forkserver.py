"""The fork server ends a process that it forked, whatever the process does at its end."""

from __future__ import annotations

import os
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.support.forkserver import ForkServer, ForkServerProcess


@pytest.fixture
def server() -> Iterator[ForkServer]:
    # Not in `tmp_path`, because the path of a socket is limited to about 100 bytes.
    with tempfile.TemporaryDirectory() as directory:
        # With buffers, as a process writes its last output only at its end.
        environ = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
        process = ForkServerProcess(Path(directory), [], environ)
        connection = ForkServer(process.address)
        yield connection
        connection.close()
        process.close()


def wait_for_a_signal() -> None:
    signal.pause()


def write_to_a_closed_pipe() -> None:
    print("lost")


def test_a_failed_flush_at_the_end_of_a_process_spares_the_others(server: ForkServer) -> None:
    other = server.start(f"{__name__}:wait_for_a_signal", [], {})
    read, write = os.pipe()
    os.close(read)
    process = server.start(f"{__name__}:write_to_a_closed_pipe", [], {1: write})
    os.close(write)
    status = process.wait()
    assert other.poll() is None
    assert status == 1
