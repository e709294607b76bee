"""Fork server of the tests and benchmarks: its start, its client, and the forked processes.

The fork server is a process that has imported torch, Lightning and this package. These imports cost
a process 5 seconds of CPU time, but a fork of the server takes milliseconds. Tests kill ranks and
replace them, and benchmarks start many groups of ranks. `multiprocessing` has a fork server, too,
but its children cannot get file descriptors, environment variables or a network namespace of their
own.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from multiprocessing import reduction
from multiprocessing.connection import Client, Pipe
from pathlib import Path
from typing import TypeAlias

ROOT = Path(__file__).resolve().parents[2]
# Interval at which the end of a process is polled, in seconds.
_POLL_SECONDS = 0.01
# Time limit of a start with its imports, in seconds. Only a hang reaches it, even on a loaded
# machine.
START_SECONDS = 180.0


@dataclass(frozen=True)
class Place:
    """Host of a testbed, which a forked process enters before it calls its function.

    Attributes:
        namespace: Path of the network namespace.
        cgroup: Path of the cgroup's file `cgroup.procs`.
        cpus: Cores to run on; None for all.
    """

    namespace: str
    cgroup: str
    cpus: tuple[int, ...] | None = None


@dataclass(frozen=True)
class Program:
    """Description of a process to fork, as it is sent to the fork server.

    Attributes:
        function: "package.module:function", called without arguments.
        argv: `sys.argv` of the process.
        descriptors: Numbers, in the new process, of the file descriptors that follow the request.
        environ: Environment variables; None for the server's.
        directory: Working directory; None for the server's.
        place: Host of a testbed; None stays on this machine.
    """

    function: str
    argv: list[str]
    descriptors: list[int]
    # Not in error messages: it is long, and may hold secrets.
    environ: dict[str, str] | None = field(default=None, repr=False)
    directory: str | None = None
    place: Place | None = None


# ("start", the program) is answered with the pid; ("poll", pid) with the wait status, or -1 while
# the process runs.
Request: TypeAlias = tuple[str, int | Program]


class ForkServerError(Exception):
    """The fork server has ended or does not answer; the message has its output."""


class ForkServerProcess:
    """Process of the fork server, which ends with this process.

    It imports the modules when its first client connects.

    Args:
        directory: Directory for its socket and its log. The path must be short, because the path of
            a socket is limited to about 100 bytes.
        modules: Modules to import.
        environ: Environment variables of the server.
    """

    def __init__(self, directory: Path, modules: Sequence[str], environ: Mapping[str, str]) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self.address, log = directory / "socket", directory / "log"
        self.address.unlink(missing_ok=True)
        # The server ends when this process closes its end of the pipe, or ends itself.
        self._lifeline, theirs = Pipe()
        with socket.socket(socket.AF_UNIX) as listener, log.open("wb") as output:
            listener.bind(str(self.address))
            listener.listen()
            ends = [listener.fileno(), theirs.fileno()]
            module = f"{__name__}_process"
            command = [sys.executable, "-m", module, *map(str, ends), *modules]
            if threading.current_thread() is threading.main_thread():
                # Only for the main thread: Linux sends the parent-death signal when the thread that
                # started the process ends.
                command += ["--parent", str(os.getpid())]
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                cwd=ROOT,
                env=dict(environ),
                pass_fds=ends,
                # Ctrl-C must reach only this process, which then ends the server.
                start_new_session=True,
            )
        theirs.close()

    def close(self) -> None:
        """Kill the server, which on Linux also ends all processes that it forked."""
        self._process.kill()
        self._process.wait()
        self._lifeline.close()


class ForkServer:
    """Connection to a fork server. Processes that it forked end with the connection.

    Args:
        address: Path of the server's socket.

    Raises:
        ForkServerError: If the server cannot be reached.
    """

    def __init__(self, address: Path) -> None:
        self._log = address.parent / "log"
        self._lock = threading.Lock()
        try:
            self._connection = Client(str(address), "AF_UNIX")
        except OSError as error:
            raise ForkServerError(
                f"The fork server cannot be reached ({error}):\n{self._output()}"
            ) from None

    def alive(self) -> bool:
        """Return True if the server takes requests; if not, its forks have ended (on Linux)."""
        # The server sends only answers, so a readable connection between requests is at its end.
        return not self._connection.closed and not self._connection.poll()

    def start(
        self,
        function: str,
        arguments: Sequence[str],
        descriptors: Mapping[int, int],
        *,
        environ: Mapping[str, str] | None = None,
        directory: str | None = None,
        place: Place | None = None,
        timeout: float = START_SECONDS,
    ) -> ForkedProcess:
        """Start a process that calls a function and leads its own session.

        Args:
            function: "package.module:function".
            arguments: Arguments, as `sys.argv[1:]` of the process.
            descriptors: Number in the new process -> number in this process.
            environ: All environment variables of the process; None for those of the server.
            directory: Working directory; None for that of the server.
            place: Host of a testbed; None stays on this machine.
            timeout: Time limit of the server's answer, in seconds. Its imports count.

        Raises:
            ForkServerError: If the server has ended, or does not answer in time.
        """
        program = Program(
            function,
            [function, *arguments],
            list(descriptors),
            None if environ is None else dict(environ),
            directory,
            place,
        )
        return ForkedProcess(
            self, self.ask(("start", program), timeout, list(descriptors.values()))
        )

    def ask(self, request: Request, timeout: float, descriptors: Sequence[int] = ()) -> int:
        """Send a request with file descriptors, and return the answer.

        Raises:
            ForkServerError: If the server has ended, or does not answer within `timeout` seconds.
        """
        with self._lock:
            if not self.alive():
                raise ForkServerError(f"The fork server has ended:\n{self._output()}")
            try:
                self._connection.send(request)
                for descriptor in descriptors:
                    reduction.send_handle(self._connection, descriptor, None)
                if self._connection.poll(timeout):
                    answer: int = self._connection.recv()
                    return answer
            except (EOFError, OSError):
                pass
            # A late answer must not be taken for the answer to the next request.
            self.close()
            raise ForkServerError(
                f"The fork server has not answered {request} within {timeout:g} s, or has "
                f"ended:\n{self._output()}"
            )

    def close(self) -> None:
        """Close the connection, which ends the processes that it forked."""
        self._connection.close()

    def _output(self) -> str:
        return self._log.read_text(errors="replace") if self._log.exists() else "(nothing)"


class ForkedProcess:
    """Forked process, with those methods of `subprocess.Popen` that its users need."""

    # Time limit of an answer, and default of `wait`, in seconds.
    _TIMEOUT = 30.0

    def __init__(self, server: ForkServer, pid: int) -> None:
        self._server = server
        self.pid = pid
        self.returncode: int | None = None

    def poll(self) -> int | None:
        """Return the exit status, negative for a signal; None while the process runs."""
        if self.returncode is None:
            try:
                status = self._server.ask(("poll", self.pid), self._TIMEOUT)
            except ForkServerError:
                # The connection is closed, so the server has killed the process, or the kernel has.
                status = signal.SIGKILL
            self.returncode = None if status < 0 else os.waitstatus_to_exitcode(status)
        return self.returncode

    def wait(self, timeout: float = _TIMEOUT) -> int:
        """Wait until the process ends, and return the exit status.

        Raises:
            TimeoutExpired: If the process still runs after `timeout` seconds.
        """
        deadline = time.monotonic() + timeout
        while (status := self.poll()) is None:
            if time.monotonic() > deadline:
                raise subprocess.TimeoutExpired("forked process", timeout)
            time.sleep(_POLL_SECONDS)
        return status

    def send_signal(self, number: int) -> None:
        """Send a signal, if the process has not ended."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill_group(self) -> None:
        """Kill the process and its process group, and wait until the process has ended."""
        # Kill the group even if the process has ended: its children may still run.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        self.wait()
