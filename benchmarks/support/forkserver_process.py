"""Process of the fork server; see `benchmarks.support.forkserver`."""

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

# Python's default thresholds of the garbage collector. The tests' sitecustomize sets higher ones.
_USUAL_THRESHOLDS = 700, 10, 10
# Smallest number of a file descriptor that no process here uses.
_FREE_DESCRIPTORS = 200
# Operation of prctl(2): the signal that the process gets when its parent ends.
_PR_SET_PDEATHSIG = 1
# CLONE_NEWNET of setns(2): a network namespace.
_NETWORK_NAMESPACE = 0x40000000


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("listener", type=int, help="descriptor of the listening socket")
    parser.add_argument("lifeline", type=int, help="descriptor of a pipe that the owner holds open")
    parser.add_argument("modules", nargs="*", help="modules to import")
    parser.add_argument("--parent", type=int, help="process to die with, where the OS supports it")
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
    """Let the kernel kill this process when its parent ends (Linux only).

    A thread that waits for the end of the parent would not run while a function holds the
    interpreter lock.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        # The parent may have ended before the call.
        if os.getppid() != parent:
            os.kill(os.getpid(), signal.SIGKILL)


def _answer(client: Connection, pids: set[int], ends: Sequence[socket.socket | Connection]) -> None:
    kind, content = client.recv()
    if kind == "poll":
        pid, status = os.waitpid(content, os.WNOHANG)
        pids.discard(pid)
        client.send(status if pid else -1)
        return
    received = [reduction.recv_handle(client) for _ in content.descriptors]
    session_read, session_write = os.pipe()
    server, pid = os.getpid(), os.fork()
    if not pid:
        _run(content, received, ends, server, session_write)
    os.close(session_write)
    # The process closes its end once it leads its session. Wait for this before the answer, because
    # the client may kill the process group at once.
    os.read(session_read, 1)
    for descriptor in (session_read, *received):
        os.close(descriptor)
    pids.add(pid)
    client.send(pid)


def _run(
    program: Program,
    received: Sequence[int],
    ends: Sequence[socket.socket | Connection],
    server: int,
    session_write: int,
) -> NoReturn:
    """Run the program in the forked process, and end the process.

    Args:
        program: The program.
        received: Descriptors that came with the request.
        ends: Connections of the server, which the process closes.
        server: Process id of the server.
        session_write: Descriptor that the process closes once it leads its session.
    """
    status = 1
    try:
        os.setsid()
        os.close(session_write)
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
        try:
            sys.stdout.flush()
            sys.stderr.flush()
        except BaseException:
            status = status or 1
        finally:
            # Otherwise the error would return into the server's loop, which would kill other forks.
            os._exit(status)


def _end(pids: set[int]) -> None:
    """Kill the process groups of a client whose connection has ended."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def _import(modules: Sequence[str]) -> None:
    # Imports create many objects and free few; collections would take a fifth of their time.
    gc.disable()
    for module in modules:
        importlib.import_module(module)
    threads = len(os.listdir("/proc/self/task")) if sys.platform == "linux" else 1
    assert threads == 1, (
        f"imports must start no thread, because forks lack all threads but one; got {threads - 1}"
    )
    # Exclude these objects from later collections, which write to the objects that they visit and
    # so would unshare their pages in the forks.
    gc.collect()
    gc.freeze()
    gc.set_threshold(*_USUAL_THRESHOLDS)
    gc.enable()


def _become(program: Program, received: Sequence[int]) -> None:
    """Set up the process as the program says, and call its function."""
    # Move the descriptors first above all numbers that they are to get, because one may have the
    # number that another is to get.
    above = max([_FREE_DESCRIPTORS, *(number + 1 for number in program.descriptors)])
    free = [fcntl.fcntl(descriptor, fcntl.F_DUPFD, above) for descriptor in received]
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
    # Forget the directory that the server determined from its own environment variables.
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
        raise OSError(ctypes.get_errno(), "cannot enter the network namespace", place.namespace)
    os.close(namespace)
    if place.cpus is not None:
        os.sched_setaffinity(0, place.cpus)


if __name__ == "__main__":
    main()
