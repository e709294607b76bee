"""Starter of ranks on the hosts of a testbed. It forks them from a server that has imported the
ranks' modules.

All forks of one server have the same memory layout, which affects their speed. To measure how the
speed differs between processes, a benchmark therefore starts ranks from several servers in turn.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import sys
import tempfile
import weakref
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO

from benchmarks.support.forkserver import (
    START_SECONDS,
    ForkedProcess,
    ForkServer,
    ForkServerError,
    ForkServerProcess,
    Place,
)
from benchmarks.support.rpc import RankRpc
from benchmarks.support.testbed import HostError, Testbed

# Directory in which `ip netns` keeps the namespaces.
_NAMESPACES = Path("/run/netns")
# Values for MASTER_PORT. These ports are free: only ranks run in the hosts' network namespaces.
_ports = itertools.count(29500)


class RankStarter:
    """Starter of ranks on the hosts of a testbed. The ranks end with it.

    Args:
        bed: The open testbed.
        modules: Modules to import; each has a function `main` that takes a `RankRpc`.

    Raises:
        HostError: If a module cannot be imported.
    """

    def __init__(self, bed: Testbed, modules: Sequence[str]) -> None:
        self._bed = bed
        # Not in a deeper directory: the path of a socket is limited to about 100 bytes.
        directory = tempfile.TemporaryDirectory(prefix="dlres-bench-")
        environ = {**os.environ, "OMP_NUM_THREADS": "1"}
        process = ForkServerProcess(Path(directory.name), [__name__, *modules], environ)
        self._finish = weakref.finalize(self, _end, process, directory)
        with _as_host_error():
            self._server = ForkServer(process.address)
            # The answer to the first request comes after the imports.
            self._server.start("os:getpid", [], {}, timeout=START_SECONDS).wait()

    def rendezvous(self) -> dict[str, str]:
        """Return the environment variables for the process group of new ranks."""
        return {
            "MASTER_ADDR": self._bed.hosts[0].address,
            "MASTER_PORT": str(next(_ports)),
            "GLOO_SOCKET_IFNAME": self._bed.interface,
        }

    def start(
        self, host: int, module: str, variables: Mapping[str, str], stderr: IO[bytes]
    ) -> RankProcess:
        """Run a module's `main` in a new process on a host.

        Args:
            host: Index of the host.
            module: One of the imported modules.
            variables: Environment variables, in addition to those of this process.
            stderr: File for the stderr of the process.

        Raises:
            HostError: If the fork server has ended or does not answer in time.
        """
        machine = self._bed.hosts[host]
        place = Place(
            str(_NAMESPACES / machine.namespace),
            str(machine.cgroup / "cgroup.procs"),
            machine.spec.cpus and tuple(machine.spec.cpus),
        )
        environ = {**os.environ, "OMP_NUM_THREADS": "1", **variables}
        (read, stdin), (stdout, write) = os.pipe(), os.pipe()
        try:
            with _as_host_error():
                process = self._server.start(
                    f"{__name__}:run_rank",
                    [module],
                    {0: read, 1: write, 2: stderr.fileno()},
                    environ=environ,
                    place=place,
                )
        finally:
            os.close(read)
            os.close(write)
        return RankProcess(process, stdin, stdout)

    def close(self) -> None:
        """End the fork server and all ranks."""
        self._finish()


class RankProcess:
    """Process of a rank.

    Attributes:
        stdin: Descriptor to write to the process's stdin; -1 after `kill`.
        stdout: Descriptor to read from the process's stdout; -1 after `kill`.
    """

    def __init__(self, process: ForkedProcess, stdin: int, stdout: int) -> None:
        self._process, self.stdin, self.stdout = process, stdin, stdout

    def kill(self) -> None:
        """Kill the process and wait for its end; a second call does nothing."""
        self._process.kill_group()
        if self.stdin >= 0:
            os.close(self.stdin)
            os.close(self.stdout)
        self.stdin = self.stdout = -1


def run_rank() -> None:
    """Run the `main` of the module that `sys.argv` names."""
    sys.modules[sys.argv[1]].main(RankRpc())


@contextlib.contextmanager
def _as_host_error() -> Iterator[None]:
    """Context manager that raises a `ForkServerError` as a `HostError`."""
    try:
        yield
    except ForkServerError as error:
        raise HostError(str(error)) from None


def _end(process: ForkServerProcess, directory: tempfile.TemporaryDirectory[str]) -> None:
    process.close()
    directory.cleanup()
