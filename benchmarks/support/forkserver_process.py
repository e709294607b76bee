"""The fork server's process; see `benchmarks.support.forkserver`."""

from __future__ import annotations

import argparse
import contextlib
import ctypes
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
from typing import NoReturn

from benchmarks.support.forkserver import Place, Program

# Python's own, whatever a sitecustomize has set for quick imports.
_USUAL_THRESHOLDS = 700, 10, 10
# Above all descriptors that a process has open.
_FREE_DESCRIPTORS = 200
_PR_SET_PDEATHSIG = 1
# Linux's number of network namespaces in setns(2).
_NETWORK_NAMESPACE = 0x40000000


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("listener", type=int, help="a socket that listens")
    parser.add_argument("lifeline", type=int, help="a pipe that lasts as long as the owner")
    parser.add_argument("modules", nargs="*", help="what to import")
    parser.add_argument("--parent", type=int, help="die with this process, where the OS can do so")
    options = parser.parse_args()
    if options.parent is not None:
        die_with(options.parent)
    listener, lifeline = socket.socket(fileno=options.listener), Connection(options.lifeline)
    children: dict[Connection, set[int]] = {}
    has_imported = False
    while True:
        for ready in wait([listener, lifeline, *children]):
            if ready is lifeline:
                for pids in children.values():
                    _end(pids)
                return
            if ready is listener:
                children[Connection(listener.accept()[0].detach())] = set()
                if not has_imported:
                    _import(options.modules)
                    has_imported = True
                continue
            assert isinstance(ready, Connection)
            try:
                _answer(ready, children[ready], [listener, lifeline, *children])
            except (EOFError, OSError):
                _end(children.pop(ready))
                ready.close()


def die_with(parent: int) -> None:
    """Die with the parent: where a function holds the interpreter lock, no thread sees its end."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            os.kill(os.getpid(), signal.SIGKILL)


def _answer(client: Connection, pids: set[int], ends: Sequence[socket.socket | Connection]) -> None:
    kind, what = client.recv()
    if kind == "poll":
        pid, status = os.waitpid(what, os.WNOHANG)
        pids.discard(pid)
        client.send(status if pid else -1)
        return
    received = [reduction.recv_handle(client) for _ in what.descriptors]
    leads, has_led = os.pipe()
    server, pid = os.getpid(), os.fork()
    if not pid:
        _run(what, received, ends, server, has_led)
    os.close(has_led)
    # The process leads a group before its client hears of it, so that the group can be killed.
    os.read(leads, 1)
    for descriptor in (leads, *received):
        os.close(descriptor)
    pids.add(pid)
    client.send(pid)


def _run(
    program: Program,
    received: Sequence[int],
    ends: Sequence[socket.socket | Connection],
    server: int,
    has_led: int,
) -> NoReturn:
    """Be the forked process, and end as one."""
    status = 1
    try:
        os.setsid()
        os.close(has_led)
        for other in ends:
            other.close()
        die_with(server)
        _become(program, received)
        status = 0
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else int(bool(end.code))
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def _end(pids: set[int]) -> None:
    """End the processes of a client that has gone."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def _import(modules: Sequence[str]) -> None:
    # Imports make much and free little: the collector would take a fifth of their time.
    gc.disable()
    for module in modules:
        importlib.import_module(module)
    threads = len(os.listdir("/proc/self/task")) if sys.platform == "linux" else 1
    assert threads == 1, f"imports have started {threads - 1} threads, and forks have none of them"
    # The collector never looks at these objects again, so that their pages stay shared.
    gc.collect()
    gc.freeze()
    gc.set_threshold(*_USUAL_THRESHOLDS)
    gc.enable()


def _become(program: Program, received: Sequence[int]) -> None:
    """Call the program's function."""
    # Out of the way first: one may have the number that another is to get.
    free = [fcntl.fcntl(descriptor, fcntl.F_DUPFD, _FREE_DESCRIPTORS) for descriptor in received]
    for descriptor in received:
        os.close(descriptor)
    for descriptor, number in zip(free, program.descriptors, strict=True):
        os.dup2(descriptor, number)
        os.close(descriptor)
    if program.place is not None:
        _enter(program.place)
    if program.directory is not None:
        os.chdir(program.directory)
    if program.environ is not None:
        os.environ.clear()
        os.environ.update(program.environ)
    # The server may have looked for it, with other variables.
    tempfile.tempdir = None
    sys.argv[:] = program.argv
    module, name = program.function.split(":")
    getattr(importlib.import_module(module), name)()


def _enter(place: Place) -> None:
    """Move this process to a host of a testbed."""
    with open(place.cgroup, "w") as members:
        members.write(str(os.getpid()))
    namespace = os.open(place.namespace, os.O_RDONLY)
    if ctypes.CDLL(None, use_errno=True).setns(namespace, _NETWORK_NAMESPACE):
        raise OSError(ctypes.get_errno(), f"this process cannot enter {place.namespace}")
    os.close(namespace)
    if place.cpus is not None:
        os.sched_setaffinity(0, place.cpus)


if __name__ == "__main__":
    main()
