"""The process that imports what ranks, and programs of this package, need and then forks them; see
`tests.support.forkserver`."""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import gc
import importlib
import os
import signal
import socket
import sys
import tempfile
import traceback
from collections.abc import Sequence
from multiprocessing import reduction
from multiprocessing.connection import Connection, wait

from tests.support.forkserver import Program
from tests.support.rank_process import die_with, serve

# Of a Python that was not told to import quickly, as this one was.
_USUAL_THRESHOLDS = 700, 10, 10
# More than a process has open.
_FREE_DESCRIPTORS = 200


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("listener", type=int, help="a socket that listens")
    parser.add_argument("lifeline", type=int, help="a pipe that lasts as long as our owner")
    parser.add_argument("--parent", type=int, help="die with this process, where the OS can do so")
    options = parser.parse_args()
    if options.parent is not None:
        die_with(options.parent)
    listener, lifeline = socket.socket(fileno=options.listener), Connection(options.lifeline)
    ranks: dict[Connection, set[int]] = {}
    has_imported = False
    while True:
        for ready in wait([listener, lifeline, *ranks]):
            if ready is lifeline:
                return
            if ready is listener:
                ranks[Connection(listener.accept()[0].detach())] = set()
                if not has_imported:
                    _import()
                    has_imported = True
                continue
            assert isinstance(ready, Connection)
            try:
                _answer(ready, ranks[ready], [listener, lifeline, *ranks])
            except (EOFError, OSError):
                _end(ranks.pop(ready))
                ready.close()


def _answer(pool: Connection, ranks: set[int], ends: Sequence[socket.socket | Connection]) -> None:
    kind, what = pool.recv()
    if kind == "poll":
        pid, status = os.waitpid(what, os.WNOHANG)
        ranks.discard(pid)
        pool.send(status if pid else -1)
        return
    if kind == "fork":
        received = [reduction.recv_handle(pool)]
    else:
        received = [reduction.recv_handle(pool) for _ in what.descriptors]
    nursery, pid = os.getpid(), os.fork()
    if pid:
        if kind == "fork":
            # Both sides do it: neither knows who is first, and a group is killed at any time.
            with contextlib.suppress(PermissionError):
                os.setpgid(pid, pid)
        for descriptor in received:
            os.close(descriptor)
        ranks.add(pid)
        pool.send(pid)
        return
    try:
        for other in ends:
            other.close()
        if kind == "fork":
            _be_rank(nursery, received[0], what)
        else:
            _be_program(what, received)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1)


def _end(ranks: set[int]) -> None:
    """End the ranks of a pool that has gone."""
    for pid in ranks:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def _import() -> None:
    import hypothesis  # noqa: F401 - what modules with tests import
    import pytest  # noqa: F401
    import torch

    # All of the package, and Lightning, which is the expensive part.
    import tests.support.parity
    import tests.support.training_cases  # noqa: F401
    from lightning_dlres.prefetch.cache import host  # noqa: F401

    torch.set_num_threads(1)
    threads = len(os.listdir("/proc/self/task")) if sys.platform == "linux" else 1
    assert threads == 1, f"imports have started {threads - 1} threads, and forks have none of them"
    # Pages with what is imported by now are never written to, and so stay shared.
    gc.collect()
    gc.freeze()
    gc.set_threshold(*_USUAL_THRESHOLDS)


def _be_rank(nursery: int, end: int, log: str) -> None:
    os.setpgid(0, 0)
    output = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.close(output)
    die_with(nursery)
    serve(Connection(end))


def _be_program(program: Program, received: Sequence[int]) -> None:
    """Call a function that ends the process itself."""
    os.setsid()
    # Out of the way first: one may have the number that another is to get.
    free = [fcntl.fcntl(descriptor, fcntl.F_DUPFD, _FREE_DESCRIPTORS) for descriptor in received]
    for descriptor in received:
        os.close(descriptor)
    for descriptor, number in zip(free, program.descriptors, strict=True):
        os.dup2(descriptor, number)
        os.close(descriptor)
    os.chdir(program.directory)
    os.environ.clear()
    os.environ.update(program.environ)
    # It may have been asked for, with other variables.
    tempfile.tempdir = None
    sys.argv[:] = program.argv
    module, name = program.function.split(":")
    getattr(importlib.import_module(module), name)()


if __name__ == "__main__":
    main()
