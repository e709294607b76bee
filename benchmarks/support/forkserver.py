"""A process on each host of a testbed that has imported what ranks need, and forks them.

Importing torch and Lightning takes seconds of processor time, a fork milliseconds. So the first
host's process imports, and those of the others are forks of it that move there. Forks of one
process lay out their memory alike: where processes are compared, the starting ones are made anew,
too.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import itertools
import json
import os
import signal
import socket
import subprocess
import sys
import traceback
from collections.abc import Mapping, Sequence
from itertools import chain
from multiprocessing.connection import wait
from pathlib import Path
from tempfile import TemporaryFile
from typing import IO, Any

from benchmarks.support.rpc import Talk
from benchmarks.support.testbed import HostError, HostTimeoutError, Testbed

_ROOT = Path(__file__).parents[2]
_ORDER_BYTES, _STREAMS = 1 << 16, 3
_START_SECONDS = 120.0
# Where `ip netns` keeps them, and Linux's number of this kind of namespace.
_NAMESPACES, _NETWORK = Path("/run/netns"), 0x40000000
# The hosts' namespaces have no other user.
_ports = itertools.count(29500)


class Preloaded:
    """The starting processes on the first hosts of a testbed; what they have forked ends on its
    own.

    Args:
        bed: the testbed, open.
        hosts: number of hosts.
        modules: what to import; each has a function `main` that takes a `Talk`.

    Raises:
        HostError: one of them could not import that.
        HostTimeoutError: one of them is late.
    """

    def __init__(self, bed: Testbed, hosts: int, modules: Sequence[str]) -> None:
        self._bed = bed
        self._errors = [TemporaryFile() for _ in range(hosts)]  # noqa: SIM115
        self._sockets = [self._start(0, modules)]
        self._hear(0)
        for host in range(1, hosts):
            self._sockets.append(self._moved(host))

    def meeting(self) -> dict[str, str]:
        """Return the variables that tell a new group of ranks where to meet."""
        return {
            "MASTER_ADDR": self._bed.hosts[0].address,
            "MASTER_PORT": str(next(_ports)),
            "GLOO_SOCKET_IFNAME": self._bed.interface,
        }

    def fork(
        self, host: int, module: str, variables: Mapping[str, str], stderr: IO[bytes]
    ) -> Forked:
        """Run a module's `main` in a new process on a host, with more environment variables.

        Raises:
            HostError: the starting process has ended.
            HostTimeoutError: it does not answer in time.
        """
        order = json.dumps({"module": module, "variables": dict(variables)}).encode()
        with contextlib.ExitStack() as stack:
            (read, stdin), (stdout, write) = pipes = os.pipe(), os.pipe()
            for end in chain(*pipes):
                stack.callback(os.close, end)
            with contextlib.suppress(OSError):
                socket.send_fds(self._sockets[host], [order], [read, write, stderr.fileno()])
            return Forked(int(self._hear(host)), os.dup(stdin), os.dup(stdout))

    def close(self) -> None:
        """End the starting processes."""
        for end in self._sockets:
            end.close()

    def _start(self, host: int, modules: Sequence[str]) -> socket.socket:
        ours, theirs = socket.socketpair()
        ours.settimeout(_START_SECONDS)
        # Without the collector, which takes a fifth of the time of these imports.
        program = (
            "import gc; gc.disable(); from benchmarks.support.forkserver import serve; serve()"
        )
        self._bed.popen(
            host,
            [sys.executable, "-c", program, str(theirs.fileno()), *modules],
            stdin=subprocess.DEVNULL,
            stdout=self._errors[host],
            stderr=self._errors[host],
            cwd=_ROOT,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            pass_fds=[theirs.fileno()],
        )
        theirs.close()
        return ours

    def _moved(self, host: int) -> socket.socket:
        """Fork the first host's process, and move the fork to another host."""
        machine = self._bed.hosts[host]
        ours, theirs = socket.socketpair()
        ours.settimeout(_START_SECONDS)
        order = {"cpus": machine.spec.cpus and list(machine.spec.cpus)}
        namespace = os.open(_NAMESPACES / machine.namespace, os.O_RDONLY)
        descriptors = [theirs.fileno(), namespace, self._errors[host].fileno()]
        with theirs, contextlib.suppress(OSError):
            socket.send_fds(self._sockets[0], [json.dumps(order).encode()], descriptors)
        os.close(namespace)
        pid = self._hear(0)
        # The fork itself does not see the machine's cgroups.
        (machine.cgroup / "cgroup.procs").write_bytes(pid)
        return ours

    def _hear(self, host: int) -> bytes:
        try:
            said = self._sockets[host].recv(_ORDER_BYTES)
        except TimeoutError:
            # Its answer may come yet, and must not be taken for that to another order.
            self._sockets[host].close()
            what = f"host {host}: the ranks' parent was silent for {_START_SECONDS:g} s"
            raise HostTimeoutError(f"{what}:\n{self._said(host)}") from None
        if not said:
            raise HostError(f"host {host}: the ranks' parent has ended:\n{self._said(host)}")
        return said

    def _said(self, host: int) -> str:
        file = self._errors[host]
        return os.pread(file.fileno(), os.fstat(file.fileno()).st_size, 0).decode(errors="replace")


class Forked:
    """A rank's process: the ends of its stdin and stdout that are here."""

    def __init__(self, pid: int, stdin: int, stdout: int) -> None:
        self.stdin, self.stdout = stdin, stdout
        # Its parent reaps it at once: by its number, another process might be killed.
        try:
            self._process: int | None = os.pidfd_open(pid)
        except ProcessLookupError:
            self._process = None

    def kill(self) -> None:
        """Kill it, and wait for its end; may be called again."""
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._process, signal.SIGKILL)
            wait([self._process])
            os.close(self._process)
        if self.stdin >= 0:
            os.close(self.stdin)
            os.close(self.stdout)
        self._process, self.stdin, self.stdout = None, -1, -1


def serve() -> None:
    """Be a starting process: import, and fork whenever asked to."""
    parent = socket.socket(fileno=int(sys.argv[1]))
    for module in sys.argv[2:]:
        importlib.import_module(module)
    threads = len(os.listdir("/proc/self/task"))
    if threads > 1:
        raise RuntimeError(f"imports have started {threads - 1} threads, and forks have none")
    # What is imported by now is never looked at again, and its pages stay shared.
    gc.collect()
    gc.freeze()
    gc.enable()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    parent.sendall(b"ready")
    while True:
        order, streams, _, _ = socket.recv_fds(parent, _ORDER_BYTES, _STREAMS)
        if not order:
            return
        what = json.loads(order)
        pid = os.fork()
        if not pid and "module" in what:
            _become(parent, what, streams)
        if not pid:
            parent.close()
            parent = _move(what, streams)
            continue
        for stream in streams:
            os.close(stream)
        parent.sendall(str(pid).encode())


def _move(what: Mapping[str, Any], descriptors: Sequence[int]) -> socket.socket:
    """Move this process to another host, and return its parent's end there."""
    parent, namespace, errors = descriptors
    os.setsid()
    for number in (1, 2):
        os.dup2(errors, number)
    if ctypes.CDLL(None, use_errno=True).setns(namespace, _NETWORK):
        raise OSError(ctypes.get_errno(), "this process cannot move to another namespace")
    if what["cpus"]:
        os.sched_setaffinity(0, what["cpus"])
    os.close(namespace)
    os.close(errors)
    return socket.socket(fileno=parent)


def _become(parent: socket.socket, what: Mapping[str, Any], streams: Sequence[int]) -> None:
    """Be a rank, and end as one."""
    try:
        os.setsid()
        parent.close()
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        for number, stream in enumerate(streams):
            os.dup2(stream, number)
            os.close(stream)
        os.environ.update(what["variables"])
        sys.modules[what["module"]].main(Talk())
    except SystemExit as end:
        if end.code:
            print(end.code, file=sys.stderr)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        # Whoever waits for it hears of its end, not of a status.
        os._exit(0)
