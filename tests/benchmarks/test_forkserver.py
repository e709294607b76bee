"""The fork server ends a process that it forked, whatever the process does at its end."""

from __future__ import annotations

import os
import signal
import sys
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


def write_to_descriptors() -> None:
    for number in map(int, sys.argv[1:]):
        os.write(number, b"%d " % number)


@pytest.mark.parametrize("numbers", [(200, 201), (201, 200), (1, 3), (300, 1)], ids=str)
def test_a_process_gets_its_descriptors_at_any_numbers(
    server: ForkServer, numbers: tuple[int, int]
) -> None:
    pipes = [os.pipe() for _ in numbers]
    writers = {number: write for number, (_, write) in zip(numbers, pipes, strict=True)}
    process = server.start(f"{__name__}:write_to_descriptors", list(map(str, numbers)), writers)
    for write in writers.values():
        os.close(write)
    received = []
    for read, _ in pipes:
        received.append(os.read(read, 100))
        os.close(read)
    assert process.wait() == 0
    assert received == [b"%d " % number for number in numbers]
