"""Ranks on the hosts of a testbed, forked of one process that has imported what they need.

Forks of one process lay out their memory alike: where processes are compared, the fork server is
made anew, too.
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

# Where `ip netns` keeps the namespaces.
_NAMESPACES = Path("/run/netns")
# The hosts' namespaces have no other user.
_ports = itertools.count(29500)


class RankStarter:
    """Starts ranks on the hosts of a testbed; they end with it.

    Args:
        bed: the testbed, open.
        modules: modules to import; each has a function `main` that takes a `RankRpc`.

    Raises:
        HostError: If one of them cannot be imported.
    """

    def __init__(self, bed: Testbed, modules: Sequence[str]) -> None:
        self._bed = bed
        # A socket's path must be short.
        directory = tempfile.TemporaryDirectory(prefix="dlres-bench-")
        environ = {**os.environ, "OMP_NUM_THREADS": "1"}
        process = ForkServerProcess(Path(directory.name), [__name__, *modules], environ)
        self._finish = weakref.finalize(self, _end, process, directory)
        with _as_host_error():
            self._server = ForkServer(process.address)
            # The first request waits for the imports.
            self._server.start("os:getpid", [], {}, timeout=START_SECONDS).wait()

    def meeting(self) -> dict[str, str]:
        """Return the variables that tell a new group of ranks where to meet."""
        return {
            "MASTER_ADDR": self._bed.hosts[0].address,
            "MASTER_PORT": str(next(_ports)),
            "GLOO_SOCKET_IFNAME": self._bed.interface,
        }

    def start(
        self, host: int, module: str, variables: Mapping[str, str], stderr: IO[bytes]
    ) -> RankProcess:
        """Run a module's `main` in a new process on a host, with more environment variables.

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
        """End the fork server, and the ranks with it."""
        self._finish()


class RankProcess:
    """A rank's process, with this side's ends of its stdin and stdout."""

    def __init__(self, process: ForkedProcess, stdin: int, stdout: int) -> None:
        self._process, self.stdin, self.stdout = process, stdin, stdout

    def kill(self) -> None:
        """Kill it, and wait for its end; may be called again."""
        self._process.kill_group()
        if self.stdin >= 0:
            os.close(self.stdin)
            os.close(self.stdout)
        self.stdin = self.stdout = -1


def run_rank() -> None:
    """Run the `main` of the module that is the process's argument."""
    sys.modules[sys.argv[1]].main(RankRpc())


@contextlib.contextmanager
def _as_host_error() -> Iterator[None]:
    """Context manager that turns errors of the fork server into those of a testbed."""
    try:
        yield
    except ForkServerError as error:
        raise HostError(str(error)) from None


def _end(process: ForkServerProcess, directory: tempfile.TemporaryDirectory[str]) -> None:
    process.close()
    directory.cleanup()
